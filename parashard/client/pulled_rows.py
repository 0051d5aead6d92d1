"""PulledRows: the rows of embedding tables that a step uses, assembled from the answers of the shards.

Owns the division of keys over shards and messages, and the initial values of rows that no shard has (P27). Knows no
transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from parashard.encodings import codec
from parashard.errors import MalformedFrame, UnknownVariable, shortened
from parashard.plan.embedding import KEY_BYTES, EmbeddingTable, Keys, cut_by_shard, first_rows, floats_of
from parashard.plan.variables import Float32s
from parashard.protocol.messages import (
    MESSAGE_BYTES_MAX,
    NO_KEYS,
    ROWS_BYTES_MAX,
    Buffers,
    FoundRows,
    Push,
    RowSlice,
    answer_bytes_of,
)


class RowPart(NamedTuple):
    """Keys, by table, of one request for rows to a shard."""

    shard: int
    keys: Mapping[str, slice]


class TableSet:
    """A job's embedding tables on a client; their names differ."""

    def __init__(self, tables: tuple[EmbeddingTable, ...] = (), seed: int = 0) -> None:
        self.seed = seed
        self.by_name: Mapping[str, EmbeddingTable] = {table.name: table for table in tables}
        self._first_rows: dict[str, Callable[[Keys], Float32s]] = {
            table.name: first_rows(table, seed) for table in tables
        }

    def check(self, names: Iterable[str]) -> None:
        """Raise UnknownVariable if the job lacks a table of these names."""
        unknown = sorted(set(names) - self.by_name.keys())
        if unknown:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise UnknownVariable(f"table {shortened(unknown[0])!r} is none of the job's: {known}")

    def first_rows(self, table: str, keys: Keys) -> Float32s:
        """Return the initial values of rows of a table."""
        return self._first_rows[table](keys)


NO_TABLES = TableSet()


class PulledRows:
    """The rows of some keys by table, which are mixed, ascending and each once; `values` is filled by `fill`."""

    def __init__(self, tables: TableSet, keys: Mapping[str, Keys] = NO_KEYS) -> None:
        tables.check(keys)
        self._tables = tables
        self.keys = {name: np.ascontiguousarray(wanted) for name, wanted in keys.items()}
        self.values: dict[str, Float32s] = {
            name: np.empty((len(wanted), tables.by_name[name].row_elements), np.float32)
            for name, wanted in keys.items()
        }

    def request_batches(self, shards: int) -> list[list[RowPart]]:
        """Return the requests to shards in batches: first one to each, by index, then those with more parts."""
        # A batch has at most one part of a shard: a client that waited for a connection while it holds others of the
        # same shard could wait for itself.
        runs = {name: cut_by_shard(wanted, shards) for name, wanted in self.keys.items()}
        of_shards = [self._parts_of(shard, {name: cut[shard] for name, cut in runs.items()}) for shard in range(shards)]
        return [[part for part in batch if part is not None] for batch in itertools.zip_longest(*of_shards)]

    def _parts_of(self, shard: int, runs: Mapping[str, slice]) -> list[RowPart]:
        """Split a shard's keys into parts, at least one, whose keys and rows each fit into one message."""
        parts: list[dict[str, slice]] = [{}]
        rows_left, keys_left = ROWS_BYTES_MAX, MESSAGE_BYTES_MAX
        for name, run in runs.items():
            row_elements, begin = self.values[name].shape[1], run.start
            while begin < run.stop:
                end = min(begin + keys_within(rows_left, keys_left, row_elements), run.stop)
                if end > begin:
                    parts[-1][name] = slice(begin, end)
                    rows_left -= answer_bytes_of(end - begin, row_elements)
                    keys_left -= KEY_BYTES * (end - begin)
                if end < run.stop:
                    parts.append({})
                    rows_left, keys_left = ROWS_BYTES_MAX, MESSAGE_BYTES_MAX
                begin = end
        return [RowPart(shard, part) for part in parts]

    def keys_of(self, part: RowPart) -> Mapping[str, Keys]:
        """Return the keys of a part, by table."""
        return {name: self.keys[name][some] for name, some in part.keys.items()}

    def answer_bytes_of(self, part: RowPart) -> int:
        """Return the most bytes of the answer to a part."""
        return sum(
            answer_bytes_of(some.stop - some.start, self.values[name].shape[1]) for name, some in part.keys.items()
        )

    def fill(self, part: RowPart, rows: Mapping[str, FoundRows]) -> None:
        """Copy the rows of an answer to a part, or raise MalformedFrame; absent rows get their initial values."""
        for name, found in rows.items():
            into = self.values[name][part.keys[name]]
            if found.values.shape[1] != into.shape[1]:
                raise MalformedFrame(
                    f"table {name!r}: rows of {found.values.shape[1]} elements came; they have {into.shape[1]}"
                )
            if found.present.all():
                into[:] = floats_of(found.values)
                continue
            absent = ~found.present
            into[found.present] = floats_of(found.values)
            into[absent] = self._tables.first_rows(name, self.keys[name][part.keys[name]][absent])


def with_rows(push: Push, rows: tuple[tuple[RowSlice, ...], list[memoryview]]) -> Push:
    """Return a push with row gradients added."""
    slices, pieces = rows
    return push._replace(rows=slices, payload=Buffers([*push.payload.pieces, *pieces]))


def rows_by_shard(
    tables: TableSet, keys: Mapping[str, Keys], gradients: Mapping[str, Float32s], shards: int
) -> Iterator[tuple[tuple[RowSlice, ...], list[memoryview]]]:
    """Yield the row slices of each shard's push, and their pieces of the payload."""
    # Gradients are contiguous, by table; raises NonFiniteGradient if one that is rounded is not finite.
    runs = {name: cut_by_shard(keys[name], shards) for name in gradients}
    dtypes = {name: codec.dtype_of(tables.by_name[name]) for name in gradients}
    encoded = {name: codec.encode_rows(name, values, dtypes[name]) for name, values in gradients.items()}
    for shard in range(shards):
        slices: list[RowSlice] = []
        pieces: list[memoryview] = []
        for name in sorted(gradients):
            run = runs[name][shard]
            if run.stop > run.start:
                slices.append(RowSlice(name, run.stop - run.start, gradients[name].shape[1], dtypes[name]))
                pieces += [keys[name][run].data, *(part[run].data for part in encoded[name])]
        yield tuple(slices), pieces


def keys_within(rows_bytes: int, keys_bytes: int, row_elements: int) -> int:
    """Return how many keys of a table fit into the bytes left for rows, if all keys have one, and for keys."""
    return min(rows_bytes // answer_bytes_of(8, row_elements), keys_bytes // KEY_BYTES // 8) * 8
