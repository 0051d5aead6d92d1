"""EmbeddingTables: the embedding tables of one shard, and what a step pushes for their rows.

Every check of a push comes before its first write. Rows are pushed with a step's dense gradient and move with it (P1,
P4): at once, or where a round ends by the sum of the round's. Knows no step, no message's header and no lock.
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
"""Checkpoints that may share a file of rows; then all rows of all tables are written again: another chain begins."""
STORED_SHARE_MAX = 1.5
"""Rows in a table's files for each of its rows; then these are written again."""


class RowGradients(NamedTuple):
    """Gradients of some rows of a table."""

    keys: Keys  # mixed, ascending, each once
    values: Float32s  # finite, shape (rows, row_elements)


class TablesCut(NamedTuple):
    """A shard's tables at one moment."""

    clock: int  # the time: steps (in sync mode: rounds) in the applied set
    savings: Mapping[str, RowSaving]  # by table: what is to be written
    counts: Mapping[str, int]  # number of rows of each table that has any
    kept: tuple[TableFile, ...]  # files of earlier checkpoints that have the other rows
    owner: EmbeddingTables | None = None
    rules: tuple[TableRule, ...] = ()  # of tables whose rows can be gone by the time alone


NO_TABLES = TablesCut(0, {}, {}, ())
"""Of a job that has none."""

Pushed = Mapping[str, RowGradients]
"""What a step pushes for tables, by their names."""


class EmbeddingTables:
    """The rows of a job's tables whose keys are in the buckets of one of `shards` shards.

    `learning_rate` is the job's: where a step has another one (P37), those of tables change by the same factor.
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
        """Most bytes that a push has for all tables."""
        return sum(table.table.push_bytes_max for table in self.by_name.values())

    @property
    def rows(self) -> int:
        """Number of rows in all tables."""
        return sum(table.rows for table in self.by_name.values())

    @property
    def changes(self) -> tuple[int, int]:
        """How many places the indexes have grown by, and how many rows the rules have ended, since the start."""
        saved = self._saved.values()
        return sum(records.grown_places for records in saved), sum(records.swept for records in saved)

    def checked(self, pushed: Pushed, waiting: Iterable[Pushed] = (), *, now: int = 0) -> Pushed:
        """Return a push for tables if it is one that can be taken; `check_slices` has seen its shapes."""
        # `waiting` was taken before and has not moved rows yet: of the room that there is, theirs is reserved. `now` is
        # how many steps (in sync mode: rounds) are applied.
        before = tuple(waiting)
        for name, (keys, values) in pushed.items():
            table = table_of(self.by_name, name)
            self._check_keys(name, keys)
            if not fused.is_finite(values.reshape(-1)):
                raise NonFiniteGradient(f"table {name!r}: the gradient of a row has a value that is not finite")
            table.check_room([keys, *(one[name].keys for one in before if name in one)], now)
        return pushed

    def check_slices(self, slices: Sequence[RowSlice]) -> None:
        """Refuse gradients of rows that are not declared as their table's, before they are decoded."""
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
        """Count the bytes of checked gradients of rows, as they came."""
        for piece in slices:
            self.by_name[piece.table].pushed_bytes += piece.size_bytes

    def check_keys(self, wanted: Mapping[str, Keys]) -> None:
        """Refuse keys that are not ascending, or of no table or another shard, and more than one message answers."""
        answer_bytes = 0
        for name, keys in wanted.items():
            answer_bytes += answer_bytes_of(len(keys), table_of(self.by_name, name).table.row_elements)
            self._check_keys(name, keys)
        if answer_bytes > ROWS_BYTES_MAX:
            raise LimitExceeded(f"the rows of a pull may have {answer_bytes} bytes; allowed are {ROWS_BYTES_MAX}")

    def pull(self, wanted: Mapping[str, Keys], now: int) -> dict[str, FoundRows]:
        """Return the rows of checked keys that have one at a time, by table; valid until the next call."""
        return {name: self.by_name[name].pull(keys, now) for name, keys in wanted.items()}

    def cut(self, clock: int) -> TablesCut:
        """Begin to save all tables as they are at a time: what moved since the last checkpoint, or all of a table."""
        kept: list[TableFile] = []
        savings: dict[str, RowSaving] = {}
        saved = self._saved
        if _is_chain_over(self._files):
            self.begin_chain()
        for name, records in sorted(saved.items()):
            files = [file for file in self._files if file.table == name]
            whole = not files or records.whole_due or _is_whole_due(files, records)
            kept += [] if whole else files
            savings[name] = records.cut(clock, whole=whole)
        counts = {name: records.rows for name, records in saved.items() if records.rows}
        rules = tuple(_rule(name, records.rules) for name, records in sorted(saved.items()) if records.rules.ends_rows)
        return TablesCut(clock, savings, counts, tuple(kept), self, rules)

    def begin_chain(self) -> None:
        """Let the next checkpoint name no file of an earlier one: it writes all rows, so that it needs none of them."""
        self._files = ()

    def ended(self, cut: TablesCut, files: Sequence[TableFile] | None) -> None:
        """Take note of a save that is over: `files` make the checkpoint, None: there is none."""
        saved = self._saved
        for name, saving in cut.savings.items():
            saved[name].ended(saving, cut.clock, stored=files is not None)
        if files is not None:
            self._files = tuple(files)

    def restore(
        self, stored: Iterable[tuple[str, StoredRows]], *, clock: int = 0, files: Sequence[TableFile] = ()
    ) -> None:
        """Take the rows of a checkpoint; raises as `TableRows.restore`, and where there is no such table."""
        # Each key comes once; `clock` is the checkpoint's time. `files` are those that a later one may name; none: it
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
        """Take rows that are there from the start, each key once; raises as `restore`."""
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
        """Move rows by their gradients; `t` and the others as in `Storage.apply`."""
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
        """Check order and place by one pass: ascending mixed keys are in the order of buckets."""
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


def _is_whole_due(files: Sequence[TableFile], table: Records) -> bool:
    """Tell whether an increment would leave more rows to be read twice than a restore should have."""
    return sum(file.rows for file in files) + table.moved_rows > STORED_SHARE_MAX * table.rows


def _is_chain_over(files: Sequence[TableFile]) -> bool:
    """Tell whether the oldest file is as old as one may be, in checkpoints, those that failed among them."""
    numbers = [file.number for file in files]
    return bool(numbers) and max(numbers) - min(numbers) >= CHAIN_MAX - 1


def decoded(slices: Sequence[RowSlice], payload: memoryview) -> Pushed:
    """Return the gradients of rows in a payload, as views of it where they are not encoded."""
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
    """Return a copy of what is borrowed."""
    return {name: RowGradients(keys.copy(), values.copy()) for name, (keys, values) in pushed.items()}


def summed(pushes: Sequence[Pushed]) -> dict[str, RowGradients]:
    """Return the sum of what steps push, row by row in the order of the steps (P35)."""
    return {
        name: _sum_of([one[name] for one in pushes if name in one])
        for name in sorted({name for one in pushes for name in one})
    }


def _sum_of(gradients: Sequence[RowGradients]) -> RowGradients:
    together = np.concatenate([one.keys for one in gradients])
    # With `return_index` the sort is a stable one, which merges runs that are in order: 1.1 ms in place of 3.
    keys, _, places = np.unique(together, return_index=True, return_inverse=True)
    values = np.zeros((len(keys), gradients[0].values.shape[1]), np.float32)
    begin = 0
    for one in gradients:  # a key is in one step's once, so that no two of its values meet in one addition
        end = begin + len(one.keys)
        values[places[begin:end]] += one.values
        begin = end
    return RowGradients(keys, values)
