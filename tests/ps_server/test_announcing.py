"""A shard's announcements: what ends the shard, and what does not."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ConfigurationError, Fenced, ParashardError, PeerFailed, Superseded, Unreachable, WrongRun
from parashard.process.shell import Stop
from parashard.process.starts import ShardStart
from parashard.store.claims import claim_incarnation
from parashard_server import __main__ as module
from parashard_server.__main__ import _Announcer, serve
from support.shard_process import ADAM, ShardProcess, job_reply
from support.store_fakes import MemoryStore


class ScriptedCoordinator:
    """Answers announcements in turn with these errors, then that the job is done."""

    retry_budget_s = math.inf

    def __init__(self, *errors: ParashardError) -> None:
        self._errors = iter(errors)
        self.calls = 0
        self.moves: list[bool] = []

    def reconnect_if_moved(self) -> bool:
        return bool(self.moves) and self.moves.pop(0)

    def register_shard(self, request: pb.RegisterShardRequest) -> pb.RegisterShardReply:
        self.calls += 1
        for error in self._errors:
            raise error
        return pb.RegisterShardReply(state=pb.JOB_STATE_DONE, coordinator_incarnation=1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("ANNOUNCE_S", "ANNOUNCE_AGAIN_S", "LOOK_S"):
        monkeypatch.setattr(module, pause, 0.0)


def announcer(process: ShardProcess, coordinator: ScriptedCoordinator) -> _Announcer:
    return _Announcer(
        coordinator,  # type: ignore[arg-type]
        process.lifecycle,
        process.service,
        pb.ShardAddress(address="127.0.0.1:1"),
        "",
        linger_s=0.0,
    )


@pytest.fixture
def process() -> ShardProcess:
    return ShardProcess(MemoryStore(), optimizer=ADAM, checkpoint={"every_s": 0.0})


def test_an_internal_error_of_the_coordinator_ends_no_shard(process: ShardProcess) -> None:
    coordinator = ScriptedCoordinator(PeerFailed("a bug"), Unreachable("restarting"), PeerFailed("a bug"))
    announcer(process, coordinator).run(Stop())
    assert coordinator.calls == 4, "the fourth was answered: the job is done"
    assert process.shard.record.failed_announcements == 2


def test_a_shard_announces_itself_at_once_to_a_new_coordinator(
    process: ShardProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANNOUNCE_S", 1e6)
    coordinator = ScriptedCoordinator()
    coordinator.moves = [False, False, True]
    announcer(process, coordinator).run(Stop())
    assert (coordinator.calls, coordinator.moves) == (1, [])


def test_a_coordinator_that_has_only_internal_errors_for_its_shard_is_given_up(process: ShardProcess) -> None:
    coordinator = ScriptedCoordinator(PeerFailed("a bug"), *[PeerFailed("the same bug")] * 100)
    coordinator.retry_budget_s = 0.0
    with pytest.raises(PeerFailed, match="the same bug"):
        announcer(process, coordinator).run(Stop())
    assert coordinator.calls > 1


@pytest.mark.parametrize("error", [Superseded("incarnation 2 is registered"), WrongRun("another run")])
def test_a_shard_whose_place_another_has_ends(process: ShardProcess, error: Fenced) -> None:  # P3
    with pytest.raises(type(error)):
        announcer(process, ScriptedCoordinator(error)).run(Stop())


def test_a_shard_that_has_met_another_process_s_claim_ends(process: ShardProcess) -> None:  # P23
    process.push(0)
    claim_incarnation(process.store, "shard-0")  # and that process dies before it has announced itself
    with pytest.raises(Superseded):
        process.checkpointer.take()
    coordinator = ScriptedCoordinator()
    with pytest.raises(Superseded):
        announcer(process, coordinator).run(Stop())
    assert coordinator.calls == 0


def test_a_shard_that_does_not_see_the_run_s_store_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = job_reply(checkpoint_url=str(tmp_path / "runs" / "a" / "checkpoints"))
    coordinator = SimpleNamespace(get_job=lambda: reply)
    monkeypatch.setattr("parashard_server.__main__.client_of", lambda *_: coordinator)
    monkeypatch.setattr("parashard_server.__main__.credentials_of", lambda *_: None)
    with pytest.raises(ConfigurationError, match="is not on this machine"):
        serve(ShardStart(connect="", index=0), Stop(), None)
    assert not list(tmp_path.iterdir())
