"""Expected rows of the row ledger under rules that admit and evict rows.

In `sync:N` the order of updates is known, and so are all rows: an independent implementation of the rules replays each
update. In other modes updates may come in any order, which gives bounds: a row that was pushed t times has t of its
key's updates, so at least the t that use it least; without eviction t is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import mixed
from parashard.plan.row_rules import Chance, RowRules
from parashard.plan.steps import StepPlan

Numbers = NDArray[np.int64]


class Applied(NamedTuple):
    """The updates of a job: each of `steps` once, `update_steps` of them together, in order in `sync:N`."""

    steps: StepPlan
    update_steps: int
    rules: RowRules
    seed: int
    ordered: bool


class RowBounds(NamedTuple):
    """Bounds of each key's row, all int64 of shape (keys,) but `entries`."""

    t: tuple[Numbers, Numbers]  # least and greatest number of pushes; 0: no row
    # Shape (keys, 2): least and greatest values of its two numbers, given the number of pushes that the row states.
    entries: tuple[Numbers, Numbers]


def due_rows(applied: Applied, table: str, own: int, shared: int, t: Numbers) -> RowBounds:
    """Return the bounds of all rows: of the `own` keys of examples, then of the `shared` keys."""
    # `t`, int64 of shape (own + shared,): the number of pushes that each row states.
    if applied.ordered:
        return _counted(applied, table, own, shared)
    return _bounds(applied, own, shared, t)


def entries_of(applied: Applied, step: int, own: int, shared: int) -> Numbers:
    """Return what a step adds to each key's row, shape (own + shared, 2)."""
    indices, epoch = applied.steps.indices(step), applied.steps.epoch_of(step)
    uses = np.bincount(np.concatenate([indices, own + indices % shared]), minlength=own + shared)
    return uses[:, None] * np.array([1, (epoch + 1) ** 2], np.int64)


def _updates(applied: Applied, own: int, shared: int) -> Iterator[Numbers]:
    """Yield what each update adds to each key's row."""
    steps = applied.steps.total
    for first in range(0, steps, applied.update_steps):
        of_update = range(first, min(first + applied.update_steps, steps))
        yield sum((entries_of(applied, step, own, shared) for step in of_update), np.zeros((own + shared, 2), np.int64))


def _counted(applied: Applied, table: str, own: int, shared: int) -> RowBounds:
    """Replay all updates in order."""
    rules = applied.rules
    assert rules.evict_above_rows is None, "what is due under this rule depends on where rows lie"
    chance = Chance(applied.seed, table, rules.admit_probability)
    words = mixed(np.concatenate([np.arange(own), (1 << 62) + np.arange(shared)]))
    keys = own + shared
    entries, t, last = np.zeros((keys, 2), np.int64), np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    counted, counted_last = np.zeros(keys, np.int64), np.zeros(keys, np.int64)

    def end(now: int) -> None:
        over = np.zeros(keys, np.bool_)
        if rules.evict_unused_steps is not None:
            over = now - last >= rules.evict_unused_steps
            counted[now - counted_last >= rules.evict_unused_steps] = 0
        if rules.evict_norm_below > 0:
            small = (entries.astype(np.float64) ** 2).sum(axis=1) < rules.evict_norm_below**2
            over |= small & (last <= now - now % rules.evict_norm_every)
        t[over], entries[over] = 0, 0

    for clock, added in enumerate(_updates(applied, own, shared), 1):
        end(clock - 1)
        used = added[:, 0] > 0
        asks = used & (t == 0)
        if rules.admit_probability < 1.0:
            refused = asks.copy()
            refused[asks] = ~chance.admits(words[asks], clock)
            used, asks = used & ~refused, asks & ~refused
        counted[asks] += 1
        counted_last[asks] = clock
        waits = asks & (counted < rules.admit_after)
        counted[asks & ~waits] = 0
        moves = used & ~waits
        entries[moves] += added[moves]
        t[moves] += 1
        last[moves] = clock
    end(clock)
    return RowBounds((t, t), (entries, entries))


def _bounds(applied: Applied, own: int, shared: int, t: Numbers) -> RowBounds:
    """Return the bounds over all orders of the updates."""
    rules = applied.rules
    # Only the rows that an update uses: all rows of all updates would take gigabytes.
    keys, amounts = [], []
    for added in _updates(applied, own, shared):
        keys.append(np.flatnonzero(added[:, 0]))
        amounts.append(added[keys[-1]])
    key, amount = np.concatenate(keys), np.concatenate(amounts)
    used = np.bincount(key, minlength=own + shared)
    most = np.maximum(used - (rules.admit_after - 1), 0)
    known = not rules.ends_rows and rules.evict_above_rows is None and rules.admit_probability == 1.0
    end, pushed = np.cumsum(used), np.minimum(t, used)
    begin = end - used  # of a key's updates, ascending
    least, greatest = np.empty((2, own + shared, 2), np.int64)
    for column in range(2):
        ordered = amount[np.lexsort((amount[:, column], key)), column]
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(ordered)])
        least[:, column] = sums[begin + pushed] - sums[begin]
        greatest[:, column] = sums[end] - sums[end - pushed]
    return RowBounds((most if known else np.zeros_like(most), most), (least, greatest))
