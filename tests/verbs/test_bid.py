"""The file tool end to end: numbers, files, clicks, bad input."""

import csv
import json

import numpy as np
import pytest

from jaxlab import cli
from jaxlab.verbs.bid import clairvoyant_optimum, read_log, replay, stationary_optimum


def market(rounds: int = 1000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values and prices on the scale of display advertising, in money per thousand impressions."""
    rng = np.random.default_rng(seed)
    prices = np.minimum(53 * np.exp(0.63 * rng.normal(size=rounds)), 300)
    return np.minimum(60 * np.exp(0.67 * rng.normal(size=rounds)), 300), prices


def write(path, columns: dict[str, np.ndarray]) -> str:
    rows = np.stack(list(columns.values()), 1)
    np.savetxt(path, rows, delimiter=",", header=",".join(columns), comments="", fmt="%.9g")
    return str(path)


def test_replay_writes_what_it_prints(tmp_path, capsys):
    value, price = market()
    click = (np.arange(len(value)) % 7 == 0).astype(float)
    log = write(tmp_path / "log.csv", {"price": price, "click": click, "value": value})
    out = tmp_path / "out"
    arguments = ["bid", "replay", log, "--budget", "6000", "--roi", "2.5", "--reward", "utility", "--out", str(out)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    numbers = json.loads((out / "summary.json").read_text())
    rows = list(csv.DictReader((out / "rounds.csv").open()))
    assert len(rows) == numbers["rounds"] == 1000
    won = np.array([row["won"] == "1" for row in rows])
    bid = np.array([float(row["bid"]) for row in rows])
    # A win is a bid of at least the price, paid in full; nothing else is won or paid but what the budget refuses.
    assert np.all(bid[won] >= price[won] * (1 - 1e-6))
    np.testing.assert_allclose(numbers["spend"], bid[won].sum(), rtol=1e-5)
    np.testing.assert_allclose(numbers["value"], (value - bid)[won].sum(), rtol=1e-4)
    assert numbers["spend"] <= 6000 * (1 + 1e-6)
    assert numbers["wins"] == won.sum() > 20
    assert numbers["clicks"] == click[won].sum()
    assert f"{numbers['clicks']} clicks" in printed
    np.testing.assert_allclose(float(rows[-1]["violation"]), 2.5 * numbers["spend"] - numbers["value"], rtol=1e-6)
    np.testing.assert_allclose(float(rows[-1]["regret"]), numbers["offline_optimum"] - numbers["value"], rtol=1e-6)
    assert 0 < numbers["value"] < numbers["clairvoyant_optimum"]
    assert 0.6 < numbers["value"] / numbers["offline_optimum"] < 1.1  # a little more is bought with violation
    assert numbers["roi"] > 2.2
    assert (out / "campaign.png").stat().st_size > 20_000


def test_money_has_no_unit():
    """Everything a hundred times dearer is the same campaign."""
    value, price = market(300)
    once = replay(value, price, budget=1500.0, roi=2.0)
    more = replay(100 * value, 100 * price, budget=150_000.0, roi=2.0)
    np.testing.assert_array_equal(once.won, more.won)
    np.testing.assert_allclose(100 * once.cost, more.cost, rtol=1e-5)
    np.testing.assert_allclose(100 * once.optimum, more.optimum, rtol=1e-6)


def test_an_absurd_price_changes_nothing():
    value, price = market(100)
    price[-1] = 301.0
    once = replay(value, price, budget=500.0, roi=2.0, expectation="point")
    price[-1] = 1e12
    more = replay(value, price, budget=500.0, roi=2.0, expectation="point")
    assert once.won.sum() > 2
    np.testing.assert_array_equal(once.bid, more.bid)


def test_a_log_of_one_round_without_a_win(tmp_path, capsys):
    log = write(tmp_path / "log.csv", {"value": np.ones(1), "price": np.full(1, 5.0)})
    assert cli.main(["bid", "replay", log, "--budget", "1", "--roi", "1", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split()[0] == "1"
    assert "0 wins; spent 0 of 1; return 0, target 1 kept" in printed


def test_second_price_pays_the_price():
    value, price = market(300)
    found = replay(value, price, budget=1500.0, roi=2.0, auction="second", expectation="point")
    np.testing.assert_allclose(found.cost[found.won], price[found.won], rtol=1e-5)
    assert found.won.sum() > 5


def test_optimum_of_three_rounds_by_hand():
    """All of the first and 4 / 5 of the second fill the budget; with a target of 4 only the first keeps it."""
    value, price = np.array([9.0, 10.0, 1.0]), np.array([1.0, 5.0, 2.0])
    assert clairvoyant_optimum(value, price, budget=5.0, roi=0.0, reward="value") == pytest.approx(9 + 8)
    # 9 + 10 y >= 4 (1 + 5 y) for y <= 1 / 2.
    assert clairvoyant_optimum(value, price, budget=5.0, roi=4.0, reward="value") == pytest.approx(9 + 5)


def test_stationary_optimum_by_hand():
    """One value of 10, prices 2 and 6: a bid of 2 wins half of the rounds and earns 8 for 2, one of 6 all, 4 for 6."""
    value, price, bids = np.full(4, 10.0), np.array([2.0, 6.0, 2.0, 6.0]), np.array([0.0, 2.0, 6.0])
    options = {"auction": "first", "reward": "utility", "roi": 0.0}
    assert stationary_optimum(value, price, bids, budget=100.0, **options) == pytest.approx(16)
    # Half the budget buys half of it: two rounds' wins at 2 cost 4.
    assert stationary_optimum(value, price, bids, budget=2.0, **options) == pytest.approx(8)


def test_help_tells_the_options(capsys):
    assert cli.main(["bid"]) == 0
    assert cli.main(["bid", "replay", "--help"]) == 0
    assert "--roi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("value,cost\n1,1\n", [], "has no column 'price'; found value, cost"),
        ("", [], "has no column 'value'; found an empty file"),
        ("value,price\n", [], "has no rows"),
        ("value,price\n1,1\n1,x\n", [], "line 3: price must be a number at least 0, got 'x'"),
        ("value,price\n-1,1\n", [], "line 2: value must be a number at least 0, got '-1'"),
        ("value,price\n1\n", [], "line 2: price must be a number at least 0, got None"),
        ("value,price,click\n1,1,2\n", [], "click must be 0 or 1, got 2"),
        ("value,price\n0,1\n", [], "no round of the log has a positive value"),
        ("value;price\n1;1\n", [], "has no column 'value'; found value;price"),
        ("value,price\n0,6,0,4\n", [], "line 2: more cells than the 2 columns"),
        ("value,price,value\n1,1,2\n", [], "has more than one column 'value'"),
        ("value,price\n1,nan\n", [], "line 2: price must be a number at least 0, got 'nan'"),
        ("value,price\n" + 200_000 * "1" + ",1\n", [], "is not a CSV file: field larger than field limit"),
        ("value,price\n1,1\n", ["--out", "pyproject.toml"], "--out must be a folder, pyproject.toml is a file"),
        ("value,price\n1,1\n", ["--budget", "0"], "the budget must be positive, got 0"),
        ("value,price\n1,1\n", ["--roi", "-1"], "roi must be finite and at least 0, got -1"),
        ("value,price\n1,1\n", ["--bids", "1"], "at least 2 bids"),
        ("value,price\n1,1\n", ["--step", "-2"], "budget_step must be finite and at least 0"),
        ("value,price\n1,1\n", ["--auction", "third"], "invalid choice: 'third'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, text, options, message):
    (tmp_path / "log.csv").write_text(text)
    out = tmp_path / "out"
    base = ["bid", "replay", str(tmp_path / "log.csv"), "--budget", "1", "--roi", "1", "--out", str(out)]
    assert cli.main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_what_spreadsheets_write_is_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b'\xef\xbb\xbf"value", price,click\r\n"1.5", 2,1\r\n\r\n3,0.5,0\r\n')
    value, price, click = read_log(path)
    assert (value.tolist(), price.tolist(), click.tolist()) == ([1.5, 3.0], [2.0, 0.5], [1.0, 0.0])
    path.write_bytes("value,price\n1,2\n".encode("utf-16"))
    with pytest.raises(ValueError, match="is not a text file in UTF-8: invalid start byte at byte 0"):
        read_log(path)


def test_missing_file_and_options_are_one_line(tmp_path, capsys):
    assert cli.main(["bid", "replay", str(tmp_path / "none.csv"), "--budget", "1", "--roi", "1"]) == 2
    assert cli.main(["bid", "replay", str(tmp_path / "none.csv"), "--roi", "1"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "none.csv" in first
    assert "--budget" in second
