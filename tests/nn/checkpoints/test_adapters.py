"""LoRA adapters in files of PEFT, with that library on the other side."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlab.nn import DecoderConfig, decoder, lora
from jaxlab.nn.checkpoints import load
from jaxlab.nn.checkpoints.adapters import load_adapters, save_adapters

SMALL = DecoderConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, initializer_range=0.5
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))
SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
OPTIONS = {
    "plain": {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"r": 4, "lora_alpha": 2, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "up_proj": 1},
        "alpha_pattern": {"o_proj": 1},
    },
    "some-blocks": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["v_proj", "k_proj"],
        "layers_to_transform": [0, 2],
    },
}


@pytest.fixture(scope="module")
def peers():
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="needs the peers extra: peft")
    return torch, transformers, peft


def randomise(torch, adapted):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.5)


@pytest.fixture(scope="module")
def llama(peers, tmp_path_factory):
    """A tiny network as a folder, ours, and its jitted function."""
    torch, transformers, _ = peers
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.5)).save_pretrained(folder)
    model = load(folder)
    return folder, model, jax.jit(model.apply_fn)


def logits_of(torch, network):
    with torch.no_grad():
        return network(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.mark.parametrize("name", OPTIONS)
def test_their_adapters_give_their_logits_and_come_back(name, llama, peers, tmp_path):
    torch, transformers, peft = peers
    folder, model, apply_fn = llama

    def base():
        return transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    adapted = peft.get_peft_model(base(), peft.LoraConfig(**OPTIONS[name])).eval()
    randomise(torch, adapted)
    adapted.save_pretrained(tmp_path / "theirs")
    expected = logits_of(torch, adapted)
    assert np.abs(expected - logits_of(torch, base())).max() > 0.1

    adapters = load_adapters(tmp_path / "theirs", model.params)
    merged = lora.merge(model.params, adapters)
    np.testing.assert_allclose(apply_fn(merged, TOKENS), expected, atol=1e-4)
    if name == "patterns":
        np.testing.assert_allclose(apply_fn(lora.apply(model.params, adapters), TOKENS), expected, atol=1e-4)
        ranks = {target.path.rpartition("/")[2]: target.ranks for target in adapters.targets}
        assert ranks == {"q_proj": (2, 3, 2), "o_proj": (2, 2, 2), "up_proj": (1, 1, 1)}

    save_adapters(adapters, tmp_path / "ours", base_model=str(folder), task_type="CAUSAL_LM")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits_of(torch, again), expected)


def test_a_prefix_that_our_paths_lack(peers, tmp_path):
    torch, transformers, peft = peers
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, max_position_embeddings=8, initializer_range=0.5)
    ).eval()
    network.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=["query", "dense"])
    adapted = peft.get_peft_model(network, config).eval()
    randomise(torch, adapted)
    adapted.save_pretrained(tmp_path / "theirs")
    expected = logits_of(torch, adapted)
    model = load(tmp_path / "base")
    adapters = load_adapters(tmp_path / "theirs", model.params)
    assert "pooler/dense" in [target.path for target in adapters.targets]
    output = jax.jit(model.apply_fn)(lora.apply(model.params, adapters), TOKENS)
    np.testing.assert_allclose(output.logits, expected, atol=1e-4)
    save_adapters(adapters, tmp_path / "ours", prefix="bert")
    names = [
        safetensors.numpy.load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("theirs", "ours")
    ]
    assert names[0].keys() == names[1].keys()


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_vision_networks_whose_names_are_not_those_of_their_files(name, peers, tmp_path):
    torch, transformers, peft = peers
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "image_size": 4, "patch_size": 2, "num_labels": 3}
    network = getattr(transformers, f"{name}ForImageClassification")(
        getattr(transformers, f"{name}Config")(**sizes, initializer_range=0.5)
    ).eval()
    network.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=2, lora_alpha=5, target_modules="all-linear")).eval()
    randomise(torch, adapted)
    adapted.save_pretrained(tmp_path / "theirs")
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)
    pixels = torch.from_numpy(np.moveaxis(images, -1, 1).copy())
    with torch.no_grad():
        expected = adapted(pixels).logits.numpy()
    model = load(tmp_path / "base")
    adapters = load_adapters(tmp_path / "theirs", model.params)
    assert len(adapters.targets) == 7, "four of the attention, two of the feed-forward layer, the classifier"
    output = jax.jit(model.apply_fn)(lora.apply(model.params, adapters), images)
    np.testing.assert_allclose(output.logits, expected, atol=1e-4)
    save_adapters(adapters, tmp_path / "ours", prefix=name.lower(), config=model.config)
    files = [
        safetensors.numpy.load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("theirs", "ours")
    ]
    assert files[0].keys() == files[1].keys()
    with pytest.raises(ValueError, match="encoder/layer/attention/attention/key is of a ViT or a DINOv2, which PEFT"):
        save_adapters(adapters, tmp_path / "ours")


@pytest.fixture
def written(tmp_path):
    """Shapes of a network, adapters of order one, and their folder."""
    params = jax.eval_shape(lambda: decoder.init(SMALL, jax.random.key(0))[1])
    adapters = jax.eval_shape(
        lambda key: lora.init(params, key, target=("q_proj", "lm_head"), rank=2, alpha=3.0), jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), adapters)
    save_adapters(adapters, tmp_path)
    return params, adapters, tmp_path


def change_settings(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


QUERY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


class TestFiles:
    def test_round_trip(self, written):
        params, adapters, folder = written
        again = load_adapters(folder, params)
        assert sorted(again.targets, key=str) == sorted(adapters.targets, key=str)
        jax.tree.map(np.testing.assert_array_equal, again.factors, adapters.factors)
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert (
            load_adapters(folder, params, dtype="bfloat16").factors["lm_head"]["lora_A"]["weight"].dtype == jnp.bfloat16
        )

    def test_names_and_settings(self, written):
        _, _, folder = written
        tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        assert tensors[QUERY.format(1, "A")].shape == (2, 8)
        assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (11, 2)
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (2, 3, "LORA")

    def test_bfloat16_is_written_as_it_is(self, written, tmp_path):
        params, adapters, _ = written
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), adapters)
        save_adapters(narrow, tmp_path / "narrow")
        jax.tree.map(np.testing.assert_array_equal, load_adapters(tmp_path / "narrow", params), narrow)


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"use_dora": True}, "use_dora=True is not supported, only plain LoRA"),
            ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
            ({"modules_to_save": ["score"]}, r"modules_to_save=\['score'\] is not supported"),
            ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
            ({"use_rslora": "no"}, "use_rslora must be true or false; got 'no'"),
            ({"peft_type": "IA3"}, "peft_type must be 'LORA'; got 'IA3'"),
            ({"r": "2"}, "the rank of .* must be an integer above 0; got '2'"),
            ({"lora_alpha": None}, "lora_alpha of .* must be a finite number; got None"),
            ({"rank_pattern": [1]}, r"rank_pattern must map patterns to numbers; got \[1\]"),
            ({"alpha_pattern": {"(": 2}}, r"alpha_pattern has '\(', which is no regular expression"),
            ({"init_lora_weights": ["eva"]}, r"init_lora_weights=\['eva'\] is not supported"),
            ({"r": 8}, r"tensor base_model.*lora_A.weight of .* has rank 2, but adapter_config.json says 8"),
        ],
    )
    def test_settings(self, written, changes, message):
        params, _, folder = written
        change_settings(folder, **changes)
        with pytest.raises(ValueError, match=message):
            load_adapters(folder, params)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda t: {name.replace("q_proj", "query"): value for name, value in t.items()},
                r"tensor base_model.*query.* changes model\.layers\.0.*query, which is no linear map of the network",
            ),
            (
                lambda t: {**t, QUERY.format(0, "A"): np.zeros((2, 9), np.float32)},
                r"tensor .*layers\.0.*q_proj\.lora_A\.weight of .* must have shape \[rank, 8\]; got \(2, 9\)",
            ),
            (
                lambda t: {name: value for name, value in t.items() if name != QUERY.format(0, "B")},
                r"has the tensor .*layers\.0.*lora_A\.weight but not the other factor",
            ),
            (
                lambda t: {**t, QUERY.format(0, "B"): np.zeros((8, 3), np.float32)},
                r"q_proj\.lora_B\.weight of .* has rank 3, but its lora_A has rank 2",
            ),
            (lambda t: {**t, QUERY.format(7, "A"): t[QUERY.format(0, "A")]}, "is for block 7, but the network has 2"),
            (
                lambda t: {**t, "base_model.model.score.weight": np.zeros((2, 8), np.float32)},
                r"score\.weight of .* is no factor of a linear map",
            ),
            (
                lambda t: {**t, QUERY.format(0, "A").replace(".weight", ".default.weight"): t[QUERY.format(0, "A")]},
                "are the same factor",
            ),
            (
                lambda t: {name: value.astype(np.int8) for name, value in t.items()},
                "must hold floating-point numbers; got int8",
            ),
            (lambda t: {QUERY.format("²", "A"): t[QUERY.format(0, "A")]}, "which is no linear map of the network"),
        ],
        ids=["unknown", "shape", "half", "ranks", "block", "layer", "twice", "integers", "digits"],
    )
    def test_tensors(self, written, change, message):
        params, _, folder = written
        change_tensors(folder, change)
        with pytest.raises(ValueError, match=message):
            load_adapters(folder, params)

    def test_missing_and_damaged_files(self, written):
        params, _, folder = written
        weights = folder / "adapter_model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-8])
        with pytest.raises(ValueError, match="is truncated"):
            load_adapters(folder, params)
        weights.unlink()
        with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors"):
            load_adapters(folder, params)
        (folder / "adapter_model.bin").write_bytes(b"anything")
        with pytest.raises(ValueError, match=r"a pickle \(adapter_model\.bin\), which can run any code"):
            load_adapters(folder, params)
        (folder / "adapter_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
            load_adapters(folder, params)
        (folder / "adapter_config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
            load_adapters(folder, params)
