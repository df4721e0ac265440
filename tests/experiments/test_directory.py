"""Files that are whole at any moment, and JSON that any reader takes."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.experiments.directory import Metrics, dumps, read_json, write_json


def test_json_of_what_experiments_hold():
    value = {
        "floats": (1.5, np.float32(0.1), jnp.float32(0.1), np.float64(0.1)),
        "ints": [np.int64(3), jnp.int32(3), True, np.bool_(False)],
        "arrays": [np.arange(3), jnp.ones((1, 2))],
        "other": [None, "‖x‖", Path("a/b")],
    }
    assert json.loads(dumps(value)) == {
        "floats": [1.5, float(np.float32(0.1)), float(np.float32(0.1)), 0.1],
        "ints": [3, 3, True, False],
        "arrays": [[0, 1, 2], [[1.0, 1.0]]],
        "other": [None, "‖x‖", "a/b"],
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, lambda x: np.asarray([x])])
def test_json_of_numbers_it_cannot_hold(number, kind):
    """Valid JSON without the NaN literal, from which float() reads the number back."""

    def refuse(literal):
        pytest.fail(f"{literal} is not JSON")

    stored = json.loads(dumps({"x": kind(number)}), parse_constant=refuse)["x"]
    assert str(float(stored[0] if isinstance(stored, list) else stored)) == str(number)


def test_json_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="JSON cannot hold <object"):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_complete_run_drops_lines_that_did_not_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    for complete, lines in ((False, 3), (True, 1)):
        metrics = Metrics(path, resume=True)
        metrics.write({"a": 1})
        metrics.close(complete=complete)
        assert len(path.read_text().splitlines()) == lines


def test_lines_that_differ_replace_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    metrics = Metrics(path, resume=True)
    metrics.write({"a": 1})
    metrics.write({"a": 5})
    assert path.read_text() == '{"a": 1}\n{"a": 5}\n'
    metrics.close(complete=True)


def test_fresh_run_starts_an_empty_stream(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n')
    Metrics(path, resume=False).close(complete=True)
    assert path.read_text() == ""
