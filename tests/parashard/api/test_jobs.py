"""The job of a call: when two of them are the same."""

from pathlib import Path

import pytest

from parashard.api.jobs import different_key
from parashard.job.load import LoadedJob, load_job
from support.small_job import SMALL_JOB

TABLE = "[tables.users]\ndimension = 4\noptimizer = { kind = 'sgd', learning_rate = 0.1 }\n"


def loaded(folder: Path, text: str) -> LoadedJob:
    (folder / "job.toml").write_text(SMALL_JOB + text)
    return load_job(folder / "job.toml", [], {})


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("initializer = 'uniform'\nscale = 0.05\n", ""),  # as later versions write what is left out
        ("initializer = 'normal'\n", "tables.users.initializer is"),
        ("initializer = 'uniform'\nscale = 0.02\n", "tables.users.scale is"),
    ],
)
def test_a_table_is_the_same_where_what_is_left_out_is_named(tmp_path: Path, named: str, says: str) -> None:
    ours, theirs = loaded(tmp_path, TABLE + named), loaded(tmp_path, TABLE)
    assert different_key(ours, theirs.job).startswith(says)
    assert bool(different_key(theirs, ours.job)) == bool(says)
