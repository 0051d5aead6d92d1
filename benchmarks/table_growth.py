"""An embedding table on one shard as it grows: rows a second, memory of a row, the longest push, and its checkpoints.

    python -m benchmarks.table_growth [--rows 22] [--write]

The shard's own parts in this process, without transport: pushes of 2^15 keys of which half are new, rows of 8 floats
with Adagrad, then a whole checkpoint and an increment after 1 % of the rows were pushed again.
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
from parashard_server.state.rows.tables import RowGradients, Tables

KEYS = 1 << 15
DIMENSION = 8
STATED = 1.25


def main() -> None:
    """Grow a table, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=23, help="two to the power of so many rows (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write table_growth.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    most = 1 << arguments.rows
    spec = EmbeddingTable("rows", DIMENSION, Adagrad(0.1), rows_max=most + KEYS, keys_per_step_max=KEYS)
    tables = Tables([spec], 0, 0, 1)
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(KEYS, DIMENSION)).astype(np.float32)
    pushed(tables, np.arange(KEYS), gradients, 1)  # loads the kernels
    clock, found = 2, []
    for size in (1 << power for power in range(16, arguments.rows + 1)):
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
                "bytes_per_row": tables.memory_bytes / tables.rows,
                "longest_push_ms": 1000 * max(times_s),
            }
        )
    saved = checkpoints(tables, clock, gradients, rng)
    own = 4 * DIMENSION * 2 + 16
    shown = {
        "Growth": table(
            ["rows", "keys a second", f"bytes a row (row, slot and 16: {own})", "longest push"],
            [
                [
                    f"{one['rows']:,}",
                    f"{one['keys_per_s'] / 1e6:.2f} million",
                    f"{one['bytes_per_row']:.0f} ({one['bytes_per_row'] / own:.2f} x)",
                    f"{one['longest_push_ms']:.1f} ms",
                ]
                for one in found
            ],
        ),
        "Checkpoints": table(
            ["", "rows", "bytes", "time", "longest hold of the shard"],
            [
                [name, f"{one['rows']:,}", f"{one['bytes']:,}", f"{one['s']:.2f} s", f"{one['held_ms']:.1f} ms"]
                for name, one in saved.items()
            ],
        ),
    }
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        write("table_growth", shown, {"growth": found, "checkpoints": saved})


def pushed(tables: Tables, keys: Any, gradients: Any, clock: int) -> float:
    """Push keys, and return the seconds that the shard needs for it."""
    words = np.unique(mixed(keys))
    push = {"rows": RowGradients(words, gradients[: len(words)])}
    began_s = time.perf_counter()
    tables.apply(tables.checked(push), t=clock)
    return time.perf_counter() - began_s


def checkpoints(tables: Tables, clock: int, gradients: Any, rng: Any) -> dict[str, dict[str, float]]:
    """Save all rows, and what moved after 1 % of them were pushed again."""
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
            tables.ended(cut, [*cut.kept, *files])
            found[name] = {
                "rows": sum(file.rows for file in files),
                "bytes": sum(file.size_bytes for file in files),
                "s": time.perf_counter() - began_s,
                "held_ms": 1000 * max(held_s),
            }
    return found


if __name__ == "__main__":
    main()
