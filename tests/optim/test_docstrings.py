"""The examples in the docstrings run and print what they say."""

import doctest

import pytest

from jaxlab.optim import aggregation, attacks, decentralized, mixing


@pytest.mark.parametrize("module", [aggregation, attacks, decentralized, mixing])
def test_examples(module) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
