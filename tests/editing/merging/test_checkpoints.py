"""Merging files: the same as in memory, in bounded memory, whatever the experts are, and no half-written model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import merging
from jaxlab.editing.merging import (
    DEFAULT_EXCLUDE,
    Dare,
    TaskArithmetic,
    Ties,
    combine,
    make_method,
    merge_checkpoints,
    merged_names,
    open_base,
    open_expert,
    streaming,
)
from jaxlab.nn import lora
from jaxlab.nn.checkpoints import TensorWriter, load_adapters, open_tensors, save_adapters

ROOT = Path(__file__).parents[3]
SETTINGS = {"model_type": "toy", "tie_word_embeddings": True}
SHAPES = {
    "model.embed_tokens.weight": (50, 8),
    "model.layers.0.mlp.up_proj.weight": (40, 60),
    "model.layers.0.norm.weight": (8,),
    "model.layers.1.mlp.up_proj.weight": (40, 60),
    "model.layers.1.mlp.up_proj.bias": (40,),
    "model.scale": (),
}
PROJECTIONS = [name for name in SHAPES if name.endswith("up_proj.weight")]


def write(folder, tensors, *, settings=SETTINGS, max_shard_size=10_000):
    specs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with TensorWriter(folder, specs, max_shard_size=max_shard_size) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def changed(base, seed, size=0.1):
    random = np.random.default_rng(seed)
    noise = {name: size * random.normal(size=tensor.shape) for name, tensor in base.items()}
    return {
        name: (tensor.astype(np.float32) + noise[name]).astype(tensor.dtype) if tensor.dtype != np.int64 else tensor
        for name, tensor in base.items()
    }


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folders(request, tmp_path_factory):
    directory, random = tmp_path_factory.mktemp("merging"), np.random.default_rng(0)
    base = {name: random.normal(size=shape).astype(jnp.dtype(request.param)) for name, shape in SHAPES.items()}
    base["model.positions"] = np.arange(5)
    experts = [changed(base, seed) for seed in (1, 2, 3)]
    paths = [write(directory / name, tensors) for name, tensors in zip("bxyz", [base, *experts], strict=True)]
    (paths[0] / "tokenizer.json").write_text('{"kind": "base"}')
    return [open_base(paths[0]), *experts], paths[1:]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(streaming, "PIECE", 2**10)
    monkeypatch.setattr(streaming, "_AHEAD", 2 * 2**10)


def opened(paths, base):
    return [open_expert(path, base) for path in paths]


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "ties_tensor", "tsv"])
def test_files_are_merged_as_trees_are(folders, tmp_path, small_pieces, name):
    (base, *experts), paths = folders
    method = Ties(scope="tensor", density=0.3) if name == "ties_tensor" else make_method(name)
    names = merged_names(base)
    assert set(names) == {"model.scale", *PROJECTIONS}
    steps = []
    summary = merge_checkpoints(
        base,
        opened(paths, base),
        tmp_path / "out",
        dict.fromkeys(names, method),
        max_shard_size=10_000,
        progress=lambda done, total: steps.append((done, total)),
    )
    got = open_tensors(tmp_path / "out")
    assert list(got.specs) == list(base.tensors.specs) or set(got) == set(base.tensors)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    start = {name: np.asarray(base.tensors[name], np.float32) for name in names}
    vectors = {n: jnp.stack([np.asarray(e[n], np.float32) - start[n] for e in experts]) for n in names}
    expected = combine(vectors, method)
    for n in base.tensors:
        before, after = base.tensors[n], got[n]
        assert after.dtype == before.dtype
        if n not in names:
            np.testing.assert_array_equal(after, before)
            assert not summary[n].merged
            continue
        merged = (start[n] + np.asarray(expected[n])).astype(before.dtype).astype(np.float32)
        # The same numbers but for the order of sums (TSV: of a decomposition), then rounded to the dtype of the file.
        tolerance = 2e-6 if before.dtype == np.float32 else 2**-7
        np.testing.assert_allclose(after.astype(np.float32), merged, rtol=tolerance, atol=5e-6)
        assert summary[n].vectors == pytest.approx(np.linalg.norm(vectors[n].reshape(3, -1), axis=1), rel=1e-5)
        rounded = after.astype(np.float32) - start[n]
        assert summary[n].change == pytest.approx(np.linalg.norm(rounded), rel=1e-5)
        assert summary[n].base == pytest.approx(np.linalg.norm(start[n]), rel=1e-5)
    done, totals = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def test_global_thresholds_are_of_all_tensors_together(folders, tmp_path, small_pieces):
    (base, *experts), paths = folders
    summary = merge_checkpoints(base, opened(paths, base), tmp_path, dict.fromkeys(merged_names(base), Ties()))
    thresholds = {summary[name].thresholds for name in merged_names(base)}
    assert len(thresholds) == 1
    for k, threshold in enumerate(thresholds.pop()):
        flat = [
            np.abs(np.asarray(experts[k][n], np.float32) - np.asarray(base.tensors[n], np.float32)).ravel()
            for n in merged_names(base)
        ]
        assert threshold == np.sort(np.concatenate(flat))[-int(0.2 * 4801)]


def test_draws_do_not_depend_on_the_other_tensors(folders, tmp_path, small_pieces):
    (base, *_), paths = folders
    key, name = jax.random.key(5), PROJECTIONS[0]
    for out, chosen in (("one", [name]), ("all", merged_names(base))):
        merge_checkpoints(base, opened(paths, base), tmp_path / out, dict.fromkeys(chosen, Dare()), key=key)
    one, everything = (open_tensors(tmp_path / out) for out in ("one", "all"))
    np.testing.assert_array_equal(one[name], everything[name])
    pieces = one[name].reshape(-1) != base.tensors[name].reshape(-1)
    assert not np.array_equal(pieces[:1000], pieces[1024:2024])
    with pytest.raises(ValueError, match="Dare draws: give a key"):
        merge_checkpoints(base, opened(paths, base), tmp_path / "none", {name: Dare()})


def test_dare_elects_in_pieces_as_in_one(folders, tmp_path, small_pieces):
    (base, *_), paths = folders
    methods = {n: make_method("dare_ties", drop=0.0, scale=0.7) for n in merged_names(base)}
    merge_checkpoints(base, opened(paths, base), tmp_path / "a", methods, key=jax.random.key(0))
    elects = Ties(0.7, density=1.0, scope="tensor", election="mergekit")
    merge_checkpoints(base, opened(paths, base), tmp_path / "b", dict.fromkeys(methods, elects))
    a, b = open_tensors(tmp_path / "a"), open_tensors(tmp_path / "b")
    for n in methods:
        np.testing.assert_array_equal(a[n], b[n])


def test_dtype_settings_and_files_beside_the_weights(folders, tmp_path):
    (base, *_), paths = folders
    out = tmp_path / "out"
    merge_checkpoints(base, opened(paths, base), out, {PROJECTIONS[0]: TaskArithmetic()}, dtype="float16")
    assert {str(spec.dtype) for spec in open_tensors(out).specs.values()} == {"float16", "int64"}
    assert json.loads((out / "config.json").read_text()) == {**SETTINGS, "dtype": "float16"}
    assert json.loads((out / "tokenizer.json").read_text()) == {"kind": "base"}


def test_lora_experts(folders, tmp_path, small_pieces):
    (base, *experts), paths = folders
    shapes = {"model": {"layers": {"mlp": {"up_proj": {"weight": jax.ShapeDtypeStruct((2, 40, 60), jnp.float32)}}}}}
    adapters = lora.init(shapes, jax.random.key(0), rank=3, alpha=6.0, target=("up_proj",))
    up = adapters.factors["model"]["layers"]["mlp"]["up_proj"]["lora_B"]
    up["weight"] = jax.random.normal(jax.random.key(1), up["weight"].shape)
    save_adapters(adapters, tmp_path / "lora")
    factors = load_adapters(tmp_path / "lora", shapes).factors["model"]["layers"]["mlp"]["up_proj"]
    change = 2.0 * np.asarray(factors["lora_B"]["weight"]) @ np.asarray(factors["lora_A"]["weight"])
    both = [open_expert(tmp_path / "lora", base), open_expert(paths[0], base)]
    method = TaskArithmetic(1.0, (0.5, 0.25))
    names = [*PROJECTIONS, "model.scale"]
    summary = merge_checkpoints(base, both, tmp_path / "out", dict.fromkeys(names, method))
    got = open_tensors(tmp_path / "out")
    for block, name in enumerate(PROJECTIONS):
        start, other = (np.asarray(t, np.float32) for t in (base.tensors[name], experts[0][name]))
        expected = (start + 0.5 * change[block] + 0.25 * (other - start)).astype(got[name].dtype)
        tolerance = 1e-5 if got[name].dtype == np.float32 else 2**-7
        np.testing.assert_allclose(got[name].astype(np.float32), expected.astype(np.float32), rtol=tolerance, atol=1e-5)
        assert summary[name].vectors[0] == pytest.approx(np.linalg.norm(change[block]), rel=1e-5)
    assert summary["model.scale"].vectors[0] == 0
    # Only adapters, and none of this tensor: it is the base's.
    merge_checkpoints(base, both[:1], tmp_path / "alone", dict.fromkeys(names, TaskArithmetic(1.0)))
    np.testing.assert_array_equal(open_tensors(tmp_path / "alone")["model.scale"], base.tensors["model.scale"])


def test_tied_heads_are_written_once(folders, tmp_path):
    (base, *experts), _ = folders
    embedded = {name: np.asarray(tensor) for name, tensor in base.tensors.items()}
    both = {**embedded, "lm_head.weight": embedded["model.embed_tokens.weight"]}
    tied = open_base(write(tmp_path / "tied", both))
    expert = open_expert(write(tmp_path / "expert", experts[0]), tied)  # without a head of its own
    names = merged_names(tied, exclude=())
    assert "lm_head.weight" not in names
    (note,) = merging.check_experts(base, [open_expert(tmp_path / "tied", base)], names)
    assert "is left out: the base ties it to its embeddings" in note
    merge_checkpoints(tied, [expert], tmp_path / "out", dict.fromkeys(names, TaskArithmetic(1.0)))
    assert "lm_head.weight" not in open_tensors(tmp_path / "out")
    # Untied, it is a tensor like any other.
    free = open_base(write(tmp_path / "free", both, settings={"model_type": "toy"}))
    assert "lm_head.weight" in merged_names(free, exclude=())
    assert "lm_head.weight" not in merged_names(free, exclude=DEFAULT_EXCLUDE)
    # An expert that ties what the base does not keeps the base's head, and this is told.
    (note,) = merging.check_experts(free, [expert], merged_names(free, exclude=DEFAULT_EXCLUDE))
    assert note == f"expert {expert.name} lacks lm_head.weight: the base's is kept"


def test_nothing_looks_complete_until_it_is(folders, tmp_path, monkeypatch):
    (base, *_), paths = folders
    names = dict.fromkeys(merged_names(base), TaskArithmetic())
    old = write(tmp_path / "out", {"w": np.ones(3, np.float32)})
    with pytest.raises(FileExistsError, match="is not empty"):
        merge_checkpoints(base, opened(paths, base), old, names)

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    for out in (old, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            merge_checkpoints(base, opened(paths, base), out, names, overwrite=True, progress=stop)
    assert list((tmp_path / "new").iterdir()) == []
    np.testing.assert_array_equal(open_tensors(old)["w"], np.ones(3))
    assert (old / "config.json").is_file()
    merge_checkpoints(base, opened(paths, base), old, names, overwrite=True)
    assert set(open_tensors(old)) == set(base.tensors)


def test_what_a_killed_merge_left_is_removed(folders, tmp_path):
    (base, *_), paths = folders
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00009.safetensors.partial").write_bytes(b"half")
    (out / "mine.partial").write_bytes(b"")
    names = dict.fromkeys(merged_names(base), TaskArithmetic())
    merge_checkpoints(base, opened(paths, base), out, names, overwrite=True)
    assert [path.name for path in out.glob("*.partial")] == ["mine.partial"]


def test_indices_of_other_formats_are_not_copied(tmp_path):
    tensors = {"w": np.arange(3, dtype=np.float32)}
    base = write(tmp_path / "base", tensors)
    (base / "pytorch_model.bin.index.json").write_text("{}")
    opened_base = open_base(base)
    expert = open_expert(write(tmp_path / "expert", {"w": tensors["w"] + 1}), opened_base)
    merge_checkpoints(opened_base, [expert], tmp_path / "out", {"w": TaskArithmetic(0.5)})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.filterwarnings("error")
def test_float64_is_merged_in_float32_and_stays_float64():
    base = {"w": np.linspace(-1, 1, 7)}
    expert = {"w": base["w"] + np.arange(7) / 8}
    merged = merging.merge_tensors(base, [expert], {"w": TaskArithmetic(0.5)})
    assert merged["w"].dtype == np.float64
    np.testing.assert_allclose(merged["w"], base["w"] + np.arange(7) / 16, atol=1e-7)


def test_what_does_not_fit_is_named(folders, tmp_path):
    (base, *experts), paths = folders
    name = PROJECTIONS[0]

    def check(tensors, message, *, method=None, chosen=(name,)):
        folder = write(tmp_path / f"e{len(list(tmp_path.iterdir()))}", tensors)
        methods = dict.fromkeys(chosen, method or TaskArithmetic())
        with pytest.raises(ValueError, match=message):
            merge_checkpoints(base, [open_expert(folder, base)], tmp_path / "out", methods)
        assert not (tmp_path / "out" / "config.json").exists()

    expert = experts[0]
    check({k: v for k, v in expert.items() if k != name}, f"lacks the tensor {name} of the base")
    check({**expert, "extra.weight": expert[name]}, "has the tensor extra.weight, which the base lacks")
    check({**expert, name: expert[name][:, :-1]}, rf"{name} has shape \[40, 59\], but \[40, 60\] in the base")
    check({**expert, name: expert[name].astype(np.int8)}, f"{name} must hold floating-point numbers, got int8")
    broken = expert[name].copy()
    broken[3, 4] = np.nan
    check({**expert, name: broken}, f"{name} of expert .* holds numbers that are not finite")
    check(expert, "missing shall be merged, but the base has no such tensor", chosen=("missing",))
    check(expert, "model.positions shall be merged, but holds int64", chosen=("model.positions",))
    check(expert, "RegMean needs inputs of every layer", method=merging.RegMean())
    with pytest.raises(ValueError, match="at least one expert, got none"):
        merge_checkpoints(base, [], tmp_path / "out", {name: TaskArithmetic()})
    with pytest.raises(ValueError, match="is one of the models that are merged"):
        merge_checkpoints(base, opened(paths, base), paths[0], {name: TaskArithmetic()}, overwrite=True)
    # What is kept may hold anything.
    masked = {**expert, "model.scale": np.asarray(-np.inf, expert["model.scale"].dtype)}
    other = open_expert(write(tmp_path / "masked", masked), base)
    summary = merge_checkpoints(base, [other], tmp_path / "with-mask", {name: TaskArithmetic()})
    assert summary["model.scale"].vectors == (None,)
    # Another vocabulary is no obstacle where embeddings are not merged: it is told.
    more = {**expert, "model.embed_tokens.weight": np.zeros((52, 8), np.float32)}
    other = open_expert(write(tmp_path / "vocabulary", more), base)
    (note,) = merging.check_experts(base, [other], [name])
    assert "model.embed_tokens.weight" in note
    assert "[52, 8], but [50, 8] in the base: the base's is kept" in note
    summary = merge_checkpoints(base, [other], tmp_path / "merged", {name: TaskArithmetic()})
    assert summary["model.embed_tokens.weight"].vectors == (None,)


def test_folders_that_are_no_models(folders, tmp_path):
    (base, *_), _ = folders
    tmp_path.joinpath("empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        open_base(tmp_path / "empty")
    quantised = write(tmp_path / "q", {"w": np.ones(3, np.float32)}, settings={"quantization_config": {"bits": 4}})
    with pytest.raises(ValueError, match="holds quantised weights"):
        open_expert(quantised, base)
    with pytest.raises(FileNotFoundError, match="no such model"):
        open_base(tmp_path / "missing")


PEAK = """
import jax, sys, threading
from pathlib import Path
from jaxlab.editing.merging import *

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

def merged(folder, name):
    base = open_base(folder / "b")
    experts = [open_expert(folder / path, base) for path in "xy"]
    methods = dict.fromkeys(merged_names(base), METHODS[name])
    merge_checkpoints(base, experts, folder / ("out-" + name), methods, key=jax.random.key(0))

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

METHODS = {"passes and pieces": Ties(), "whole": Dare(rescale="l1")}
for name in METHODS:
    merged(Path(sys.argv[1]), name)  # programs are compiled, and the allocator keeps what a small model needs
    before, peak, done = anonymous(), 0, threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    merged(Path(sys.argv[2]), name)
    done.set()
    watcher.join()
    print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc (Linux)")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Beyond what four tensors need, 40 need less than half of one model more, of the four that are open."""
    random = np.random.default_rng(0)
    for folder, layers in (("small", 4), ("large", 40)):
        base = {f"model.layers.{i}.mlp.up_proj.weight": random.random((512, 1024), np.float32) for i in range(layers)}
        for path in "bxy":
            tensors = {name: tensor + np.float32(random.random()) for name, tensor in base.items()}
            write(tmp_path / folder / path, tensors, max_shard_size=50_000_000)
    words = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    # Large buffers go back to the system when they are let go: what is measured is what is held.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=True)
    of_model = layers * 2  # MiB
    assert all(float(grown) < of_model / 2 for grown in done.stdout.split()), done.stdout
