"""Settings of encoders, and folders that `transformers` wrote and reads: the same outputs on both sides."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest

from jaxlab.nn.checkpoints import find_family, load, save

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
TEXT = {**SIZES, "vocab_size": 11, "max_position_embeddings": 12}
DISTILLED = {
    "vocab_size": 11,
    "max_position_embeddings": 12,
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 3,
    "n_heads": 2,
    "initializer_range": 0.3,
}
IMAGES = {**SIZES, "image_size": 12, "patch_size": 4}
DINO = {name: value for name, value in IMAGES.items() if name != "intermediate_size"}
# Class, class of the config, settings, and sizes of images besides the config's.
THEIRS = {
    "bert": ("BertModel", "BertConfig", TEXT, ()),
    "bert-tanh-gelu-classes": (
        "BertForSequenceClassification",
        "BertConfig",
        {**TEXT, "hidden_act": "gelu_new", "layer_norm_eps": 0.1, "num_labels": 3},
        (),
    ),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTILLED, ()),
    "distilbert-classes": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTILLED, ()),
    "vit": ("ViTModel", "ViTConfig", {**IMAGES, "pooler_output_size": 6}, ((20, 8),)),
    "vit-classes": ("ViTForImageClassification", "ViTConfig", {**IMAGES, "qkv_bias": False}, ()),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", IMAGES, ((24, 16),)),
    "clip-projection": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**IMAGES, "projection_dim": 6}, ()),
    "dinov2": ("Dinov2Model", "Dinov2Config", DINO, ((20, 8),)),
    "dinov2-classes": ("Dinov2ForImageClassification", "Dinov2Config", {**DINO, "num_labels": 3}, ()),
    "dinov2-registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", DINO, ((4, 20),)),
    "dinov2-registers-swiglu": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {**DINO, "use_swiglu_ffn": True, "num_register_tokens": 2},
        (),
    ),
}


@pytest.fixture(scope="module")
def peers():
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")
    return torch, transformers


def inputs_for(name, sizes):
    """Ours and theirs: padded sequences with segments, or images of each size."""
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    if "bert" in name:
        tokens = rng.integers(0, 11, (2, 7))
        mask = np.ones((2, 7), int)
        mask[1, 4:] = 0
        ours, theirs = {"padding_mask": mask}, {"attention_mask": torch.from_numpy(mask)}
        if not name.startswith("distilbert"):
            types = rng.integers(0, 2, (2, 7))
            ours, theirs = ours | {"token_types": types}, theirs | {"token_type_ids": torch.from_numpy(types)}
        return [(tokens, ours, {"input_ids": torch.from_numpy(tokens), **theirs})]
    pairs = []
    for size in ((12, 12), *sizes):
        images = rng.normal(size=(2, *size, 3)).astype(np.float32)
        ours, theirs = {}, {"pixel_values": torch.from_numpy(images).permute(0, 3, 1, 2)}
        if size != (12, 12) and not name.startswith("dinov2"):
            ours, theirs = {"interpolate_positions": True}, theirs | {"interpolate_pos_encoding": True}
        pairs.append((images, ours, theirs))
    return pairs


@pytest.mark.parametrize("name", THEIRS)
def test_their_folder_gives_their_outputs_and_comes_back(name, tmp_path, peers):
    torch, transformers = peers
    kind, config_kind, settings, sizes = THEIRS[name]
    torch.manual_seed(0)
    network = getattr(transformers, kind)(getattr(transformers, config_kind)(**settings)).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # norms, biases, registers and λ start where mistakes would not show
            parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(tmp_path / "theirs")

    model = load(tmp_path / "theirs")
    apply_fn = jax.jit(model.apply_fn, static_argnames=("hidden_states", "interpolate_positions"))
    every = tuple(range(model.config.num_layers + 1))
    expected = []
    for inputs, ours, theirs in inputs_for(name, sizes):
        output = apply_fn(model.params, inputs, **ours, hidden_states=every)
        with torch.no_grad():
            expected.append(network(**theirs, output_hidden_states=True))
        states = np.stack([state.numpy() for state in expected[-1].hidden_states])
        # Hidden states are of order ten; both sides are float32.
        np.testing.assert_allclose(output.hidden_states, states, atol=1e-4)
        compared = 0
        for field in ("last_hidden_state", "pooler_output", "logits", "image_embeds"):
            if (value := getattr(expected[-1], field, None)) is not None:
                np.testing.assert_allclose(getattr(output, field), value.numpy(), atol=1e-4, err_msg=field)
                compared += 1
        assert compared >= 1

    save(tmp_path / "ours", model)
    again = getattr(transformers, kind).from_pretrained(tmp_path / "ours").eval()
    written, read = network.state_dict(), again.state_dict()
    assert written.keys() == read.keys()
    assert all(torch.equal(written[key], read[key]) for key in written)
    with torch.no_grad():
        output = again(**inputs_for(name, sizes)[0][2], output_hidden_states=True)
    assert torch.equal(output.hidden_states[-1], expected[0].hidden_states[-1])
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [kind]
    assert find_family(written).read_config(written) == model.config


def test_the_image_side_of_a_whole_clip(tmp_path, peers):
    torch, transformers = peers
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 11}, vision_config={**IMAGES, "projection_dim": 512}, projection_dim=6
    )
    network = transformers.CLIPModel(config).eval()
    network.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    images, _, theirs = inputs_for("clip", ())[0]
    with torch.no_grad():
        pooled = network.vision_model(**theirs).pooler_output
        expected = network.visual_projection(pooled).numpy()
    np.testing.assert_allclose(model.apply_fn(model.params, images).image_embeds, expected, atol=1e-4)
    with pytest.raises(ValueError, match="has a side for texts too: save the image side as model_type 'clip_vision"):
        save(tmp_path / "ours", model)


def test_a_network_for_pre_training_is_read_without_its_head(tmp_path, peers):
    torch, transformers = peers
    torch.manual_seed(0)
    network = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)).eval()
    network.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert not model.config.pooler
    assert "pooler" not in model.params
    save(tmp_path / "ours", model)
    assert load(tmp_path / "ours").config == model.config


def settings(model_type, **changes):
    sizes = DISTILLED if model_type == "distilbert" else TEXT if model_type == "bert" else IMAGES
    return {"model_type": model_type, **sizes, **changes}


def read(model_type, **changes):
    given = {name: value for name, value in settings(model_type, **changes).items() if value != "absent"}
    return find_family(given).read_config(given)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' is not supported",
        ),
        ("bert", {"is_decoder": True}, "is_decoder=True is not supported, only False"),
        ("bert", {"hidden_act": "mish"}, "hidden_act must be one of gelu, .*; got 'mish'"),
        ("bert", {"num_hidden_layers": "absent"}, "config.json lacks 'num_hidden_layers'"),
        ("distilbert", {"dim": "absent"}, "config.json lacks 'dim'"),
        ("vit", {"patch_size": [4, 2]}, r"patch_size=\[4, 2\] is not supported, only squares"),
        ("vit", {"patch_size": 5}, "patch_size must divide image_size; got 5 and 12"),
        ("vit", {"num_attention_heads": 3}, "num_heads must divide hidden_size; got 3 and 16"),
        ("clip", {}, "config.json lacks 'vision_config'"),
        ("vit", {"architectures": ["ViTForMaskedImageModeling"]}, "unknown architecture ViTForMaskedImageModeling"),
    ],
)
def test_settings_that_the_network_lacks(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        read(model_type, **changes)


def test_settings_with_defaults_and_lists():
    config = read("vit", image_size=[12, 8], patch_size=[4, 4], torch_dtype="bfloat16")
    assert (config.image_shape, config.grid, config.dtype) == ((12, 8), (3, 2), "bfloat16")
    assert read("bert", architectures=["BertForSequenceClassification"]).num_labels == 2
    labelled = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert read("vit", **labelled).num_labels == 3
    assert not read("vit", **labelled).pooler
    assert read("dinov2_with_registers").num_register_tokens == 4
    assert read("dinov2").num_register_tokens is None


@pytest.mark.parametrize("model_type", ["bert", "vit"])
def test_a_network_without_pooler_and_classes_comes_back(model_type):
    config = dataclasses.replace(read(model_type), pooler=False)
    written = find_family({"model_type": model_type}).write_config(config)
    assert find_family({"model_type": model_type}).read_config({"model_type": model_type, **written}) == config


@pytest.mark.parametrize(
    ("read_as", "changes", "write_as", "message"),
    [
        ("dinov2_with_registers", {}, "dinov2", "'dinov2' has no register tokens"),
        ("dinov2", {}, "dinov2_with_registers", "'dinov2_with_registers' needs register tokens"),
        ("dinov2_with_registers", {"mask_token": False}, "dinov2_with_registers", "has a mask token, always"),
        ("dinov2", {"intermediate_size": 24}, "dinov2", "multiple of hidden_size; got 24 and 16"),
        ("distilbert", {"norm_eps": 1e-5}, "distilbert", "has norm_eps 1e-12, always; got 1e-05"),
        ("vit", {"num_labels": 3}, "vit", "has no pooler beside classes; got num_labels=3"),
    ],
)
def test_families_refuse_what_they_cannot_express(read_as, changes, write_as, message):
    config = dataclasses.replace(read(read_as), **changes)
    with pytest.raises(ValueError, match=message):
        find_family({"model_type": write_as}).write_config(config)


def test_old_names_of_norms_are_understood():
    family = find_family({"model_type": "bert"})
    assert family.read_name("bert.encoder.layer.0.output.LayerNorm.gamma") == "encoder.layer.0.output.LayerNorm.weight"
    assert family.written_name("encoder.layer.0.output.LayerNorm.weight").startswith("bert.encoder")
    assert family.written_name("classifier.weight") == "classifier.weight"
