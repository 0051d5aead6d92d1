"""deploy.prometheus.targets: a status as a file that Prometheus finds its targets in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.prometheus.targets import find_started, follow, replace, targets
from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ConfigurationError
from parashard.protocol.coordinator_client import ADDRESS_FILE

STATUS = pb.GetStatusReply(
    run_id="r1",
    http_address="c:1",
    shards=[
        pb.ShardStatus(shard=0, registered=True, http_address="s0:1"),
        pb.ShardStatus(shard=1, registered=False),
    ],
    workers=[
        pb.WorkerStatus(name="worker-0", live=True, http_address="w0:1"),
        pb.WorkerStatus(name="worker-1", live=False, http_address="w1:1"),
    ],
)


def test_targets_are_the_processes_that_are_there_under_their_run() -> None:
    assert json.loads(targets(STATUS)) == [{"targets": ["c:1", "s0:1", "w0:1"], "labels": {"run": "r1"}}]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    for content in ("one", "two"):
        replace(path, content)
        assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_has_no_directory_yet_is_waited_for(tmp_path: Path) -> None:
    run_dir, pauses = tmp_path / "runs" / "new", []

    def start_meanwhile(pause_s: float) -> None:
        pauses.append(pause_s)
        run_dir.mkdir(parents=True)
        (run_dir / ADDRESS_FILE).write_text(json.dumps({"address": "127.0.0.1:7100"}))

    assert find_started(run_dir, 60.0, start_meanwhile) == "127.0.0.1:7100"
    assert len(pauses) == 1


def test_it_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        find_started(tmp_path / "none", 0.0)


def test_what_is_no_run_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError):
        follow(tmp_path / "file", tmp_path / "targets.json")


def test_a_file_that_there_can_be_none_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="its folder cannot be made: "):
        follow(tmp_path, tmp_path / "file" / "targets.json")
