"""L2FOB decisions a second: jaxlab over many campaigns at once against NumPy loops of the same algorithm.

    python benchmarks/bidding_l2fob.py [--rounds 100000] [--campaigns 256] [--peer-rounds 2000] [--out FILE]

First-price auctions with full feedback, point mode, 101 bids: the paper's experiment, one set of values and prices for
all implementations. Rows:

* ``NumPy, one campaign``: the loop a user would write, round by round, on one campaign (the time a decision does not
  depend on how many there are);
* ``NumPy, all campaigns``: the same loop with all campaigns as one array;
* ``jaxlab``: `jaxlab.bidding.advance`, scanned over rounds and vmapped over campaigns;
* ``jaxlab, one request``: `jaxlab.bidding.Server` on the host, decide and report, one request at a time.

The peers make fewer rounds; in those all bids must be the ones jaxlab made in the run that is timed, but for the share
that rounding may turn (float32 in both). The budget is high enough that no campaign stops before the end.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import device_name, measure, print_table, write_json

from jaxlab.bidding import (
    Agent,
    Auction,
    Campaign,
    Outcome,
    Server,
    Settings,
    advance,
    auction_estimator,
    bid_grid,
    clipped_normal,
    first_price,
    make_l2fob,
    start,
)

__all__ = ["TOLERANCE", "check_same_work", "main", "numpy_bids"]

BUDGET_RATE, ROI, STEP, WIDTH, LOG_CONFIDENCE = 0.01, 1.8, 0.6, 0.03, float(np.log(10_000))
# Share of decisions that may differ: two bids whose scores agree to a rounding error are a tie that either side may
# break. One such bid moves a queue, and what follows, hence more than a handful of ties; a wrong step size or width
# changes more than a tenth of all bids.
TOLERANCE = 0.01


def numpy_bids(values: np.ndarray, prices: np.ndarray, bids: np.ndarray) -> np.ndarray:
    """Indices of the bids of L2FOB in every round, ``[rounds, ...]``; trailing axes are campaigns."""
    bids = bids.astype(np.float32).reshape(-1, *[1] * (values.ndim - 1))
    wins = np.zeros((len(bids), *values.shape[1:]), np.float32)
    queue_budget = np.zeros(values.shape[1:], np.float32)
    queue_roi = np.zeros(values.shape[1:], np.float32)
    chosen = np.zeros(values.shape, np.int32)
    two, step = np.float32(2), np.float32(STEP)
    for t, (value, price) in enumerate(zip(values, prices, strict=True)):
        trials = np.float32(max(t, 1e-9))
        rate = wins / trials
        epsilon = np.float32(WIDTH * np.sqrt(np.float32(LOG_CONFIDENCE) / (two * trials)))
        lower, upper = np.clip(rate - epsilon, 0, 1), np.clip(rate + epsilon, 0, 1)
        margin = value - bids
        reward = margin * np.where(margin >= 0, upper, lower)
        cost = bids * lower
        over_budget = np.maximum(cost - np.float32(BUDGET_RATE), 0)
        over_roi = np.maximum(np.float32(ROI) * cost - reward, 0)
        ahead_budget, ahead_roi = queue_budget + step * over_budget, queue_roi + step * over_roi
        score = reward - two * ahead_budget * (step * over_budget) - two * ahead_roi * (step * over_roi)
        index = np.argmax(score, axis=0)
        chosen[t] = index
        queue_budget = np.take_along_axis(ahead_budget, index[None], axis=0)[0]
        queue_roi = np.take_along_axis(ahead_roi, index[None], axis=0)[0]
        wins += price <= bids
    return chosen


def check_same_work(name: str, found: np.ndarray, expected: np.ndarray) -> float:
    """Share of decisions that differ.

    Raises:
      SystemExit: it exceeds `TOLERANCE`.
    """
    share = float(np.mean(found != expected))
    if not share <= TOLERANCE:
        raise SystemExit(f"{name}: {share:.1%} of the bids differ from those of jaxlab, at most {TOLERANCE:.0%} may")
    return share


def main(arguments: list[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--campaigns", type=int, default=256)
    parser.add_argument("--peer-rounds", type=int, default=2_000)
    parser.add_argument("--chunk", type=int, default=5_000, help="rounds in one call (default 5000)")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in ("rounds", "campaigns", "peer_rounds", "chunk", "requests", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.rounds % options.chunk or options.peer_rounds > options.rounds:
        parser.error(
            f"--chunk must divide --rounds and --peer-rounds not exceed them, got {options.chunk}, "
            f"{options.peer_rounds} and {options.rounds}"
        )

    bids = bid_grid(101)
    market = first_price(bids, values=clipped_normal(0.6, 0.1), prices=clipped_normal(0.4, 0.1))
    estimator = auction_estimator(bids, width=WIDTH, log_confidence=LOG_CONFIDENCE)
    agent = make_l2fob(estimator, Settings(BUDGET_RATE, ROI, STEP, STEP), expectation="point")
    size = options.rounds * options.campaigns
    # One draw for all, rounds first, so that a chunk of rounds is a slice.
    flat = market.draw(jax.random.key(options.seed), size)
    drawn = Auction(*(leaf.reshape(options.rounds, options.campaigns) for leaf in flat))
    budget = float(options.rounds)

    def one(campaign: Campaign, rounds: Auction) -> tuple[Campaign, jax.Array]:
        campaign, trace = advance(market, agent, campaign, rounds, jnp.zeros(rounds.value.shape), budget)
        return campaign, trace.index

    forward = jax.jit(jax.vmap(one, in_axes=(0, 1), out_axes=(0, 1)), donate_argnums=0)
    first = start(agent)

    def all_rounds() -> list[jax.Array]:
        campaign = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], options.campaigns, axis=0), first)
        chosen = []
        for i in range(0, options.rounds, options.chunk):
            campaign, index = forward(campaign, Auction(*(leaf[i : i + options.chunk] for leaf in drawn)))
            chosen.append(index)
        return chosen

    ours, chosen = measure(all_rounds, repeats=options.repeats)
    bought = np.concatenate([np.asarray(index) for index in chosen])[: options.peer_rounds]

    values, prices = (np.asarray(leaf[: options.peer_rounds]) for leaf in drawn)
    grid = np.asarray(bids)
    single, single_bids = measure(lambda: numpy_bids(values[:, 0], prices[:, 0], grid), repeats=1)
    many, many_bids = measure(lambda: numpy_bids(values, prices, grid), repeats=1)
    differing = max(
        check_same_work("NumPy, one campaign", single_bids, bought[:, 0]),
        check_same_work("NumPy, all campaigns", many_bids, bought),
    )
    serving = served_seconds(agent, values[:, 0], prices[:, 0], options.requests)

    of_peer = single.mean / options.peer_rounds
    seconds = {
        "NumPy, one campaign": (of_peer, 0.0),
        "NumPy, all campaigns": (many.mean / options.peer_rounds / options.campaigns, 0.0),
        "jaxlab": (ours.mean / size, ours.compile),
        "jaxlab, one request": (serving, 0.0),
    }
    print_table(
        f"{options.campaigns} campaigns of {options.rounds} rounds, {grid.size} bids, on {device_name()}",
        ("", "compile s", "µs a decision", "decisions a s", "times faster"),
        [
            (name, f"{extra:.2f}" if extra else "", f"{1e6 * each:.3f}", f"{1 / each:.3g}", f"{of_peer / each:.1f}")
            for name, (each, extra) in seconds.items()
        ],
    )
    print(f"at most {differing:.2%} of the bids differ from NumPy's")
    if options.out:
        write_json(
            options.out,
            "bidding_l2fob",
            rows=[
                {
                    "implementation": name,
                    "seconds_per_decision": each,
                    "decisions_per_second": 1 / each,
                    "compile_seconds": extra,
                    "times_faster": of_peer / each,
                }
                for name, (each, extra) in seconds.items()
            ],
            rounds=options.rounds,
            campaigns=options.campaigns,
            peer_rounds=options.peer_rounds,
            differing=differing,
            tolerance=TOLERANCE,
        )


def served_seconds(agent: Agent, values: np.ndarray, prices: np.ndarray, requests: int) -> float:
    """Seconds of one request, decision and report, after a first one that compiles."""
    server = Server(agent, budget=float(requests))
    bids = np.asarray(bid_grid(101))

    def request(value: np.float32, price: np.float32) -> None:
        bid = bids[server.decide(value)]
        won = price <= bid
        cost = bid if won else np.float32(0)
        server.report(Outcome(np.asarray(won), np.float32(value - bid if won else 0), cost, price))

    request(values[0], prices[0])
    begin = time.perf_counter()
    for t in range(requests):
        request(values[t % len(values)], prices[t % len(prices)])
    return (time.perf_counter() - begin) / requests


if __name__ == "__main__":
    main()
