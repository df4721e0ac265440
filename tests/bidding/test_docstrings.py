"""The examples of the module docstrings run as they stand, and come to what their comments say."""

import re
import textwrap

import pytest

from jaxlab.bidding import agents, auctions, campaign, estimators, l2fob, offline

MODULES = (agents, auctions, campaign, estimators, l2fob, offline)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_example_runs(module, capsys):
    (block,) = re.findall(r"::\n\n((?:    .*\n|\n)+)", module.__doc__)[:1]
    scope: dict = {}
    exec(textwrap.dedent(block), scope)
    if module is offline:
        assert float(capsys.readouterr().out) == pytest.approx(172, abs=0.5)
    if module is agents:
        assert 0 < float(scope["trace"].cost.sum()) <= 20
    if module is campaign:
        assert scope["traces"].cost.shape == (3, 500)
        assert float(scope["traces"].cost.sum(-1).min()) > 1
