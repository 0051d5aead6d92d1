"""EmbeddingTables: the embedding tables of one shard, and a step's gradients of their rows.

Every check of a push comes before its first write. Row gradients come with a step's dense gradient and are applied with
it (P1, P4): at once, or summed at the end of a batch or round. Knows no step, no message's header and no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from parashard.checkpoints.manifest import TableFile, TableRule
from parashard.checkpoints.row_files import StoredRows
from parashard.encodings import codec
from parashard.errors import (
    DamagedCheckpoint,
    LimitExceeded,
    MalformedFrame,
    NonFiniteGradient,
    ShapeMismatch,
    UnknownVariable,
)
from parashard.plan.embedding import EmbeddingTable, KeyedRows, Keys, bucket_ranges, buckets_of
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Float32s
from parashard.protocol.messages import ROWS_BYTES_MAX, FoundRows, RowSlice, answer_bytes_of
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import NOTHING_BEFORE, Before
from parashard_server.state.rows.live_rows import LiveRows, table_of
from parashard_server.state.rows.records import Records
from parashard_server.state.rows.row_saving import RowSaving
from parashard_server.state.rows.table_rows import TableRows

CHAIN_MAX = 16
"""Most checkpoints that share a file of rows; then a new chain begins: all rows of all tables are written again."""
STORED_SHARE_MAX = 1.5
"""Most stored rows in a table's files per row of the table; above it, all its rows are written again."""


class RowGradients(NamedTuple):
    """Gradients of some rows of a table."""

    keys: Keys  # mixed, ascending, each once
    values: Float32s  # finite, shape (rows, row_elements)


class TablesCut(NamedTuple):
    """A shard's tables at one moment."""

    clock: int  # the time: steps (in sync mode: rounds) in the applied set
    savings: Mapping[str, RowSaving]  # by table: the rows to write
    counts: Mapping[str, int]  # number of rows of each table that has any
    kept: tuple[TableFile, ...]  # files of earlier checkpoints that have the other rows
    owner: EmbeddingTables | None = None
    rules: tuple[TableRule, ...] = ()  # of tables whose rows can be evicted by time alone


NO_TABLES = TablesCut(0, {}, {}, ())
"""Of a job without tables."""

Pushed = Mapping[str, RowGradients]
"""A step's row gradients, by table."""


class EmbeddingTables:
    """The rows of a job's tables whose keys are in the buckets of one of `shards` shards.

    `learning_rate` is the job's: a step with another one (P37) changes the tables' rates by the same factor.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        seed: int,
        shard: int,
        shards: int,
        learning_rate: float = 1.0,
        before: Before = NOTHING_BEFORE,
    ) -> None:
        self._learning_rate = learning_rate
        self.buckets = bucket_ranges(shards)[shard]
        self.by_name = {table.name: TableRows(table, seed, self.buckets, before) for table in tables}
        self.live = LiveRows(self.by_name)
        self._files: tuple[TableFile, ...] = ()  # of the last checkpoint that is stored

    @property
    def push_bytes_max(self) -> int:
        """Most bytes of a push for all tables together."""
        return sum(table.table.push_bytes_max for table in self.by_name.values())

    @property
    def rows(self) -> int:
        """Number of rows in all tables."""
        return sum(table.rows for table in self.by_name.values())

    @property
    def changes(self) -> tuple[int, int]:
        """Number of places that the indexes have grown by, and of rows that the rules have evicted, since the start."""
        saved = self._saved.values()
        return sum(records.grown_places for records in saved), sum(records.evicted for records in saved)

    def checked(self, pushed: Pushed, waiting: Iterable[Pushed] = (), *, now: int = 0) -> Pushed:
        """Check keys, values and room of a push's row gradients, and return them; `check_slices` checks the shapes."""
        # `waiting` are accepted pushes that are not applied yet: room for their rows is reserved. `now` is the number
        # of applied steps (in sync mode: rounds).
        before = tuple(waiting)
        for name, (keys, values) in pushed.items():
            table = table_of(self.by_name, name)
            self._check_keys(name, keys)
            if not fused.is_finite(values.reshape(-1)):
                raise NonFiniteGradient(f"table {name!r}: the gradient of a row has a value that is not finite")
            table.check_room([keys, *(one[name].keys for one in before if name in one)], now)
        return pushed

    def check_slices(self, slices: Sequence[RowSlice]) -> None:
        """Refuse row gradients whose length, number or encoding is not the table's, before decoding."""
        for name, rows, row_elements, dtype in slices:
            table = table_of(self.by_name, name).table
            if row_elements != table.row_elements:
                raise ShapeMismatch(f"table {name!r}: rows have {table.row_elements} elements, found {row_elements}")
            most = table.keys_per_step_max
            if rows > most:
                raise LimitExceeded(f"table {name!r}: a push of {rows} keys; its keys_per_step_max is {most}")
            due = codec.dtype_of(table)
            if dtype is not due:
                raise ShapeMismatch(f"table {name!r}: gradients of rows travel as {due.name}, found {dtype.name}")

    def count_bytes(self, slices: Sequence[RowSlice]) -> None:
        """Count the bytes of checked row gradients, as encoded."""
        for piece in slices:
            self.by_name[piece.table].pushed_bytes += piece.size_bytes

    def check_keys(self, wanted: Mapping[str, Keys]) -> None:
        """Refuse keys that are not ascending, of no table or of another shard, or too many for one answer."""
        answer_bytes = 0
        for name, keys in wanted.items():
            answer_bytes += answer_bytes_of(len(keys), table_of(self.by_name, name).table.row_elements)
            self._check_keys(name, keys)
        if answer_bytes > ROWS_BYTES_MAX:
            raise LimitExceeded(f"the rows of a pull may have {answer_bytes} bytes; allowed are {ROWS_BYTES_MAX}")

    def pull(self, wanted: Mapping[str, Keys], now: int) -> dict[str, FoundRows]:
        """Return the rows of checked keys that exist at a time, by table; valid until the next call."""
        return {name: self.by_name[name].pull(keys, now) for name, keys in wanted.items()}

    def cut(self, clock: int) -> TablesCut:
        """Begin a save of all tables as of a time: of each the rows changed since the last checkpoint, or all rows."""
        kept: list[TableFile] = []
        savings: dict[str, RowSaving] = {}
        saved = self._saved
        if _is_chain_over(self._files):
            self.begin_chain()
        for name, records in sorted(saved.items()):
            files = [file for file in self._files if file.table == name]
            full = not files or records.full_due or _is_full_due(files, records)
            kept += [] if full else files
            savings[name] = records.cut(clock, full=full)
        counts = {name: records.rows for name, records in saved.items() if records.rows}
        rules = tuple(_rule(name, records.rules) for name, records in sorted(saved.items()) if records.rules.ends_rows)
        return TablesCut(clock, savings, counts, tuple(kept), self, rules)

    def begin_chain(self) -> None:
        """Make the next checkpoint write all rows, so that it needs no file of an earlier one."""
        self._files = ()

    def end_save(self, cut: TablesCut, files: Sequence[TableFile] | None) -> None:
        """End a save: `files` are the checkpoint's; None: it was not stored."""
        saved = self._saved
        for name, saving in cut.savings.items():
            saved[name].end_save(saving, cut.clock, stored=files is not None)
        if files is not None:
            self._files = tuple(files)

    def restore(
        self, stored: Iterable[tuple[str, StoredRows]], *, clock: int = 0, files: Sequence[TableFile] = ()
    ) -> None:
        """Add the rows of a checkpoint; raises as `TableRows.restore`, and DamagedCheckpoint for an unknown table."""
        # Each key comes once; `clock` is the checkpoint's time. `files` are those that the next one may share; none: it
        # saves all rows.
        owner = {name: table for table in self.by_name.values() for name in table.saved}
        for name, rows in stored:
            if name not in owner:
                raise DamagedCheckpoint(f"a checkpoint has rows of table {name!r}, which is none of the job's")
            owner[name].restore(name, rows, clock)
        self._files = tuple(files)
        for name, records in self._saved.items():
            records.restored(clock, saved=any(file.table == name for file in files))

    def begin_with(self, rows: Iterable[tuple[str, KeyedRows]]) -> None:
        """Add a job's initial rows, each key once; raises as `restore`."""
        for name, some in rows:
            if name not in self.by_name:
                raise DamagedCheckpoint(f"the job begins with rows of table {name!r}, which is none of its own")
            self.by_name[name].begin_with(some)

    def apply(
        self,
        pushed: Pushed,
        *,
        t: int,
        scale: float = 1.0,
        learning_rate: float | None = None,
    ) -> None:
        """Update rows by their gradients; `t` and the others as in `Storage.apply`."""
        for name, (keys, values) in pushed.items():
            rows = self.by_name[name]
            rate = None
            if learning_rate is not None:
                own = rows.table.optimizer.learning_rate
                rate = own * (learning_rate / self._learning_rate) if self._learning_rate else learning_rate
            rows.push(keys, values, clock=t, scale=scale, learning_rate=rate)
        for name in self.by_name.keys() - pushed.keys():
            self.by_name[name].sweep(t)

    @property
    def _saved(self) -> dict[str, Records]:
        return {name: records for table in self.by_name.values() for name, records in table.saved.items()}

    def _check_keys(self, name: str, keys: Keys) -> None:
        """Check that keys are ascending and in the shard's buckets: mixed keys sort by bucket, so the ends suffice."""
        if not len(keys):
            return
        if not (keys[:-1] < keys[1:]).all():
            raise MalformedFrame(f"table {name!r}: keys are not ascending, each once")
        first, last = buckets_of(keys[[0, -1]]).tolist()
        begin, end = self.buckets
        if first < begin or last >= end:
            raise UnknownVariable(
                f"table {name!r}: keys of the buckets {first} to {last}; this shard has [{begin}, {end})"
            )


def _rule(name: str, rules: RowRules) -> TableRule:
    return TableRule(
        table=name,
        unused_steps=rules.evict_unused_steps,
        norm_below=float(rules.evict_norm_below),
        norm_every=rules.evict_norm_every,
    )


def _is_full_due(files: Sequence[TableFile], table: Records) -> bool:
    """Tell whether an increment would exceed `STORED_SHARE_MAX`, the rows that a restore may read for each row."""
    return sum(file.rows for file in files) + table.moved_rows > STORED_SHARE_MAX * table.rows


def _is_chain_over(files: Sequence[TableFile]) -> bool:
    """Tell whether the oldest file is `CHAIN_MAX` checkpoints old, counting failed ones."""
    numbers = [file.number for file in files]
    return bool(numbers) and max(numbers) - min(numbers) >= CHAIN_MAX - 1


def decoded(slices: Sequence[RowSlice], payload: memoryview) -> Pushed:
    """Return the row gradients in a payload, as views of it unless they are encoded."""
    needed = sum(piece.size_bytes for piece in slices)
    if needed != payload.nbytes:
        raise MalformedFrame(f"the rows of tables need {needed} bytes, the push has {payload.nbytes} for them")
    found: dict[str, RowGradients] = {}
    begin = 0
    for piece in slices:
        if piece.table in found:
            raise MalformedFrame(f"table {piece.table!r} is named twice in a push")
        middle, end = begin + piece.keys_bytes, begin + piece.size_bytes
        keys = np.frombuffer(payload[begin:middle], "<u8")
        keys = keys if keys.flags.aligned else keys.copy()
        found[piece.table] = RowGradients(keys, codec.decode_rows(piece, payload[middle:end]))
        begin = end
    return found


def copied(pushed: Pushed) -> Pushed:
    """Return a copy of borrowed row gradients."""
    return {name: RowGradients(keys.copy(), values.copy()) for name, (keys, values) in pushed.items()}


def summed(pushes: Sequence[Pushed]) -> dict[str, RowGradients]:
    """Return the sum of the steps' row gradients, row by row in the order of the steps (P35)."""
    return {
        name: _sum_of([one[name] for one in pushes if name in one])
        for name in sorted({name for one in pushes for name in one})
    }


def _sum_of(gradients: Sequence[RowGradients]) -> RowGradients:
    together = np.concatenate([one.keys for one in gradients])
    # With `return_index` NumPy uses a stable sort, which merges ascending runs: 1.1 ms in place of 3.
    keys, _, places = np.unique(together, return_index=True, return_inverse=True)
    values = np.zeros((len(keys), gradients[0].values.shape[1]), np.float32)
    begin = 0
    for one in gradients:  # each step has a key once, so that an indexed addition never repeats a row
        end = begin + len(one.keys)
        values[places[begin:end]] += one.values
        begin = end
    return RowGradients(keys, values)
