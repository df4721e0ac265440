"""``jaxlab merge`` end to end: folders that transformers loads, the report, configuration files of mergekit, errors."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.cli import main
from jaxlab.editing.merging import Dare, TaskArithmetic, Ties, read_mergekit
from jaxlab.nn import DecoderConfig, decoder, lora
from jaxlab.nn.checkpoints import Model, TensorWriter, find_decoder_family, load, open_tensors, save, save_adapters

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=2,
    max_position_embeddings=32,
    initializer_range=0.2,
)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, two experts of it, and adapters of it."""
    directory = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: decoder.init(CONFIG, key)[1], jax.random.key(0))
    base = jax.tree.map(lambda leaf: random.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    for name, size in (("base", 0.0), ("code", 0.02), ("math", 0.02)):
        params = jax.tree.map(lambda leaf, s=size: leaf + np.float32(s) * random.normal(size=leaf.shape), base)
        params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
        save(directory / name, Model(config=CONFIG, params=params, family=find_decoder_family(CONFIG)))
    (directory / "base" / "tokenizer_config.json").write_text("{}")
    adapters = lora.init(base, jax.random.key(1), rank=2, target=("up_proj",))
    factors = adapters.factors["model"]["layers"]["mlp"]["up_proj"]["lora_B"]
    factors["weight"] = jnp.asarray(random.normal(0, 0.1, factors["weight"].shape), jnp.float32)
    save_adapters(adapters, directory / "lora")
    return directory


def words(folder, out, *more, experts=("code", "math"), method="task-arithmetic"):
    listed = [word for expert in experts for word in ("--expert", str(folder / expert))]
    return ["merge", "--base", str(folder / "base"), *listed, "--method", method, "--out", str(out), *more]


def test_a_folder_with_everything(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(folder, out, "--scale", "0.5", "--weights", "1,0.4", "--everything")) == 0
    printed = capsys.readouterr().out
    assert "merged 30 tensors by task-arithmetic, kept 0 of the base" in printed
    assert max(len(line) for line in printed.splitlines() if str(out) not in line and str(folder) not in line) <= 80
    assert (out / "merge.png").stat().st_size > 10_000
    assert (out / "tokenizer_config.json").read_text() == "{}"
    base, code, math, merged = (open_tensors(path) for path in [*(folder / n for n in ("base", "code", "math")), out])
    report = json.loads((out / "merge.json").read_text())
    assert report["options"] == {"scale": 0.5, "weights": [1.0, 0.4], "normalize": False}
    assert set(report["merged"]) == set(base)
    for name, of in report["merged"].items():
        expected = base[name] + 0.5 * (code[name] - base[name]) + 0.2 * (math[name] - base[name])
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)
        assert of["coefficients"] == pytest.approx([0.5, 0.2])
        assert of["norms"][0] == pytest.approx(np.linalg.norm(code[name] - base[name]), rel=1e-5)
    # Ours reads it, and so does transformers, with the same logits.
    tokens = np.arange(8)[None]
    model = load(out)
    logits = model.apply_fn(model.params, jnp.asarray(tokens))
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_what_is_left_out_is_told(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(folder, out, method="ties")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    report = json.loads((out / "merge.json").read_text())
    assert sum("embed_tokens" in name or "norm" in name or "lm_head" in name for name in report["kept"]) == 9
    for expert in report["experts"]:
        assert expert["not_merged_to_merged"] > 0.1
        assert (
            f"expert {expert['model']} moved {100 * expert['not_merged_to_merged']:.0f} % as far in what is" in printed
        )
    assert len(report["warnings"]) == 2
    assert len(report["merged"][UP]["thresholds"]) == 2


def test_adapters_and_draws(folder, tmp_path):
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        extra = ("--drop", "0.5", "--seed", str(seed), "--dtype", "bfloat16", "--shard-size", "0.00001")
        assert main(words(folder, tmp_path / out, *extra, experts=("lora", "math"), method="dare")) == 0
    a, b, c = (open_tensors(tmp_path / out) for out in "abc")
    np.testing.assert_array_equal(a[UP], b[UP])
    assert not np.array_equal(a[UP], c[UP])
    assert str(a[UP].dtype) == "bfloat16"
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1


YAML = """
merge_method: ties
base_model: {base}
models:
  - model: {base}
  - model: {code}
    parameters:
      weight: 0.5
      density: [0.2, 1.0]
  - model: {math}
    parameters:
      weight:
        - filter: mlp
          value: 0.3
        - value: 0.8
parameters:
  density: 0.6
  lambda: 0.9
  int8_mask: true
dtype: float32
tokenizer_source: base
"""


def configuration(folder, path, text=YAML):
    pytest.importorskip("yaml", reason="needs pyyaml")
    names = {name: str(folder / name) for name in ("base", "code", "math", "lora")}
    path.write_text(text.format(**names))
    return path


def test_a_configuration_file_of_mergekit(folder, tmp_path):
    path = configuration(folder, tmp_path / "config.yml")
    assert main(["merge", str(path), "--out", str(tmp_path / "out")]) == 0
    got, base, *experts = (open_tensors(p) for p in (tmp_path / "out", *(folder / n for n in ("base", "code", "math"))))
    densities = {0: 0.2, 1: 0.6, 2: 1.0}
    merge_one = jax.jit(lambda method, vectors: method.combine(vectors))
    chosen = [f"model.layers.{i}.{part}_proj.weight" for i in range(3) for part in ("mlp.up", "self_attn.q")]
    for name in ("model.embed_tokens.weight", *chosen):
        block = int(name.split(".")[2]) if "layers" in name else 0
        weights = (0.5, 0.3 if "mlp" in name else 0.8)
        method = Ties(0.9, weights, (densities[block], 0.6), scope="tensor", election="mergekit")
        vectors = jnp.stack([expert[name] - base[name] for expert in experts])
        np.testing.assert_allclose(got[name], base[name] + merge_one(method, vectors), atol=1e-6)


def test_the_same_file_in_mergekit(folder, tmp_path):
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    pytest.importorskip("mergekit", reason="needs mergekit (pip install --no-deps)")
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    path = configuration(folder, tmp_path / "config.yml", YAML.replace("tokenizer_source: base", ""))
    assert main(["merge", str(path), "--out", str(tmp_path / "ours")]) == 0
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(path.read_text())), str(tmp_path / "theirs"), options)
    ours, theirs = open_tensors(tmp_path / "ours"), open_tensors(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)


def test_other_methods_of_files(folder, tmp_path):
    text = "merge_method: {{}}\nbase_model: {base}\nmodels: [{{model: {code}}}, {{model: {base}+{lora}}}]\n"
    text += "parameters: {{weight: 0.5, density: 0.8}}\nout_dtype: torch.bfloat16\ndtype: float32\n"

    def read(method, **changes):
        filled = text.replace("{{}}", method)
        for old, new in changes.items():
            filled = filled.replace(old, new)
        return read_mergekit(configuration(folder, tmp_path / f"{method}.yml", filled))

    file = read("dare_ties")
    assert (file.dtype, file.experts) == ("bfloat16", (str(folder / "code"), str(folder / "lora")))
    (method,) = file.methods([UP]).values()
    assert isinstance(method, Dare)
    assert isinstance(method.then, Ties)
    assert (method.rescale, method.then.normalize, method.then.density) == ("l1", False, 1.0)
    assert method.drop == pytest.approx((0.2, 0.2))
    (method,) = read("dare_linear").methods([UP]).values()
    assert isinstance(method.then, TaskArithmetic)
    assert read("task_arithmetic", density="weight").methods([UP])[UP].coefficients(2) == [0.8, 0.8]
    linear = "merge_method: linear\nmodels:\n- {{model: {base}, parameters: {{weight: 1}}}}\n"
    linear += "- {{model: {code}, parameters: {{weight: 3}}}}\n"
    file = read_mergekit(configuration(folder, tmp_path / "linear.yml", linear))
    assert file.base == str(folder / "base")
    assert file.methods([UP])[UP].coefficients(1) == [0.75]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("merge_method: ties", "merge_method: slerp", "merge_method 'slerp' is not supported; supported are linear"),
        ("dtype: float32", "slices: []", "key slices is not supported"),
        ("int8_mask: true", "epsilon: 0.1", "key parameters.epsilon is not supported; supported are weight, density"),
        ("weight: 0.5", "gamma: 0.5", r"key models\[1\].parameters.gamma is not supported"),
        ("weight: 0.5", "density: 0.5", "weight is missing for "),
        ("weight: 0.5", "weight: heavy", "weight must be a number, got 'heavy'"),
        ("density: 0.6", "density: 1.6", r"config.yml: density must be in \[0, 1\], got 1.6 for "),
        ("tokenizer_source: base", "tokenizer_source: union", "tokenizer_source 'union' is not supported, only base"),
        ("base_model: {base}", "", "ties needs a base_model"),
        ("dtype: float32", "dtype: int8", "dtype must be float32, bfloat16 or float16, got 'int8'"),
        ("models:", "models: [", "is no YAML"),
        ("merge_method: ties", 'merge_method: !!bool "x"', "is no YAML: a value is not of the type that its tag names"),
        ("merge_method: ties", "merge_method: !!timestamp x", "is no YAML: a value is not of the type"),
        ("merge_method: ties", 'merge_method: !!int ""', "is no YAML: a value is not of the type"),
        ("merge_method: ties", "merge_method: !!python/name:os.system", "could not determine a constructor"),
        ("weight: 0.5", "weight: &w [{{filter: q, value: 1}}, {{value: *w}}]", "cannot be evaluated .* recursion"),
        ("weight: 0.5", "weight: 1" + 400 * "0", "a parameter cannot be evaluated for .* int too large"),
        ("density: [0.2, 1.0]", "density: [1" + 400 * "0" + ", 1]", "a parameter cannot be evaluated for"),
        ("merge_method: ties", "merge_method: [[[[[[[[1, 2], 3]]]]]]]", r"merge_method \[+\.\.\.\]+ is not supported"),
        ("merge_method: ties", "merge_method: []", r"merge_method \[\] is not supported"),
        ("  - model: {math}", "  - model: {math}+{lora}", "has adapters of another model than the base"),
    ],
)
def test_files_that_are_refused(folder, tmp_path, capsys, old, new, message):
    path = configuration(folder, tmp_path / "config.yml", YAML.replace(old, new))
    assert main(["merge", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "slerp"], "unknown method 'slerp'; the methods are task_arithmetic"),
        (["--method", "regmean"], "regmean needs inputs of every layer"),
        (["--density", "0.5"], "task-arithmetic has no option 'density'; it has scale, weights, normalize"),
        (["--method", "ties", "--density", "2"], r"density must be in \[0, 1\], got 2"),
        (["--weights", "1,2,3"], "--weights must be one number or 2, one an expert; got 3"),
        (["--include", "nothing"], "include pattern 'nothing' stands for no parameter"),
        (["--exclude", "(norm"], r"'\(norm' is no regular expression: missing \)"),
        (["--exclude", "norm", "--everything"], "argument --everything: not allowed with argument --exclude"),
        (["--weights", "1,heavy"], "argument --weights: invalid numbers value: '1,heavy'"),
        (["--expert", "nowhere/at/all"], "no such model file or folder: nowhere/at/all"),
        (["--seed", "-1"], "--seed must be between 0 and"),
        (["--shard-size", "0"], "--shard-size must be above 0 GB"),
        (["--shard-size", "inf"], "--shard-size must be above 0 GB and finite, got inf"),
        (["--colour"], "unrecognized arguments: --colour; see jaxlab merge --help"),
    ],
)
def test_bad_input(folder, tmp_path, capsys, more, message):
    assert main(words(folder, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_dare_of_files_keeps_something(folder, tmp_path, capsys):
    path = configuration(folder, tmp_path / "c.yml", YAML.replace("ties", "dare_ties").replace("[0.2, 1.0]", "[0, 1]"))
    assert main(["merge", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "density must be in (0, 1], got 0 for" in capsys.readouterr().err


def test_the_base_among_the_models_under_another_spelling(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    spelled = YAML.replace("  - model: {base}", f"  - model: ./{folder.name}/base/")
    file = read_mergekit(configuration(folder, tmp_path / "c.yml", spelled))
    assert file.experts == (str(folder / "code"), str(folder / "math"))
    adapters = YAML.replace("  - model: {math}", f"  - model: {folder.name}/base+{{lora}}")
    assert read_mergekit(configuration(folder, tmp_path / "d.yml", adapters)).experts[1] == str(folder / "lora")


def test_nothing_of_an_expert_is_kept(folder, tmp_path):
    out = tmp_path / "out"
    assert main(words(folder, out, "--density", "0,1", "--include", "up_proj", method="ties")) == 0
    report = json.loads((out / "merge.json").read_text())
    assert report["merged"][UP]["thresholds"][0] is None
    assert report["merged"][UP]["thresholds"][1] > 0
    base, math, merged = (open_tensors(path)[UP] for path in (folder / "base", folder / "math", out))
    np.testing.assert_allclose(merged - base, report["options"]["scale"] * (math - base), atol=1e-6)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_base_that_is_zero(folder, tmp_path, capsys):
    zero = tmp_path / "zero"
    with TensorWriter(zero, open_tensors(folder / "base").specs) as writer:
        for name, tensor in open_tensors(folder / "base").items():
            writer.write(name, np.zeros_like(tensor))
    (zero / "config.json").write_text((folder / "base" / "config.json").read_text())
    words_ = ["merge", "--base", str(zero), "--expert", str(folder / "code"), "--method", "weight-average"]
    assert main([*words_, "--out", str(tmp_path / "out")]) == 0
    norm = json.loads((tmp_path / "out" / "merge.json").read_text())["experts"][0]["norm"]
    assert f"merged: moved by a norm of {norm:.3g}" in capsys.readouterr().out
    assert (tmp_path / "out" / "merge.png").stat().st_size > 1_000


def test_folders_are_not_destroyed(folder, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert main(words(folder, out)) == 2
    assert "is not empty; --overwrite replaces the model in it" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert main(words(folder, out, "--overwrite")) == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert main(words(folder, folder / "base", "--overwrite")) == 2
    assert "is one of the models that are merged" in capsys.readouterr().err
    assert main(["merge", "--out", str(out), "--overwrite"]) == 2
    assert "--base is needed" in capsys.readouterr().err
    path = configuration(folder, tmp_path / "c.yml")
    assert main(["merge", str(path), "--out", str(tmp_path / "new"), "--scale", "1"]) == 2
    assert "--scale and a configuration file exclude each other" in capsys.readouterr().err
