"""Rows of embedding tables on their way: bytes of a push by its encoding, and what encoding and decoding cost.

    python -m benchmarks.row_traffic [--write]

Steps of 4,096 x 26 ids by Zipf(1.2) of 2^20, rows of 16 floats: those of `benchmarks.races.embedding_rows`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from benchmarks.peers import click_ids, seam
from benchmarks.tables import spread, table, write
from parashard.client.pulled_rows import TableSet, rows_by_shard
from parashard.encodings import codec
from parashard.plan.embedding import EmbeddingTable, RowEncoding, mixed
from parashard.plan.optimizers import Adagrad
from parashard_server.state.rows.embedding_tables import decoded

ENCODINGS: tuple[RowEncoding, ...] = ("float32", "bfloat16", "float16", "int8")


def main() -> None:
    """Measure, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write row_traffic.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    keys = [np.unique(mixed(ids.reshape(-1))) for ids in click_ids.batches()]
    pushes = pushed(keys)
    shown = {"A push": described(pushes)}
    for heading, text in shown.items():
        print(f"\n{heading}\n\n{text}")
    if arguments.write:
        write("row_traffic", shown, {"push": pushes})


def pushed(keys: list[Any]) -> dict[str, dict[str, Any]]:
    """Return for each encoding the bytes of pushes, and milliseconds of both ends, in turns."""
    found: dict[str, dict[str, Any]] = {name: {"bytes": [], "encode_ms": [], "decode_ms": []} for name in ENCODINGS}
    tables = {
        name: TableSet((EmbeddingTable("rows", click_ids.DIMENSION, Adagrad(0.1), encoding=name),)) for name in found
    }
    for set_ in tables.values():
        codec.warm_up_rows(set_.by_name.values())
    for words in keys:
        gradients = click_ids.gradients(len(words))
        for name, figures in found.items():
            cut: list[Any] = []
            figures["encode_ms"].append(
                seam.milliseconds(
                    lambda name=name, words=words, gradients=gradients, cut=cut: cut.extend(
                        rows_by_shard(tables[name], {"rows": words}, {"rows": gradients}, 1)
                    )
                )
            )
            ((slices, pieces),) = cut
            payload = memoryview(b"".join(pieces))
            figures["decode_ms"].append(
                seam.milliseconds(lambda slices=slices, payload=payload: decoded(slices, payload))
            )
            figures["bytes"].append(payload.nbytes)
    return found


def described(pushes: dict[str, dict[str, Any]]) -> str:
    """Return the table of pushes."""
    whole = statistics.mean(pushes["float32"]["bytes"])
    return table(
        ["encoding", "bytes of a push", "of float32", "encode and cut, ms", "check and decode, ms"],
        [
            [
                name,
                f"{statistics.mean(figures['bytes']):,.0f}",
                f"{statistics.mean(figures['bytes']) / whole:.1%}",
                spread(figures["encode_ms"]),
                spread(figures["decode_ms"]),
            ]
            for name, figures in pushes.items()
        ],
    )


if __name__ == "__main__":
    main()
