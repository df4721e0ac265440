"""The package itself: what importing it costs, and what the registry says of it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlab
from jaxlab.experiments import registry

IMPORTED = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def imported_by(statement: str) -> set[str]:
    """Modules that a statement loads in a fresh interpreter."""
    command = [sys.executable, "-c", IMPORTED.format(statement)]
    return set(
        subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(jaxlab.__file__).parents[1]
        ).stdout.split()
    )


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
