"""The ledger of rows finds every use that was lost or doubled, and nothing in a job that kept its promise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.row_files import StoredRows
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.job.model_options import RowLedgerOptions
from parashard.models.base import Audited, AuditsRows, LooksUp
from parashard.models.building import build_model
from parashard.models.oracles import LEDGER_EPOCHS_MAX, TABLE, RowLedger
from parashard.plan.embedding import mixed
from support.model_cases import spec_of
from support.tiers import fewer

EXAMPLES, BATCH, EPOCHS = 20, 6, 3
SHARED = 1 << 62
Rows = dict[int, Any]
"""Each key's row."""


@pytest.fixture
def ledger() -> RowLedger:
    return ledger_of()


def ledger_of(examples: int = EXAMPLES, shared: int = 7) -> RowLedger:
    return RowLedger(spec_of((1,), examples=examples), RowLedgerOptions(shared=shared))


def batch_of(ledger: RowLedger, step: int, epoch: int, indices: Sequence[int]) -> Batch:
    """Return a batch with its keys looked up, as a worker does; the ledger mixes nothing: here keys are as named."""
    at = np.array(indices)
    batch = Batch(step, epoch, at, np.zeros((len(at), 1)), np.zeros(len(at)))
    named = ledger.keys(batch)[TABLE]
    _, places = np.unique(named, return_inverse=True)
    return Batch(step, epoch, at, batch.inputs, batch.targets, places={TABLE: places.reshape(named.shape)})


def step_of(ledger: RowLedger, step: int, epoch: int, indices: Sequence[int]) -> tuple[Any, Rows]:
    """Return what a step pushes: of the variable, and of rows by key."""
    batch = batch_of(ledger, step, epoch, indices)
    keys = np.unique(ledger.keys(batch)[TABLE])
    variables = {"entries": np.zeros((min(64, EXAMPLES), 2), np.float32), TABLE: np.zeros((len(keys), 2), np.float32)}
    loss, gradients = ledger.loss_and_gradients(variables, batch, np)
    assert loss == 0.0
    assert {name: values.shape for name, values in gradients.items()} == {
        name: values.shape for name, values in variables.items()
    }
    return gradients["entries"], dict(zip(keys.tolist(), gradients[TABLE], strict=True))


def pushes(ledger: RowLedger, epochs: int = EPOCHS) -> list[tuple[Any, Rows]]:
    """Return what a job's steps push, which reorder each epoch."""
    steps: list[tuple[Any, Rows]] = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(EXAMPLES)
        for first in range(0, EXAMPLES, BATCH):
            steps.append(step_of(ledger, len(steps), epoch, order[first : first + BATCH].tolist()))
    return steps


def applied(steps: Sequence[tuple[Any, Rows]]) -> tuple[dict[str, Any], Rows]:
    """Return the variable and the rows after SGD at learning rate -1."""
    rows: Rows = {}
    for _, of_rows in steps:
        for key, entry in of_rows.items():
            rows[key] = rows.get(key, np.zeros(2, np.float32)) + entry
    return {"entries": np.sum([entries for entries, _ in steps], axis=0, dtype=np.float32)}, rows


def stored(rows: Rows, pieces: int = 1) -> Iterator[tuple[str, StoredRows]]:
    """Yield rows as a checkpoint has them, piece by piece."""
    words = mixed(np.array([*rows], np.int64))
    order = np.argsort(words)
    values = np.array([*rows.values()], np.float32)
    for piece in np.array_split(order, pieces):
        counts = np.ones(len(piece), np.uint32)
        yield TABLE, StoredRows(words[piece], counts, counts, values[piece], {})


def wrong(ledger: RowLedger, rows: Rows, epochs: int = EPOCHS) -> int:
    found = ledger.audit_rows(stored(rows), epochs)
    assert found.keys() == {"rows_wrong"}
    return found["rows_wrong"]


def test_a_job_that_pushed_every_use_once_is_right(ledger: RowLedger) -> None:
    variables, rows = applied(pushes(ledger))
    assert ledger.audit(variables, EPOCHS) == {"ledger_wrong": 0}
    for pieces in (1, 2, 27):
        assert ledger.audit_rows(stored(rows, pieces), EPOCHS) == {"rows_wrong": 0}
    assert rows[3].tolist() == [3.0, 14.0]
    assert rows[SHARED + 6].tolist() == [2 * 3.0, 2 * 14.0], "examples 6 and 13"
    assert len(rows) == EXAMPLES + 7
    assert isinstance(ledger, Audited)
    assert isinstance(ledger, AuditsRows)
    assert isinstance(ledger, LooksUp)
    assert ledger.evaluate({}, batch_of(ledger, -1, -1, [0]), np) == {}


@given(lost=st.sets(st.integers(0, 11), max_size=3), doubled=st.sets(st.integers(0, 11), max_size=3))
@fewer(4)
def test_it_shows_lost_and_doubled_steps(lost: set[int], doubled: set[int]) -> None:
    ledger = ledger_of()
    steps = pushes(ledger)
    counts = [1 - (step in lost) + (step in doubled) for step in range(12)]
    _, rows = applied([step for step, count in zip(steps, counts, strict=True) for _ in range(count)])
    assert (wrong(ledger, rows) == 0) == (counts == [1] * 12)


@pytest.mark.parametrize("key", [0, 19, SHARED, SHARED + 6])
@pytest.mark.parametrize("uses", [-1, 1])
def test_one_use_too_few_or_too_many_is_one_wrong_row(ledger: RowLedger, key: int, uses: int) -> None:
    _, rows = applied(pushes(ledger))
    rows[key] = rows[key] + uses * np.array([1, 4], np.float32)
    assert wrong(ledger, rows) == 1


def test_errors_that_cancel_in_the_first_number_show_in_the_second(ledger: RowLedger) -> None:
    steps = pushes(ledger)
    first = np.random.default_rng(0).permutation(EXAMPLES)[:BATCH].tolist()
    variables, rows = applied([step_of(ledger, 0, 2, first), *steps[1:]])  # as if it were of the last epoch
    assert {row[0] for key, row in rows.items() if key < SHARED} == {EPOCHS}
    assert wrong(ledger, rows) >= BATCH
    assert ledger.audit(variables, EPOCHS) == {"ledger_wrong": BATCH}


@pytest.mark.parametrize("key", [0, 19, SHARED, SHARED + 6])
def test_a_row_that_is_missing_is_wrong(ledger: RowLedger, key: int) -> None:
    _, rows = applied(pushes(ledger))
    del rows[key]
    assert wrong(ledger, rows) == 1


@pytest.mark.parametrize("key", [EXAMPLES, -1, SHARED + 7, SHARED - 1, -SHARED])
@pytest.mark.parametrize("row", [(0, 0), (3, 14)])
def test_a_row_that_nobody_used_is_wrong_even_in_place_of_another(
    ledger: RowLedger, key: int, row: tuple[int, int]
) -> None:
    _, rows = applied(pushes(ledger))
    rows[key] = np.array(row, np.float32)
    assert wrong(ledger, rows) > 0
    del rows[5]
    assert wrong(ledger, rows) > 0


def test_a_table_without_rows_misses_all(ledger: RowLedger) -> None:
    assert ledger.audit_rows([], EPOCHS) == {"rows_wrong": EXAMPLES + 7}


def test_shared_keys_that_no_example_has_are_not_due() -> None:
    ledger = ledger_of(shared=100)
    _, rows = applied(pushes(ledger))
    assert len(rows) == 2 * EXAMPLES
    assert wrong(ledger, rows) == 0


def test_a_key_counts_as_often_as_the_batch_uses_it(ledger: RowLedger) -> None:
    entries, rows = step_of(ledger, 0, 1, [2, 9, 16, 9])
    assert {key: row.tolist() for key, row in rows.items()} == {
        2: [1.0, 4.0],
        9: [2.0, 8.0],
        16: [1.0, 4.0],
        SHARED + 2: [4.0, 16.0],
    }
    assert entries[9].tolist() == [2.0, 8.0]


def test_the_variable_has_the_first_examples_alone() -> None:
    ledger = ledger_of(examples=1000)
    assert ledger.initial_variables()["entries"].shape == (64, 2)
    assert ledger_of().initial_variables()["entries"].shape == (EXAMPLES, 2)
    batch = batch_of(ledger, 0, 0, [63, 64, 999])
    _, gradients = ledger.loss_and_gradients({TABLE: np.zeros((6, 2))}, batch, np)
    assert gradients["entries"][:, 0].tolist() == [0.0] * 63 + [1.0]
    assert gradients[TABLE].sum(axis=0).tolist() == [6.0, 6.0]


def test_more_epochs_than_float32_counts_are_refused(ledger: RowLedger) -> None:
    with pytest.raises(ConfigurationError, match="at most 368 epochs"):
        ledger.audit_rows([], LEDGER_EPOCHS_MAX + 1)
    with pytest.raises(ConfigurationError, match="found 369"):
        ledger.audit({"entries": np.zeros((EXAMPLES, 2), np.float32)}, LEDGER_EPOCHS_MAX + 1)
    with pytest.raises(ConfigurationError, match="found 369"):
        step_of(ledger, 0, LEDGER_EPOCHS_MAX, [1])


def test_a_job_file_s_options_build_it() -> None:
    built = build_model(RowLedgerOptions(), spec_of((1,), examples=EXAMPLES), 0, None)
    assert isinstance(built, RowLedger)
    assert wrong(built, applied(pushes(built))[1]) == 0


def test_shared_keys_that_float32_could_not_count_are_refused() -> None:
    often = ledger_of(examples=4096, shared=7)
    assert often.audit_rows([], 40) == {"rows_wrong": 4096 + 7}
    with pytest.raises(ConfigurationError, match=r"a key is used 586 times an epoch, too often for 60 epochs"):
        often.audit_rows([], 60)
    with pytest.raises(ConfigurationError, match=r"raise model\.shared, or take fewer epochs"):
        step_of(often, 0, 59, [1])
