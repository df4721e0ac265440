"""LD-FPG: symmetries, frozen statistics, pooling, learning, chunks, the dihedral loss, bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics.molecules import (
    AutoencoderSettings,
    align,
    continue_decoder,
    continue_encoder,
    decode,
    encode,
    fit_autoencoder,
    freeze_encoder,
    nearest_neighbors,
    neighbor_laplacian,
    prepare_frames,
    root_mean_square_deviation,
    start_decoder,
    start_encoder,
)
from jaxlab.dynamics.molecules.autoencoder import _decode, embed_atoms, init_encoder

SETTINGS = AutoencoderSettings(
    pooled=(4, 4),
    decoder_layers=3,
    decoder_width=32,
    encoder_learning_rate=5e-3,
    decoder_learning_rate=5e-3,
    batch_size=16,
)


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """A chain of nine atoms that bends, turned and moved at random."""
    rng = np.random.default_rng(0)
    bend = rng.uniform(-0.5, 0.5, (64, 1, 1))
    angle = np.arange(9)[None, :, None] * bend
    step = 1.5 * np.concatenate([np.cos(angle), np.sin(angle), np.full_like(angle, 0.3) * np.array(1.0)], axis=2)
    chain = np.cumsum(step, axis=1) + 0.02 * rng.normal(size=(64, 9, 3))
    rotations = np.linalg.qr(rng.normal(size=(64, 3, 3)))[0]
    rotations *= np.sign(np.linalg.det(rotations))[:, None, None]
    return (np.einsum("fij,faj->fai", rotations, chain) + rng.normal(size=(64, 1, 3))).astype(np.float32)


@pytest.fixture(scope="module")
def autoencoder(frames):
    return fit_autoencoder(jax.random.key(0), frames, SETTINGS, encoder_steps=300, decoder_steps=300)


def test_frames_are_reconstructed(frames, autoencoder):
    aligned = np.asarray(align(frames, autoencoder.reference))
    found = decode(autoencoder, encode(autoencoder, frames))
    error = float(root_mean_square_deviation(found, aligned).mean())
    spread = float(root_mean_square_deviation(aligned.mean(0), aligned).mean())
    assert error < 0.4 * spread
    assert autoencoder.width == 16


def test_a_frame_decodes_alone_as_within_a_batch_whatever_the_chunk(frames, autoencoder):
    z = encode(autoencoder, frames, chunk=7)
    np.testing.assert_allclose(z, encode(autoencoder, frames), atol=1e-5)
    whole = decode(autoencoder, z)
    np.testing.assert_allclose(decode(autoencoder, z[5:6]), whole[5:6], atol=1e-5)
    np.testing.assert_allclose(decode(autoencoder, z, chunk=11), whole, atol=1e-5)
    mixed = np.concatenate([z[5:6], 10 + z])
    np.testing.assert_allclose(decode(autoencoder, mixed)[:1], whole[5:6], atol=1e-5)


def test_memory_of_a_chunk_is_three_layers_of_it(autoencoder):
    """What the compiler sets aside while a chunk is decoded; no program ever holds more frames than a chunk."""
    leaves, structure = jax.tree.flatten(autoencoder)
    decoded = jax.jit(lambda leaves, z: _decode(jax.tree.unflatten(structure, leaves), z))
    for chunk in (64, 512):
        compiled = decoded.lower(leaves, jnp.zeros((chunk, autoencoder.width))).compile()
        needed = compiled.memory_analysis().temp_size_in_bytes
        assert 0 < needed <= 3 * chunk * 9 * SETTINGS.decoder_width * 4


def test_latents_do_not_see_rigid_motion(frames, autoencoder):
    turned = frames[:, :, [1, 2, 0]] + 3  # a proper rotation
    np.testing.assert_allclose(encode(autoencoder, turned), encode(autoencoder, frames), atol=2e-3)


def test_embedding_follows_a_permutation_of_the_atoms(frames):
    params, statistics = init_encoder(jax.random.key(0), SETTINGS)
    x = jnp.asarray(frames[:3])
    order = np.random.default_rng(1).permutation(9)

    def embed(x):
        found, _ = embed_atoms(params, statistics, x, neighbor_laplacian(nearest_neighbors(x, 4)))
        return found

    embedded = embed(x)
    np.testing.assert_allclose(embed(x[:, order]), embedded[:, order], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=-1), 1, atol=1e-5)


def test_running_statistics_are_those_of_torch(frames):
    """One step with momentum 0.1 from mean 0 and variance 1; the variance that is kept is the unbiased one."""
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    from jaxlab.dynamics.molecules.autoencoder import _batch_norm

    x = np.random.default_rng(2).normal(size=(5, 9, 4)).astype(np.float32) * 2 + 1
    norm = {"scale": jnp.full(4, 1.5), "bias": jnp.full(4, 0.2)}
    running = {"mean": jnp.zeros(4), "variance": jnp.ones(4)}
    layer = torch.nn.BatchNorm1d(4)
    with torch.no_grad():
        layer.weight.fill_(1.5)
        layer.bias.fill_(0.2)
        expected = layer(torch.tensor(x.reshape(-1, 4))).numpy().reshape(x.shape)
    found, running = _batch_norm(norm, running, jnp.asarray(x), training=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(running["mean"], layer.running_mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(running["variance"], layer.running_var.numpy(), atol=1e-5)
    layer.eval()
    with torch.no_grad():
        expected = layer(torch.tensor(x.reshape(-1, 4))).numpy().reshape(x.shape)
    np.testing.assert_allclose(_batch_norm(norm, running, jnp.asarray(x), training=False)[0], expected, atol=1e-5)


def test_residues_are_pooled_apart(frames):
    settings = dataclasses.replace(SETTINGS, pooling="residue", pooled=(1, 3))
    molecule = prepare_frames(frames, residues=[0] * 4 + [1] * 5, settings=settings)
    autoencoder = freeze_encoder(start_encoder(jax.random.key(0), settings), molecule, settings)
    assert autoencoder.width == 2 * 3
    z = encode(autoencoder, frames)
    x = jnp.asarray(align(frames, autoencoder.reference))
    embedding, _ = embed_atoms(
        autoencoder.encoder, autoencoder.encoder_statistics, x, neighbor_laplacian(nearest_neighbors(x, 4))
    )
    columns = np.asarray(autoencoder.columns)
    expected = np.concatenate(
        [np.asarray(embedding)[:, part].mean(1) @ columns.T for part in (slice(4), slice(4, 9))], 1
    )
    np.testing.assert_allclose(z, expected, atol=1e-5)


def test_dihedrals_can_be_learnt(frames):
    """The loss of the dihedrals comes on top, on every batch with a share of one, and has a finite gradient."""
    plain = dataclasses.replace(SETTINGS, batch_size=8)
    weighted = dataclasses.replace(plain, dihedral_weight=1.0, histogram_weight=0.1, dihedral_share=1.0)
    molecule = prepare_frames(frames, settings=plain)
    autoencoder = freeze_encoder(start_encoder(jax.random.key(0), plain), molecule, plain)
    z = encode(autoencoder, frames)
    quadruples = [[0, 1, 2, 3], [3, 4, 5, 6]]

    def first_loss(settings, **options):
        state = start_decoder(jax.random.key(1), autoencoder, settings)
        state, losses = continue_decoder(
            state, autoencoder, molecule, z, jax.random.key(2), settings, steps=3, **options
        )
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))
        return float(losses[0])

    without = first_loss(plain)
    assert first_loss(weighted, quadruples=quadruples) > without + 0.01
    assert first_loss(plain, quadruples=quadruples) == without
    with pytest.raises(ValueError, match="a weight for dihedrals needs their quadruples of atoms"):
        first_loss(weighted)


def test_training_continues_bit_for_bit(frames):
    molecule = prepare_frames(frames, settings=SETTINGS)
    first, _ = continue_encoder(
        start_encoder(jax.random.key(0), SETTINGS), molecule, jax.random.key(1), SETTINGS, steps=5
    )
    whole, _ = continue_encoder(first, molecule, jax.random.key(2), SETTINGS, steps=5)
    again, _ = continue_encoder(jax.tree.map(np.asarray, first), molecule, jax.random.key(2), SETTINGS, steps=5)
    jax.tree.map(np.testing.assert_array_equal, whole, again)


def test_bad_frames_and_latents_are_refused(frames, autoencoder):
    with pytest.raises(ValueError, match=r"frames must be \[frame, 9 atoms, 3\], .* got shape \(64, 8, 3\)"):
        encode(autoencoder, frames[:, :8])
    with pytest.raises(ValueError, match=r"latents must be \[frame, 16\], as the pooling gives, got \(2, 15\)"):
        decode(autoencoder, np.zeros((2, 15)))
    broken = frames.copy()
    broken[60, 3, 1] = np.nan
    with pytest.raises(ValueError, match="must be finite; 1 of its values"):
        encode(autoencoder, broken, chunk=16)
    with pytest.raises(ValueError, match="frames must be finite"):
        prepare_frames(broken)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        encode(autoencoder, frames, chunk=0)
    with pytest.raises(ValueError, match="latents from 22 on must be finite; 1 of its values"):
        decode(autoencoder, np.where(np.arange(480).reshape(30, 16) == 400, np.nan, 0), chunk=11)
    with pytest.raises(ValueError, match="there is no frame"):
        encode(autoencoder, frames[:0])
    with pytest.raises(ValueError, match="4 neighbours of each atom need at least 5 atoms"):
        prepare_frames(frames[:, :4])
    with pytest.raises(ValueError, match="one residue for each of the 9 atoms is needed"):
        prepare_frames(frames, residues=[0] * 8)
    with pytest.raises(ValueError, match=r"pooled must be two sizes of at least 1, got \(0, 2\)"):
        AutoencoderSettings(pooled=(0, 2))


def test_coinciding_atoms_train_without_nan(frames):
    doubled = frames.copy()
    doubled[:, 4] = doubled[:, 3]
    molecule = prepare_frames(doubled, settings=SETTINGS)
    state, losses = continue_encoder(
        start_encoder(jax.random.key(0), SETTINGS), molecule, jax.random.key(1), SETTINGS, steps=5
    )
    assert np.all(np.isfinite(losses))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))
