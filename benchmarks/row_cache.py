"""What a worker would save by keeping rows of embedding tables that it pulled before: hit shares, and milliseconds.

    python -m benchmarks.row_cache [--rounds 7] [--write]

Decision 0042 says which cached row may serve a step. The worker is this process, with a shard as the product starts it;
its cache is the best that we could think of: rows stay where they were pulled to, and two ascending lists of keys are
joined by machine code. The ids are those of `benchmarks.races.embedding_rows`, and of the click log whose ids drift.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.peers import click_ids, seam
from benchmarks.races.our_rows import KEYS_MAX
from benchmarks.races.ours import STEPS, Cluster
from benchmarks.tables import load_before, spread, table, write
from parashard.client.shard_client import ShardClient
from parashard.data.generated import ClicksSource
from parashard.data.options import ClicksOptions
from parashard.plan.embedding import KEY_BYTES, Keys, mixed
from parashard.plan.variables import Float32s
from parashard.process.resources import EVERY_STEP, keep_freed_memory

ROUND_STEPS = (1, 2, 4, 8)
DEPTHS = (0, 1, 2, 4)
MEASURED_STEPS = 4
"""Steps of a round that one worker computes."""
ROW_BYTES = KEY_BYTES + 4 * click_ids.DIMENSION
TRANSPORTS = ("shm", "tcp")
LINKS = (1, 10)
"""Gbit/s."""


def main() -> None:
    """Measure, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=7, help="times that all batches are pulled (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write row_cache.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    keep_freed_memory(EVERY_STEP)  # as a worker does
    load = os.getloadavg()[0]
    batches = [np.unique(mixed(ids.reshape(-1))) for ids in click_ids.batches()]
    shares = {
        "Zipf(1.2) of 2^20": shares_of(batches),
        "click log": shares_of(clicks(0.0)),
        "click log, drift 2": shares_of(clicks(2.0)),
    }
    costs = {transport: measured(transport, batches, arguments.rounds) for transport in TRANSPORTS}
    shown = {
        "Share of a step's keys that a cache has": of_shares(shares),
        "Pulls of four steps of a round": of_costs(costs),
    }
    shown["Load"] = load_before(load)
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        write("row_cache", shown, {"shares": shares, "costs": costs})


def clicks(drift: float) -> list[Keys]:
    """Return the keys of successive batches of the click log, in the middle of it."""
    source = ClicksSource(ClicksOptions(examples=1_000_000, vocabulary=50_000, drift=drift))
    batches = np.arange(500_000, 500_000 + click_ids.STEPS * click_ids.BATCH).reshape(click_ids.STEPS, -1)
    return [np.unique(mixed(source.examples(batch)[0]["keys"].reshape(-1))) for batch in batches]


# --- hits ---


def shares_of(batches: Sequence[Keys]) -> dict[str, float]:
    """Return by policy the share of a step's keys in a cache; an upper bound, since no other worker takes steps."""
    sets = [set(keys.tolist()) for keys in batches]
    found = {f"sync:N, {steps} steps of a round": _in_round(sets, steps) for steps in ROUND_STEPS}
    found |= {f"ssp and async, pipeline_depth {depth}": _in_flight(sets, depth) for depth in DEPTHS}
    return found | {
        f"not allowed: the last {steps} steps, own pushes unseen": _of_last(sets, steps) for steps in (1, 4)
    }


def _in_round(sets: Sequence[set[int]], steps: int) -> float:
    """Return the share in `sync:N`: a row pulled for a round serves all its later steps."""
    shares = []
    for begin in range(0, len(sets) - steps + 1, steps):
        cached: set[int] = set()
        for keys in sets[begin : begin + steps]:
            shares.append(len(keys & cached) / len(keys))
            cached |= keys
    return statistics.mean(shares)


def _of_last(sets: Sequence[set[int]], steps: int) -> float:
    """Return the share if a row served even after the worker has pushed it."""
    cached = ((keys, set[int]().union(*sets[i - steps : i])) for i, keys in enumerate(sets) if i >= steps)
    return statistics.mean(len(keys & held) / len(keys) for keys, held in cached)


def _in_flight(sets: Sequence[set[int]], depth: int) -> float:
    """Return the share in `ssp` and `async`: a row pulled ahead serves until the worker itself pushes it.

    The pull of step i begins once the push of step i - depth - 1 has; that of step i - k began k pushes before.
    """
    shares = []
    for i in range(2 * depth + 1, len(sets)):
        cached: set[int] = set()
        for k in range(1, depth + 1):
            pushed = set[int]().union(*sets[i - k - depth : i - depth])
            cached |= sets[i - k] - pushed
        shares.append(len(sets[i] & cached) / len(sets[i]))
    return statistics.mean(shares) if shares else 0.0


# --- costs ---


class RoundCache:
    """Rows that were pulled for a round."""

    def __init__(self) -> None:
        self._held: list[tuple[Keys, Float32s]] = []

    def pull(self, client: ShardClient, keys: Keys) -> Float32s:
        """Return the rows of some keys; pull those that are not held."""
        rows = np.empty((len(keys), click_ids.DIMENSION), np.float32)
        missing = np.ones(len(keys), np.bool_)
        for held, values in self._held:
            _join(keys, held, values, rows, missing)
        places = np.flatnonzero(missing)
        wanted = keys[places]
        pulled = client.pull(keys={"rows": wanted})
        rows[places] = pulled.rows["rows"]
        self._held.append((wanted, pulled.rows["rows"]))
        pulled.release()
        return rows


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _join(keys: Any, held: Any, values: Any, rows: Any, missing: Any) -> None:
    """Copy the rows of keys that are held; both lists are ascending."""
    at = 0
    for i in range(len(keys)):
        while at < len(held) and held[at] < keys[i]:
            at += 1
        if at < len(held) and held[at] == keys[i]:
            missing[i] = False
            for j in range(rows.shape[1]):
                rows[i, j] = values[at, j]


@contextmanager
def shard_with_rows(transport: str) -> Iterator[ShardClient]:
    """Yield the client of a shard that has every row."""
    of_table = f"dimension={click_ids.DIMENSION}, keys_per_step_max={KEYS_MAX}, rows_max={2 * click_ids.ROWS}"
    settings = ["model.elements=256", f"data.examples={STEPS}", 'cluster.launcher="external"']
    settings += [f"tables.rows={{{of_table}}}", f'cluster.transport="{transport}"']
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), settings)
        try:
            everything = np.sort(mixed(np.arange(click_ids.ROWS)))
            for step, begin in enumerate(range(0, len(everything), KEYS_MAX // 2)):
                keys = everything[begin : begin + KEYS_MAX // 2]
                pulled = cluster.client.pull(keys={"rows": keys})
                cluster.client.push(step, {"rows": np.zeros((len(keys), click_ids.DIMENSION), np.float32)}, pulled)
                pulled.release()
            yield cluster.client
        finally:
            cluster.end()


def measured(transport: str, batches: Sequence[Keys], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of the pulls of a round's steps, and bytes, without a cache and with one, in turns."""
    found: dict[str, list[float]] = {"plain_ms": [], "cached_ms": [], "plain_bytes": [], "cached_bytes": []}
    with shard_with_rows(transport) as client:
        for turn in range(-1, rounds):  # the first one compiles
            for begin in range(0, len(batches), MEASURED_STEPS):
                steps, cache = batches[begin : begin + MEASURED_STEPS], RoundCache()
                plain_ms = [seam.milliseconds(lambda keys=keys: _plain(client, keys)) for keys in steps]
                cached_ms = [
                    seam.milliseconds(lambda keys=keys, cache=cache: cache.pull(client, keys)) for keys in steps
                ]
                if turn < 0:
                    again = RoundCache()
                    assert all((again.pull(client, keys) == _plain(client, keys)).all() for keys in steps)
                    continue
                found["plain_ms"].append(sum(plain_ms))
                found["cached_ms"].append(sum(cached_ms))
                found["plain_bytes"].append(float(ROW_BYTES * sum(map(len, steps))))
                found["cached_bytes"].append(float(ROW_BYTES * len(np.unique(np.concatenate(steps)))))
    return found


def _plain(client: ShardClient, keys: Keys) -> Float32s:
    pulled = client.pull(keys={"rows": keys})
    pulled.release()
    return pulled.rows["rows"]


# --- tables ---


def of_shares(shares: dict[str, dict[str, float]]) -> str:
    """Return the table of hit shares."""
    rows = [
        [policy, *(f"{of_ids[policy]:.1%}" for of_ids in shares.values())] for policy in next(iter(shares.values()))
    ]
    return table(["", *shares], rows)


def of_costs(costs: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of pulls; the time of a link is calculated from the bytes."""
    rows = []
    for transport, figures in costs.items():
        ratios = [a / b for a, b in zip(figures["plain_ms"], figures["cached_ms"], strict=True)]
        saved_bytes = statistics.mean(figures["plain_bytes"]) - statistics.mean(figures["cached_bytes"])
        rows.append(
            [
                transport,
                f"{statistics.median(figures['plain_ms']):.2f} ms",
                f"{statistics.median(figures['cached_ms']):.2f} ms",
                spread(ratios),
                f"{saved_bytes:,.0f} ({saved_bytes / statistics.mean(figures['plain_bytes']):.1%})",
                *(f"{saved_bytes * 8 / (link * 1e6):.1f} ms" for link in LINKS),
            ]
        )
    links = [f"they take on {link} Gbit/s" for link in LINKS]
    return table(["transport", "pulled whole", "with a cache", "times as fast", "bytes saved", *links], rows)


if __name__ == "__main__":
    main()
