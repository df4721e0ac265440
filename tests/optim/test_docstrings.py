"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest

from jaxlab.optim import aggregation, attacks, bilevel, decentralized, mixing

# The package has functions of the same names.
METHODS = [importlib.import_module(f"{bilevel.__name__}.{name}") for name in ("hypergradient", "br_fedbi")]


@pytest.mark.parametrize("module", [aggregation, attacks, decentralized, mixing, *METHODS], ids=lambda m: m.__name__)
def test_examples(module) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
