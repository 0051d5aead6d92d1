"""An embedding table on one shard as it grows: rows a second, memory of a row, the longest push, and its checkpoints.

    python -m benchmarks.table_growth [--rows 22] [--write]

The shard's own parts in this process, without transport: pushes of 2^15 keys of which half are new, rows of 8 floats
with Adagrad, then a whole checkpoint and an increment after 1 % of the rows were pushed again.

The table grows twice. What the first growth needs of memory the machine finds meanwhile, which in a virtual machine may
take longer than all else; the second has its memory from the start. How long the machine takes is stated, too.
"Rows read alone" is how many rows at random places the machine reads in a second where it does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.tables import table, write
from parashard.checkpoints.catalogue import CheckpointId
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import Adagrad
from parashard.store import open_store
from parashard_server.durability.checkpoint_writer import write_rows
from parashard_server.state.kernels import fused, row_loops
from parashard_server.state.rows.embedding_tables import EmbeddingTables, RowGradients
from parashard_server.state.rows.row_memory import HUGE_BYTES, Region

KEYS = 1 << 15
DIMENSION = 8
READS = 40
PAGES = 512


def main() -> None:
    """Grow a table, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=23, help="exponent of the number of rows, a power of two (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write table_growth.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    most = 1 << arguments.rows
    fused.warm_up_rows()  # as a shard does before it listens
    pages = pages_s()
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(KEYS, DIMENSION)).astype(np.float32)
    found = []
    for ready in (False, True):
        tables = EmbeddingTables([table_of(most)], 0, 0, 1)
        if ready:
            make_ready(tables, most)
        clock, growth = grown(tables, most, gradients, rng)
        found.append(growth)
        if not ready:
            del tables  # the next one reuses its memory
    saved = checkpoints(tables, clock, gradients, rng)
    own = 4 * DIMENSION * 2 + 16
    shown = {
        "Pages": table(
            ["large pages (2 MiB each)", "time of each", "of that the slowest"],
            [[f"{len(pages):,}", f"{1000 * np.mean(pages):.2f} ms", f"{1000 * max(pages):.1f} ms"]],
        ),
        "Growth": table(
            [
                "rows",
                "keys a second",
                "longest push",
                "with memory at hand",
                "longest push",
                "rows read alone",
                f"bytes a row (own: {own})",
            ],
            [
                [
                    f"{first['rows']:,}",
                    f"{first['keys_per_s'] / 1e6:.2f} million",
                    f"{first['longest_push_ms']:.1f} ms",
                    f"{second['keys_per_s'] / 1e6:.2f} million",
                    f"{second['longest_push_ms']:.1f} ms",
                    f"{second['reads_per_s'] / 1e6:.0f} million",
                    f"{second['bytes_per_row']:.0f} ({second['bytes_per_row'] / own:.2f} x)",
                ]
                for first, second in zip(*found, strict=True)
            ],
        ),
        "Checkpoints": table(
            ["", "rows", "bytes", "time", "median hold of the shard", "99 %", "longest"],
            [
                [
                    name,
                    f"{one['rows']:,}",
                    f"{one['bytes']:,}",
                    f"{one['s']:.2f} s",
                    *(f"{one[key]:.2f} ms" for key in ("median_held_ms", "p99_held_ms", "longest_held_ms")),
                ]
                for name, one in saved.items()
            ],
        ),
    }
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        figures = {"pages_s": {"mean": np.mean(pages), "slowest": max(pages)}, "checkpoints": saved}
        write("table_growth", shown, figures | {"growth": found[0], "growth_with_memory": found[1]})


def table_of(most: int) -> EmbeddingTable:
    """Return the declaration of a table of at most this many rows."""
    return EmbeddingTable("rows", DIMENSION, Adagrad(0.1), rows_max=most + KEYS, keys_per_step_max=KEYS)


def pages_s() -> list[float]:
    """Return the seconds that the machine takes to provide each of some large pages."""
    found = []
    memory = Region(PAGES * HUGE_BYTES).view(np.uint8)
    for begin in range(0, len(memory), HUGE_BYTES):
        began_s = time.perf_counter()
        memory[begin : begin + HUGE_BYTES : 4096] = 1
        found.append(time.perf_counter() - began_s)
    return found


def make_ready(tables: EmbeddingTables, most: int) -> None:
    """Have the machine provide the memory that a table will need."""
    records = tables.by_name["rows"].records
    records.memory.words[: most * records.memory.stride : 1024] = 0
    index: Any = records._index
    places = 3 * most  # all sizes that segments have had
    index._tags[:places:4096] = index._references[:places:1024] = 0


def grown(tables: EmbeddingTables, most: int, gradients: Any, rng: Any) -> tuple[int, list[dict[str, float]]]:
    """Push until there are `most` rows; return the clock then, and figures by number of rows."""
    pushed(tables, np.arange(KEYS), gradients, 1)  # loads the optimizer's kernels
    clock, found = 2, []
    size = 1 << 16
    while size <= most:
        times_s = []
        while tables.rows < size:
            new = np.arange(tables.rows, min(size, tables.rows + KEYS // 2))
            old = rng.integers(0, tables.rows, KEYS - len(new))
            times_s.append(pushed(tables, np.concatenate([old, new]), gradients, clock))
            clock += 1
        found.append(
            {
                "rows": tables.rows,
                "keys_per_s": KEYS * len(times_s) / sum(times_s),
                "bytes_per_row": tables.by_name["rows"].memory_bytes / tables.rows,
                "longest_push_ms": 1000 * max(times_s),
                "reads_per_s": reads_per_s(tables, rng),
            }
        )
        size *= 2
    return clock, found


def reads_per_s(tables: EmbeddingTables, rng: Any) -> float:
    """Return how many rows at random places the machine can read in a second: the bound of a push."""
    records = tables.by_name["rows"].records
    values, sizes = np.empty(KEYS * DIMENSION, np.float32), np.array([records.memory.stride], np.int64)
    times_s = []
    for _ in range(READS):
        rows = rng.integers(0, records.memory.end, KEYS).astype(np.uint32)
        began_s = time.perf_counter()
        row_loops.gather_rows(rows, records.memory.words, values, records.parts[:1], sizes)
        times_s.append(time.perf_counter() - began_s)
    return KEYS / float(np.median(times_s))


def pushed(tables: EmbeddingTables, keys: Any, gradients: Any, clock: int) -> float:
    """Push keys, and return the seconds that the shard needs for it."""
    words = np.unique(mixed(keys))
    push = {"rows": RowGradients(words, gradients[: len(words)])}
    began_s = time.perf_counter()
    tables.apply(tables.checked(push), t=clock)
    return time.perf_counter() - began_s


def checkpoints(tables: EmbeddingTables, clock: int, gradients: Any, rng: Any) -> dict[str, dict[str, float]]:
    """Save all rows, and an increment after 1 % of them were pushed again."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder)))
        for number, name in enumerate(("whole", "increment of 1 %"), 1):
            if number == 2:
                wanted = rng.choice(tables.rows, tables.rows // 100, replace=False)
                for begin in range(0, len(wanted), KEYS):
                    clock += 1
                    pushed(tables, wanted[begin : begin + KEYS], gradients, clock)
            held_s: list[float] = []

            def exclusive(call: Any, held_s: list[float] = held_s) -> Any:
                began_s = time.perf_counter()
                result = call(None)
                held_s.append(time.perf_counter() - began_s)
                return result

            host: Any = SimpleNamespace(run_exclusive=exclusive)
            began_s = time.perf_counter()
            cut = exclusive(lambda _, clock=clock: tables.cut(clock))
            files = write_rows(store, CheckpointId(1, 0, 1, number), cut, host)
            exclusive(lambda _, cut=cut, files=files: tables.end_save(cut, [*cut.kept, *files]))
            found[name] = {
                "rows": sum(file.rows for file in files),
                "bytes": sum(file.size_bytes for file in files),
                "s": time.perf_counter() - began_s,
                "median_held_ms": 1000 * float(np.median(held_s)),
                "p99_held_ms": 1000 * float(np.percentile(held_s, 99)),
                "longest_held_ms": 1000 * max(held_s),
            }
    return found


if __name__ == "__main__":
    main()
