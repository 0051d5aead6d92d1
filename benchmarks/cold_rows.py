"""What a table with a cold tier could reach: rows on the disk, of which a quarter fits into memory.

    python -m benchmarks.cold_rows [--folder FOLDER] [--write]

Steps of 4,096 x 26 Zipf(1.2) ids from 2^20 rows of 16 floats. The hottest quarter of the rows is in memory, which no
policy of a cache can better; how many keys of a step are not is counted. So many blocks of 4 KiB are read from random
places of a file, past the page cache, by as many threads as serve best, and the time is added to that of a pull and a
push with Adagrad in memory. Written rows are not counted.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.click_ids import BATCH, COLUMNS, DIMENSION, ROWS, ZIPF
from benchmarks.tables import table, write
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import Adagrad
from parashard_server.state.rows.embedding_tables import EmbeddingTables, RowGradients

SHARE_IN_MEMORY = 4
GOAL = 0.7
STEPS = 20
BLOCK_BYTES = 4096
FILE_BYTES = 4 << 30
THREADS = (1, 4, 16, 64)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder for the temporary file of 4 GiB (default: a temporary folder)")
    parser.add_argument("--write", action="store_true", help="write cold_rows.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    reached = np.cumsum(np.arange(1, ROWS + 1) ** -ZIPF)
    drawn = (rng.random(BATCH * COLUMNS) * reached[-1] for _ in range(STEPS))
    steps = [np.unique(np.searchsorted(reached, one)) for one in drawn]  # ids by rank: the hottest first
    keys = statistics.median(len(step) for step in steps)
    cold = statistics.median(int((step >= ROWS // SHARE_IN_MEMORY).sum()) for step in steps)
    in_memory_ms = 1000 * memory_s(steps)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "rows"
        with path.open("wb") as file:
            for _ in range(FILE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        from_disk_ms = {threads: 1000 * disk_s(path, int(cold), threads, rng) for threads in THREADS}
    best = min(from_disk_ms.values())
    share = in_memory_ms / (in_memory_ms + best)
    shown = {
        "Cold rows": table(
            [
                "keys of a step",
                "of them cold",
                "pull and push in memory",
                "reads of the cold",
                "speed with a cold tier",
            ],
            [
                [
                    f"{keys:,.0f}",
                    f"{cold:,.0f}",
                    f"{in_memory_ms:.2f} ms",
                    f"{best:.1f} ms",
                    f"{share:.2f} (goal {GOAL})",
                ]
            ],
        ),
        "Reads": table(["threads", "time"], [[str(n), f"{ms:.1f} ms"] for n, ms in from_disk_ms.items()]),
    }
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        figures = {"keys": keys, "cold": cold, "in_memory_ms": in_memory_ms, "from_disk_ms": from_disk_ms}
        write("cold_rows", shown, figures | {"share": share})


def memory_s(steps: list[NDArray[np.int64]]) -> float:
    """Return the median time of a step's pull and push if all rows are in memory."""
    tables = EmbeddingTables([EmbeddingTable("rows", DIMENSION, Adagrad(0.1))], 0, 0, 1)
    gradients = np.random.default_rng(1).normal(size=(1 << 16, DIMENSION)).astype(np.float32)
    for begin in range(0, ROWS, 1 << 16):
        every = np.sort(mixed(np.arange(begin, begin + (1 << 16))))
        tables.apply({"rows": RowGradients(every, gradients)}, t=1)
    times_s = []
    for clock, step in enumerate(steps, 2):
        keys = np.sort(mixed(step))
        began_s = time.perf_counter()
        tables.pull({"rows": keys}, clock - 1)
        tables.apply(tables.checked({"rows": RowGradients(keys, gradients[: len(keys)])}), t=clock)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def disk_s(path: Path, blocks: int, threads: int, rng: np.random.Generator) -> float:
    """Return the median time for this many threads to read blocks from random places."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(threads)]  # aligned, as direct reads require

    def read(thread: int, places: list[int]) -> None:
        for place in places:
            os.preadv(descriptor, [buffers[thread]], place * BLOCK_BYTES)

    times_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            parts = np.array_split(rng.integers(0, FILE_BYTES // BLOCK_BYTES, blocks), threads)
            began_s = time.perf_counter()
            list(pool.map(read, range(threads), [part.tolist() for part in parts]))
            times_s.append(time.perf_counter() - began_s)
    os.close(descriptor)
    return statistics.median(times_s)


if __name__ == "__main__":
    main()
