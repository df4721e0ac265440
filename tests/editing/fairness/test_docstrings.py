"""The examples of the module docstrings run as they stand, and come to what their comments say."""

import re
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.editing import fairness
from jaxlab.editing.fairness import bounds, group_statistics, subgroups, sweep
from jaxlab.editing.task_vectors import apply, task_vectors


@pytest.mark.filterwarnings("ignore:group . has")
@pytest.mark.parametrize(
    "module", [bounds, sweep, subgroups, "group_statistics"], ids=lambda m: getattr(m, "__name__", m).rpartition(".")[2]
)
def test_example_runs(module):
    text = group_statistics_module().__doc__ if module == "group_statistics" else module.__doc__
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", text)
    example = next(block for block in blocks if "membership" in block and "=" in block and "≤" not in block)
    scope = {"jax": jax, "jnp": jnp, "optax": optax, "warnings": warnings, "apply": apply}
    scope |= {"task_vectors": task_vectors, **{name: getattr(fairness, name) for name in fairness.__all__}}
    exec(textwrap.dedent(example), scope)
    if module == "group_statistics":
        assert float(fairness.demographic_parity_difference(scope["statistics"])) == pytest.approx(2 / 3)
        assert 0 <= float(scope["low"]) <= float(scope["high"]) <= 1
    if module is sweep:
        assert scope["chosen"].fulfilled
    if module is subgroups:
        assert scope["vectors"]["w"].shape == (3, 4)
    if module is bounds:
        assert 0 < float(scope["found"].parity) < float(scope["found"].parity_bound)
        assert not np.any(scope["found"].certified)


def group_statistics_module():
    """The function of that name hides the module in the package."""
    import sys

    assert callable(group_statistics)
    return sys.modules["jaxlab.editing.fairness.group_statistics"]
