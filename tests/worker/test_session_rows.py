"""A session of a job with embedding tables: the rows of ids that the program names, and their gradients, each once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.errors import ConfigurationError, ShapeMismatch
from parashard.job.load import job_from_toml
from parashard_worker.program import ProgramSession, Step
from support.resolved_job import resolved_here
from support.small_cluster import SmallCluster, small_cluster
from support.small_job import SMALL_JOB

STEPS, KEYS = 16, np.random.default_rng(0).integers(-(10**15), 10**15, 9)
POLICY = '[consistency]\npolicy = "{}"\n'
TABLES = """
[tables.ledger]
dimension = 2
initializer = "zeros"
optimizer = { kind = "sgd", learning_rate = 1.0 }
keys_per_step_max = 20
"""


def running(folder: Path, policy: str = "async") -> AbstractContextManager[SmallCluster]:
    text = SMALL_JOB.replace('source = "synthetic"', 'source = "synthetic"\nexamples = 64')
    text = text.replace('"softmax"', '"row_ledger"\nshared = 10_000')
    job = job_from_toml(
        f'{text}[cluster]\nshards = 1\ntransport = "grpc"\npipeline_depth = 0\n{TABLES}{POLICY.format(policy)}'
    )
    return small_cluster(resolved_here(job), folder / "store")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    with running(tmp_path) as started:
        yield started


def ids_of(step: Step) -> Any:
    """Return two ids an example, of which every ninth is the same."""
    return KEYS[np.stack([step.indices % 9, step.indices % 3], axis=1)]


def session_of(cluster: SmallCluster, keys: Any = lambda step: {"ledger": ids_of(step)}) -> ProgramSession:
    return ProgramSession(cluster.client.address, data=False, keys=keys)


def rows_of(cluster: SmallCluster) -> Mapping[int, float]:
    """Return the first number of each row, by its place in KEYS."""
    with session_of(cluster, lambda step: {"ledger": KEYS}) as session:
        for step in session.steps():
            found = session.pull()["ledger"][:, 0].tolist()
            session.push(step, None)
            return dict(enumerate(found))
    raise AssertionError("no step is left")


def test_every_use_of_an_id_is_in_its_row_once(cluster: SmallCluster) -> None:
    uses = np.zeros(9)
    with session_of(cluster) as session:
        for step in session.steps():
            rows = session.pull()["ledger"]
            assert rows.shape == (8, 2, 2)
            assert (rows[:, :, 0] == -rows[:, :, 1]).all()
            assert session.push(step, {"ledger": np.broadcast_to([-1.0, 1.0], rows.shape)})
            uses += np.bincount(np.searchsorted(np.sort(KEYS), ids_of(step)).ravel(), minlength=9)
            if step.number == STEPS - 2:
                break
    assert list(rows_of(cluster).values()) == uses[np.searchsorted(np.sort(KEYS), KEYS)].tolist()


def test_a_table_that_is_left_out_does_not_move_and_a_wrong_gradient_is_refused(cluster: SmallCluster) -> None:
    with session_of(cluster) as session:
        for step in session.steps():
            with pytest.raises(
                ShapeMismatch, match=r"table 'ledger' is float64 \(8, 2\); due is floating point \(8, 2, 2\)"
            ):
                session.push(step, {"ledger": np.ones((8, 2))})
            assert session.push(step, {})
            if step.number == STEPS - 2:
                break
    assert set(rows_of(cluster).values()) == {0.0}


def test_in_rounds_every_step_sees_the_same_bits_of_rows_with_one_session_and_with_three(tmp_path: Path) -> None:
    seen: list[dict[int, bytes]] = [{}, {}]
    for sessions, found in zip((1, 3), seen, strict=True):
        with running(tmp_path / str(sessions), "sync:4") as cluster:

            def work(cluster: SmallCluster = cluster, found: dict[int, bytes] = found) -> None:
                with session_of(cluster) as session:
                    for step in session.steps():
                        rows = session.pull()["ledger"]
                        found[step.number] = rows.tobytes()
                        session.push(step, {"ledger": np.cos(rows + step.indices[:, None, None] / 7)})

            threads = [threading.Thread(target=work) for _ in range(sessions)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert len(seen[0]) == STEPS
    assert len(set(seen[0].values())) == STEPS - 3, "those of the first round begin at zero"
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (lambda step: {"other": KEYS}, "keys named the table 'other'; the job has: ledger"),
        (lambda step: {"ledger": KEYS / 2}, "keys returned for table 'ledger' are not ids: keys are whole numbers"),
        (lambda step: {"ledger": np.arange(21)}, "a step needs 21 rows of table 'ledger'; its keys_per_step_max is 20"),
        (lambda step: [1], "keys returned a list; due is a mapping of tables to their ids"),
    ],
)
def test_wrong_keys_end_the_session_and_count_as_an_attempt(cluster: SmallCluster, keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence), session_of(cluster, keys) as session:
        next(session.steps())
    events = cluster.core.run_exclusive(lambda core, _: list(core.job.events))
    assert any("failed at step 0" in event for event in events)


def test_the_model_of_a_job_file_names_ids_where_the_program_does_not(cluster: SmallCluster) -> None:
    with ProgramSession(cluster.client.address) as session:
        step = next(session.steps())
        assert step.batch is not None
        rows = session.pull()["ledger"]
        assert rows.shape == (*step.batch.places["ledger"].shape, 2)
        assert session.push(step, {"ledger": np.ones_like(rows)})


def test_a_job_with_tables_needs_keys(cluster: SmallCluster) -> None:
    with pytest.raises(ConfigurationError, match="the tables ledger, and nothing says which rows a step needs"):
        session_of(cluster, None).__enter__()
