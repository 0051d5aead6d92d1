"""The oracles: models whose final weights show whether each step was applied exactly once and as a whole.

The ledger counts how often every example was applied. The "gradient" of example i in epoch e is row i = (1, (e + 1)^2),
zero elsewhere, summed over the batch. With SGD at learning rate -1, and sums instead of means where gradients are
folded, every row must end as (epochs, sum of (e + 1)^2): the first column shows a step that was lost or counted twice,
the second one such errors that cancel each other across epochs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.job.model_options import RowLedgerOptions, TornOptions
from parashard.models.due_rows import Applied, due_rows
from parashard.plan.embedding import unmixed
from parashard.plan.variables import Float32s, Variable

if TYPE_CHECKING:
    from parashard.checkpoints.row_files import StoredRows

LEDGER_EPOCHS_MAX = 368
"""Most epochs whose sum of squares is at most 2^24, up to where float32 counts exactly."""


class Ledger:
    """One variable, "ledger": shape (examples, 2), zeros at the start."""

    adds_losses = True

    def __init__(self, spec: DataSpec) -> None:
        self._examples = spec.examples

    def initial_variables(self) -> Mapping[str, Variable]:
        return {"ledger": Variable("ledger", (self._examples, 2), decay=False)}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0, because nothing is minimised, and the batch's entries, a new array."""
        squares_total(batch.epoch + 1)
        entries = np.zeros((self._examples, 2), variables["ledger"].dtype)
        np.add.at(entries, batch.indices, np.array((1, (batch.epoch + 1) ** 2), entries.dtype))
        return 0.0, {"ledger": xp.asarray(entries)}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"ledger_wrong": rows that are not exactly (epochs, sum of (e + 1)^2 for e < epochs)}."""
        expected = np.array((epochs, squares_total(epochs)), np.float32)
        return {"ledger_wrong": int((variables["ledger"] != expected).any(axis=1).sum())}


def squares_total(epochs: int) -> int:
    """Return the sum of (e + 1)^2 for e < epochs; raise ConfigurationError where float32 could not hold it exactly."""
    if epochs > LEDGER_EPOCHS_MAX:
        raise ConfigurationError(
            f"model kind 'ledger' counts exactly for at most {LEDGER_EPOCHS_MAX} epochs (a sum of squares of 2^24), "
            f"found {epochs}"
        )
    return epochs * (epochs + 1) * (2 * epochs + 1) // 6


TABLE = "ledger"
_SHARED = 1 << 62  # where shared keys begin
EXACT_MAX = 1 << 24
_FIRST = 64  # examples that the variable has rows for


class RowLedger:
    """The variable "entries" and the table "ledger", whose rows have two numbers; all are zeros at the start.

    Example i uses two keys: its own, and one of a few that all examples share, often several times in a batch. Each use
    in epoch e adds (1, (e + 1)^2): every row must end as the sums over its uses, and there must be no other row.
    """

    adds_losses = True

    def __init__(self, spec: DataSpec, options: RowLedgerOptions) -> None:
        self._examples = spec.examples
        self._first = min(_FIRST, spec.examples)
        self._shared = options.shared

    def initial_variables(self) -> Mapping[str, Variable]:
        return {"entries": Variable("entries", (self._first, 2), decay=False)}

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return each example's two keys."""
        return {TABLE: np.stack([batch.indices, _SHARED + batch.indices % self._shared], axis=1)}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0 and the entries of all uses; ConfigurationError where float32 could not count them exactly."""
        self._check_countable(batch.epoch + 1)
        rows, places = variables[TABLE], batch.places[TABLE]
        uses = xp.bincount(places.reshape(-1), minlength=len(rows)).astype(np.float32)
        entry = xp.asarray((1, (batch.epoch + 1) ** 2), np.float32)
        first = xp.bincount(xp.asarray(batch.indices[batch.indices < self._first]), minlength=self._first)
        return 0.0, {"entries": first.astype(np.float32)[:, None] * entry, TABLE: uses[:, None] * entry}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"ledger_wrong": rows of the variable that are not exactly (epochs, sum of (e + 1)^2)}."""
        due = np.array((epochs, squares_total(epochs)), np.float32)
        return {"ledger_wrong": int((variables["entries"] != due).any(axis=1).sum())}

    def audit_rows(
        self, rows: Iterable[tuple[str, StoredRows]], epochs: int, applied: Applied | None = None
    ) -> Mapping[str, int]:
        """Return {"rows_wrong": keys whose row is not the sum over its uses, is missing, or has no use}."""
        # With `applied` the table has row rules, which determine the expected rows.
        if applied is not None:
            return {"rows_wrong": self._wrong_by_rules(rows, applied)}
        self._check_countable(epochs)
        uses = np.bincount(np.arange(self._examples) % self._shared, minlength=self._shared)
        once = np.array([epochs, squares_total(epochs)], np.float32)
        wrong = 0
        found: list[NDArray[np.int64]] = []
        for _, stored in rows:
            keys = unmixed(stored.keys).astype(np.int64)
            times = self._times(keys, uses)
            wrong += int(((stored.values != times[:, None] * once).any(axis=1) | (times == 0)).sum())
            found.append(keys[times > 0])
        due = self._examples + int(np.count_nonzero(uses))
        known = np.concatenate([np.empty(0, np.int64), *found])
        distinct = len(np.unique(known))
        return {"rows_wrong": wrong + (due - distinct) + (len(known) - distinct)}

    def _check_countable(self, epochs: int) -> None:
        """Raise ConfigurationError where float32 could not hold the sum of a shared key exactly."""
        times = -(-self._examples // self._shared)
        if times * squares_total(epochs) > EXACT_MAX:
            raise ConfigurationError(
                f"model kind 'row_ledger' counts up to 2^24: with {self._examples:,} examples and {self._shared} "
                f"keys that they share a key is used {times:,} times an epoch, too often for {epochs} epochs; raise "
                "model.shared, or take fewer epochs"
            )

    def _wrong_by_rules(self, rows: Iterable[tuple[str, StoredRows]], applied: Applied) -> int:
        keys = self._examples + self._shared
        t, found = np.zeros(keys, np.int64), np.zeros((keys, 2))
        unknown = 0
        for name, stored in rows:
            if name != TABLE:
                continue  # candidates: counted keys that have no row yet
            ids = unmixed(stored.keys).astype(np.int64)
            shared = ids >= _SHARED
            places = np.where(shared, ids - _SHARED + self._examples, ids)
            known = (places >= 0) & (places < keys) & (shared | (ids < self._examples)) & (t[places % keys] == 0)
            t[places[known]], found[places[known]] = stored.t[known], stored.values[known]
            unknown += len(ids) - len(np.unique(places[known]))
        due = due_rows(applied, TABLE, self._examples, self._shared, t)
        wrong = (t < due.t[0]) | (t > due.t[1])
        wrong |= ((found < due.entries[0]) | (found > due.entries[1])).any(axis=1)
        return unknown + int(wrong.sum())

    def _times(self, keys: NDArray[np.int64], uses: NDArray[np.int64]) -> Float32s:
        """Return how often an epoch uses each key."""
        shared = keys - _SHARED
        times = ((keys >= 0) & (keys < self._examples)).astype(np.int64)
        of_shared = (shared >= 0) & (shared < self._shared)
        times[of_shared] = uses[shared[of_shared]]
        return times.astype(np.float32)


TORN_VARIABLES = tuple(f"torn_{piece:02}" for piece in range(8))

_COLUMNS = 16
_CONSTANT_BITS = 10


class Torn:
    """Eight variables, "torn_00" to "torn_07": shape (rows, 16), zeros at the start.

    Every attempt at a step pushes one random constant to every row of every variable. A shard that applies pushes
    atomically keeps the values of a variable equal; chunks of two attempts mixed, or half a push, make them differ.
    Unlike all other randomness this is not seeded: attempts with the same constant could be mixed undetected. Two
    shards may hold two attempts of a step, so only values of one variable are compared, each small enough to be whole
    on one shard.

    Examples
    --------
    A push that reached only one row of a variable:

    >>> import numpy as np
    >>> final = {name: np.zeros((2, 16), np.float32) for name in TORN_VARIABLES}
    >>> final["torn_03"][1] = 0.5
    >>> Torn(TornOptions(rows=2)).audit(final, epochs=1)
    {'torn': 16}
    """

    def __init__(self, options: TornOptions) -> None:
        self._shape = (options.rows, _COLUMNS)

    def initial_variables(self) -> Mapping[str, Variable]:
        return {name: Variable(name, self._shape, decay=False) for name in TORN_VARIABLES}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0 and, for every variable, a new array full of this attempt's constant."""
        constant = _constant()
        return 0.0, {name: xp.full(self._shape, constant, variables[name].dtype) for name in TORN_VARIABLES}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"torn": values that differ from the first value of their variable}."""
        return {"torn": sum(int((variables[name] != variables[name][0, 0]).sum()) for name in TORN_VARIABLES)}


def _constant() -> float:
    """Return k / 1024, k random in +-[1, 1024]."""
    # Never zero, which would hide half a push. Sums of multiples of 1/1024 are exact in float32 in any order while they
    # stay below 2^14: always for 16,384 steps, and with random signs almost surely for millions.
    bits = int.from_bytes(os.urandom(2), "little")
    magnitude = 1 + (bits & ((1 << _CONSTANT_BITS) - 1))
    return (magnitude if bits >> 15 else -magnitude) / (1 << _CONSTANT_BITS)
