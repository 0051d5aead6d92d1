"""Our contestant of the race of embedding rows: a shard as the product starts it, and this process as the worker.

"pull" and "adagrad" are of keys that are mixed, sorted and unique already, as the peers' are. "step"
is all that a worker does for its tables: from the ids as they come to keys, pull, look-up, sum by row, push.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import click_ids, seam
from benchmarks.races.ours import STEPS, Cluster
from parashard.layers.row_sums import sum_by_place
from parashard.models.looking_up import distinct_keys
from parashard.plan.embedding import mixed
from parashard.process.resources import EVERY_STEP, keep_freed_memory

KEYS_MAX = 1 << 17


class OurRows:
    """The worker.

    Parameters
    ----------
    settings : sequence of str
        KEY=VALUE of the job.
    """

    def __init__(self, settings: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        table = (
            f"tables.rows={{dimension={click_ids.DIMENSION}, keys_per_step_max={KEYS_MAX}, "
            f"rows_max={2 * click_ids.ROWS}, "
            f"optimizer={{kind='adagrad', learning_rate={click_ids.LEARNING_RATE}, initial_accumulator=0.1}}}}"
        )
        own = ["model.elements=256", f"data.examples={STEPS}", 'cluster.launcher="external"', table]
        self._cluster = Cluster(Path(self._folder.name), [*own, *settings])
        self._steps = itertools.count()
        self._ids = click_ids.batches()
        self._keys = [np.unique(mixed(ids.reshape(-1))) for ids in self._ids]
        self._gradients = [click_ids.gradients(len(keys)) for keys in self._keys]
        self._by_look_up = click_ids.gradients(click_ids.BATCH * click_ids.COLUMNS)
        everything = np.sort(mixed(np.arange(click_ids.ROWS)))
        for begin in range(0, len(everything), KEYS_MAX // 2):  # creates every row, as the peers do
            keys = everything[begin : begin + KEYS_MAX // 2]
            self._push(keys, np.zeros((len(keys), click_ids.DIMENSION), np.float32))

    def answer(self, request: Any) -> dict[str, Any]:
        """Return milliseconds of each kind, a figure for each batch."""
        times: dict[str, list[float]] = {"pull_ms": [], "adagrad_ms": [], "step_ms": []}
        for at in range(request["batches"]):
            keys, gradients = self._keys[at], self._gradients[at]
            pulled = self._pull(keys)
            times["pull_ms"].append(seam.milliseconds(lambda keys=keys: self._pull(keys)))
            times["adagrad_ms"].append(
                seam.milliseconds(
                    lambda pulled=pulled, gradients=gradients: self._cluster.client.push(
                        next(self._steps), {"rows": gradients}, pulled
                    )
                )
            )
            times["step_ms"].append(seam.milliseconds(lambda ids=self._ids[at]: self._step(ids)))
        return times

    def _pull(self, keys: Any) -> Any:
        pulled = self._cluster.client.pull(keys={"rows": keys})
        pulled.release()
        return pulled

    def _push(self, keys: Any, gradients: Any) -> None:
        self._cluster.client.push(next(self._steps), {"rows": gradients}, self._pull(keys))

    def _step(self, ids: Any) -> None:
        keys, inverse = distinct_keys(mixed(ids.reshape(-1)))
        pulled = self._pull(keys)
        looked_up = pulled.rows["rows"].take(inverse, axis=0)
        assert looked_up.shape == self._by_look_up.shape
        gradients = sum_by_place(self._by_look_up, inverse, len(keys), np)
        self._cluster.client.push(next(self._steps), {"rows": gradients}, pulled)

    def close(self) -> None:
        """End the processes."""
        self._cluster.end()
        self._folder.cleanup()


def main() -> None:
    """Answer rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    keep_freed_memory(EVERY_STEP)  # as a worker does
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    contestant = OurRows(parser.parse_args().set)
    try:
        seam.serve(contestant.answer, ["parashard", "grpcio", "numpy"])
    finally:
        contestant.close()


if __name__ == "__main__":
    main()
