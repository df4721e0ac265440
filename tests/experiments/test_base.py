"""What an experiment sees: loops, checkpoints, claims, figures."""

import json
import math
import re
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import cli
from jaxlab.experiments import base
from jaxlab.experiments.base import PRESETS, Claim, Experiment, Run
from jaxlab.experiments.outcome import execute

CLAIMS = (Claim("falls", "The loss falls.", "<", 1.0), Claim("rate", "The rate is one half.", "in", (0.4, 0.6)))


class Moments(NamedTuple):
    first: jax.Array
    second: jax.Array


def make(out, *, resume=False, preset="quick") -> Run:
    return Run(CLAIMS, preset=preset, seed=0, out=out, resume=resume)


def double(carry, i):
    return carry * 2, {"sum": carry.sum(), "parts": (carry, [np.float64(i)])}


def test_loop_is_a_scan_of_chunks(tmp_path):
    """The carry goes through, outputs are stacked with their structure and dtypes."""
    carry, outputs = make(tmp_path).loop("double", double, jnp.ones(2), 3)
    np.testing.assert_array_equal(carry, [8, 8])
    np.testing.assert_array_equal(outputs["sum"], np.float32([2, 4, 8]))
    np.testing.assert_array_equal(outputs["parts"][0], np.float32([[1, 1], [2, 2], [4, 4]]))
    np.testing.assert_array_equal(outputs["parts"][1][0], np.float64([0, 1, 2]))
    assert outputs["sum"].dtype == np.float32
    assert outputs["parts"][1][0].dtype == np.float64


def rich_init():
    """A carry of everything a state is made of: nested types, a typed key, dtypes, numpy, nothing at all."""
    return {
        "key": jax.random.key(1),
        "moments": Moments(jnp.ones(3, jnp.bfloat16), jnp.zeros((2, 2))),
        "weak": jnp.asarray(0.0),
        "numpy": np.arange(3.0),
        "count": 0,
        "nothing": (),
    }


def rich_body(carry, i):
    key, now = jax.random.split(carry["key"])
    first = carry["moments"].first + jax.random.normal(now, (3,), jnp.bfloat16) * carry["weak"]
    second = carry["moments"].second + first.sum()
    carry = {
        "key": key,
        "moments": Moments(first, second),
        "weak": carry["weak"] * 0.5 + 1.0,
        "numpy": carry["numpy"] / 3,
        "count": carry["count"] + 1,
        "nothing": (),
    }
    return carry, {"first": first, "mean": second.mean(), "third": carry["numpy"]}


def assert_identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_interrupted_loop_resumes_bit_for_bit(tmp_path, stop):
    """Stopped in chunk ``stop``, the loop continues there, for any pytree, dtype and key; 5 is after the last chunk."""
    expected = make(tmp_path / "a").loop("rich", rich_body, rich_init(), 5)
    calls = []

    def stopping(carry, i):
        calls.append(i)
        if i == stop:
            raise KeyboardInterrupt
        return rich_body(carry, i)

    broken = make(tmp_path / "b")
    if stop < 5:
        with pytest.raises(KeyboardInterrupt):
            broken.loop("rich", stopping, rich_init(), 5)
    else:
        broken.loop("rich", stopping, rich_init(), 5)
    calls.clear()

    def counting(carry, i):
        calls.append(i)
        return rich_body(carry, i)

    resumed = make(tmp_path / "b", resume=True).loop("rich", counting, rich_init(), 5)
    assert calls == list(range(stop, 5))
    assert_identical(resumed, expected)


@pytest.fixture(autouse=True)
def _directories(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()


def test_any_error_keeps_what_is_finished(tmp_path):
    def failing(carry, i):
        if i == 2:
            raise ValueError("the corpus is empty")
        return double(carry, i)

    with pytest.raises(ValueError, match="the corpus is empty"):
        make(tmp_path).loop("double", failing, jnp.ones(2), 4)
    assert [path.name for path in (tmp_path / "checkpoint" / "double").iterdir() if path.is_dir()] == ["2"]


def test_checkpoints_in_between(tmp_path, monkeypatch):
    """Every so many seconds a state is on disk while the loop goes on; each replaces the one before."""
    monkeypatch.setattr(base, "CHECKPOINT_SECONDS", 0.0)
    seen = []

    def looking(carry, i):
        directory = tmp_path / "checkpoint" / "double"
        seen.append(sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.exists() else [])
        return double(carry, i)

    make(tmp_path).loop("double", looking, jnp.ones(2), 3)
    assert seen == [[], ["1"], ["2"]]


def test_donated_carry_falls_back_to_the_last_checkpoint(tmp_path, monkeypatch):
    """Interrupted while the carry is given away, there is nothing new to store and the older state stays."""
    step = jax.jit(lambda x: x * 2, donate_argnums=0)

    def donating(carry, i):
        if i == 2:
            monkeypatch.setattr(base, "CHECKPOINT_SECONDS", math.inf)
        new = step(carry)
        if i == 3:
            raise KeyboardInterrupt
        return new, new.sum()

    monkeypatch.setattr(base, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path).loop("donating", donating, jnp.ones(2), 5)
    carry, outputs = make(tmp_path, resume=True).loop("donating", lambda x, i: (x * 2, (x * 2).sum()), jnp.ones(2), 5)
    np.testing.assert_array_equal(carry, [32, 32])
    np.testing.assert_array_equal(outputs, np.float32([4, 8, 16, 32, 64]))


def test_stage_is_computed_once(tmp_path):
    def compute():
        return {"a": jnp.arange(3), "b": [np.float64(0.1)]}

    fresh = make(tmp_path).stage("data", compute)
    restored = make(tmp_path, resume=True).stage("data", lambda: pytest.fail("computed again"))
    np.testing.assert_array_equal(fresh["a"], [0, 1, 2])
    assert fresh["b"][0] == 0.1
    assert_identical(restored, fresh)


def test_metrics_of_a_killed_run_are_continued(tmp_path):
    """Lines past the checkpoint come again and half a line goes; while resuming the file never gets shorter."""

    def log(i, output):
        return None if i == 1 else [{"i": i, "part": part, "sum": output["sum"]} for part in range(2)]

    make(tmp_path / "a").loop("double", double, jnp.ones(2), 4, log=log)
    whole = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line) for line in lines][2] == {"loop": "double", "chunk": 2, "i": 2, "part": 0, "sum": 8.0}
    assert len(lines) == 6

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b").loop(
            "double", lambda c, i: double(c, i) if i < 2 else _interrupt(), jnp.ones(2), 4, log=log
        )
    (tmp_path / "b" / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:7])
    sizes = []

    def watching(carry, i):
        sizes.append((tmp_path / "b" / "metrics.jsonl").stat().st_size)
        return double(carry, i)

    make(tmp_path / "b", resume=True).loop("double", watching, jnp.ones(2), 4, log=log)
    assert sizes == [len(b"".join(lines[:5])) + 7] * 2
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == whole


def _interrupt():
    raise KeyboardInterrupt


def test_damaged_checkpoint_is_named_and_kept(tmp_path):
    make(tmp_path).loop("double", double, jnp.ones(2), 2)
    step = tmp_path / "checkpoint" / "double" / "2"
    data = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    before = {path: path.read_bytes() for path in step.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=f"^checkpoint {re.escape(str(step.parent))} cannot be restored.*not those that were"
    ):
        make(tmp_path, resume=True).loop("double", double, jnp.ones(2), 2)
    assert {path: path.read_bytes() for path in step.rglob("*") if path.is_file()} == before


def test_checkpoint_of_another_model_is_refused(tmp_path):
    make(tmp_path).loop("double", double, jnp.ones(2), 2)
    with pytest.raises(ValueError, match=r"another config: its carry has shapes \[\(2,\)\]"):
        make(tmp_path, resume=True).loop("double", double, jnp.ones(3), 2)


def test_half_written_checkpoint_is_ignored(tmp_path):
    """What a kill in the middle of a write leaves behind does not hide the state before it, nor stop the next write."""
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path).loop("double", lambda c, i: double(c, i) if i < 2 else _interrupt(), jnp.ones(2), 4)
    (tmp_path / "checkpoint" / "double" / "4.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    carry, _ = make(tmp_path, resume=True).loop("double", double, jnp.ones(2), 4)
    np.testing.assert_array_equal(carry, [16, 16])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda c, i: (c, Moments(c, c)), "return info._asdict() for a NamedTuple"),
        (lambda c, i: (c, c[: i + 1]), "an output differs in structure, shape or dtype"),
        (lambda c, i: ((c, c), c), "the body changes the structure of its carry"),
    ],
)
def test_body_that_cannot_be_stored(tmp_path, body, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        make(tmp_path).loop("wrong", body, jnp.ones(3), 2)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda run: [run.stage("a", lambda: jnp.ones(1)) for _ in range(2)], "two loops are called 'a'"),
        (lambda run: run.stage("a/b", lambda: jnp.ones(1)), "'a/b' cannot name a loop"),
        (lambda run: run.loop("a", double, jnp.ones(2), 0), "loop 'a' has length 0"),
        (lambda run: run.measure("fall", 1.0), "unknown claim 'fall'; there are falls, rate"),
        (lambda run: [run.measure("falls", 1.0), run.measure("falls", 1.0)], "'falls' is measured or skipped twice"),
        (
            lambda run: [run.skip("falls", "cpu", "-"), run.measure("falls", 1.0)],
            "'falls' is measured or skipped twice",
        ),
        (lambda run: run.skip("falls", "laptop", "too small"), "unknown preset 'laptop'"),
        (lambda run: [run.measure("rate", 0.5), run.judge(complete=True)], "neither measured nor skipped: falls"),
    ],
)
def test_mistakes_of_an_experiment_are_not_bad_input(tmp_path, misuse, message):
    """They raise something else than ValueError, so that the command shows the traceback."""
    with pytest.raises(RuntimeError, match=re.escape(message)):
        misuse(make(tmp_path))


@pytest.mark.parametrize(
    ("relation", "bound", "holds"),
    [
        ("<", 1.0, [True, False, False]),
        ("<=", 1.0, [True, True, False]),
        (">", 1.0, [False, False, True]),
        (">=", 1.0, [False, True, True]),
        ("in", (1.0, 2.0), [False, True, True]),
        ("in", (0.0, 1.0), [True, True, False]),
    ],
)
def test_relations(relation, bound, holds):
    claim = Claim("x", "X.", relation, bound)
    assert [claim.holds(value) for value in (0.5, 1.0, 2.0)] == holds
    assert not claim.holds(math.nan)


@pytest.mark.parametrize(("relation", "bound"), [("in", 1.0), ("<", (0.0, 1.0))])
def test_bound_goes_with_relation(relation, bound):
    with pytest.raises(ValueError, match="does not go with bound"):
        Claim("x", "X.", relation, bound)


def test_smoke_judges_nothing(tmp_path):
    run = make(tmp_path, preset="smoke")
    run.measure("falls", 5.0)
    run.skip("rate", "cpu", "too short")
    verdict = run.judge(complete=True)
    assert verdict["claims"] == []
    assert [(claim["id"], claim["preset"]) for claim in verdict["skipped"]] == [("falls", "quick"), ("rate", "cpu")]


def test_seed_makes_the_key(tmp_path):
    run = Run((), preset="smoke", seed=7, out=tmp_path)
    assert_identical(run.key, jax.random.key(7))


def test_figure_takes_the_words_of_pyplot(tmp_path):
    run = make(tmp_path)
    with run.figure("two", ncols=2, sharey=True, figsize=(4, 2)) as (figure, axes):
        axes[0].plot([0, 1])
    assert axes.shape == (2,)
    assert run.figures == [tmp_path / "two.png"]
    assert tuple(figure.get_size_inches()) == (4, 2)
    with pytest.raises(RuntimeError, match="two figures are called 'two'"), run.figure("two"):
        pass


def test_failed_figure_is_not_saved(tmp_path):
    with pytest.raises(ZeroDivisionError), make(tmp_path).figure("broken"):
        1 / 0  # noqa: B018
    assert not list(tmp_path.glob("*.png*"))


def test_example_of_the_docstring(tmp_path):
    """It runs as it stands, and its claim holds."""
    code = textwrap.dedent(base.__doc__.partition("::\n")[2].partition("Every expensive thing")[0])
    names = vars(base) | {"jnp": jnp, "__name__": "example"}
    exec(code, names)
    outcome = execute(names["EXPERIMENT"], out=tmp_path / "run")
    assert [claim["holds"] for claim in outcome.result["claims"]] == [True]
    assert outcome.result["table"][0]["loss"] == pytest.approx(1.5 * 0.99**2000, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "My_Method"}, "kebab case, got 'My_Method'"),
        ({"presets": dict.fromkeys(PRESETS[1:], Claim("x", "X.", "<", 1.0))}, "presets must be"),
        (
            {"presets": dict.fromkeys(PRESETS, cli._Options())},
            "['json', 'out', 'overwrite', 'preset', 'resume', 'seed']",
        ),
        ({"claims": CLAIMS[:1] * 2}, "claim ids must differ, got ['falls', 'falls']"),
    ],
)
def test_experiments_are_checked(change, message):
    # Any frozen dataclass can be a config.
    presets = dict.fromkeys(PRESETS, Claim("x", "X.", "<", 1.0))
    whole = {"name": "x", "summary": "X.", "claims": CLAIMS, "presets": presets, "run": print, "shapes": print}
    Experiment(**whole)
    with pytest.raises(ValueError, match=re.escape(message)):
        Experiment(**{**whole, **change})
