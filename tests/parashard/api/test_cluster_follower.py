"""CallbackFollower: an event is recorded before it fires, a decision before the coordinator hears of it (P38)."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.api import callback_follower
from parashard.api.callback_follower import STATE_FILE, CallbackFollower
from parashard.callbacks import Callback, LambdaCallback, LearningRateScheduler, Training
from parashard.callbacks.running import Callbacks
from parashard.errors import ConfigurationError, Unreachable
from parashard.launch.run_control import CallbackFailed
from parashard.store.local import LocalStore
from support.store_fakes import MemoryStore


class Coordinator:
    """Tells of milestones at 4, 8 and so on, and keeps what it is asked."""

    def __init__(self, reached: int = 1) -> None:
        self.reached = reached
        self.requests: list[pb.FollowRequest] = []
        self.evaluated = ""
        self.steps: list[int] = []

    def follow(self, request: pb.FollowRequest) -> pb.FollowReply:
        self.requests.append(request)
        reply = pb.FollowReply(coordinator=1, steps_seen=len(self.steps))
        reply.steps.extend(pb.StepEnd(step=step, loss=0.5) for step in self.steps[request.steps_seen :])
        if request.handled < 4 * self.reached:
            epoch = request.handled // 4
            reply.milestone.after_steps, reply.milestone.first_epoch = request.handled + 4, epoch
            reply.milestone.epoch_losses.append(0.5)
            if self.evaluated:
                reply.milestone.evaluated, reply.milestone.weights = True, self.evaluated
                reply.milestone.judged_steps = 8
        return reply

    @property
    def decided(self) -> list[tuple[int, float]]:
        return [(request.handled, request.learning_rate) for request in self.requests]


class Halving(Callback):
    """Halves the rate at each epoch's end, and keeps what it heard."""

    heard: list[int]

    def __init__(self) -> None:
        self.heard = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.heard.append(epoch)
        self.model.learning_rate /= 2


def follower_of(folder: Path, callbacks: Sequence[Callback], *, resume: bool = False) -> CallbackFollower:
    running = Callbacks(callbacks, Training(1.0, folder), None, steps_per_epoch=4, epochs=9)
    return CallbackFollower(running, folder, MemoryStore, print, resume=resume)


def recorded(folder: Path) -> list[object]:
    content = json.loads((folder / STATE_FILE).read_text())
    return [content["fired"], content["decision"]["learning_rate"]]


def told(folder: Path) -> int | None:
    """Return the milestone that callbacks are hearing of, as it is recorded."""
    telling = json.loads((folder / STATE_FILE).read_text())["telling"]
    return telling and telling["after_steps"]


def test_each_milestone_is_handled_once_and_what_it_decided_is_told(tmp_path: Path) -> None:
    halving, coordinator = Halving(), Coordinator(2)
    it = follower_of(tmp_path, [halving])
    it.look(coordinator.follow)
    it.look(coordinator.follow)
    assert halving.heard == [0, 1]
    assert coordinator.decided == [(0, 0.0), (4, 0.5), (8, 0.25), (8, 0.25)]
    assert recorded(tmp_path) == [8, 0.25]


def test_callbacks_that_have_much_to_hear_let_the_run_be_supervised_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_follower, "AT_ONCE", 1)
    halving, coordinator = Halving(), Coordinator(3)
    it = follower_of(tmp_path, [halving])
    for heard in ([0], [0, 1], [0, 1, 2], [0, 1, 2]):
        it.look(coordinator.follow)
        assert halving.heard == heard


def test_rates_that_are_known_in_advance_are_told_until_a_coordinator_answers(tmp_path: Path) -> None:
    coordinator, answers = Coordinator(2), iter([False, True, True, True])

    def follow(request: pb.FollowRequest) -> pb.FollowReply:
        reply = coordinator.follow(request)
        if not next(answers):
            raise Unreachable("it is being restarted")
        return reply

    it = follower_of(tmp_path, [LearningRateScheduler(lambda epoch: 0.5**epoch)])
    with pytest.raises(Unreachable):
        it.look(follow)
    it.look(follow)
    planned = [[(one.epoch, one.learning_rate) for one in request.planned] for request in coordinator.requests]
    assert planned == [[(epoch, 0.5**epoch) for epoch in range(1, 9)]] * 2 + [[]] * 2
    assert (it.callbacks.decides, it.callbacks.ahead, it.callbacks.uses_weights) == (True, None, False)


def test_callbacks_hear_of_batches_where_a_batch_is_several_steps(tmp_path: Path) -> None:
    heard = []
    watching = LambdaCallback(on_train_batch_end=lambda batch, logs: heard.append(batch))
    coordinator = Coordinator()
    coordinator.evaluated, coordinator.steps = "weights", [0, 2, 6, 4, 8]  # the first steps of batches
    running = Callbacks([watching], Training(1.0, tmp_path), None, steps_per_epoch=2, epochs=9)
    it = CallbackFollower(running, tmp_path, MemoryStore, print, resume=False, parts=2)
    it.look(coordinator.follow)
    assert heard == [0, 1, 1, 0, 0]
    assert json.loads((tmp_path / STATE_FILE).read_text())["steps"] == [[0, 5]]
    assert it.callbacks.history.history["val_steps"] == [4]


def test_the_record_goes_before_the_effect_and_the_decision_after_it(tmp_path: Path) -> None:
    seen: list[list[object]] = []
    watching = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append([*recorded(tmp_path), told(tmp_path)]))
    coordinator = Coordinator()
    follower_of(tmp_path, [Halving(), watching]).look(coordinator.follow)
    assert (seen, recorded(tmp_path), told(tmp_path)) == ([[0, None, 4]], [4, 0.5], None)


def test_a_crash_in_a_callback_loses_no_other_effect_and_repeats_none(tmp_path: Path) -> None:
    def crash(epoch: int, logs: dict[str, float]) -> None:
        if epoch == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        follower_of(tmp_path, [Halving(), LambdaCallback(on_epoch_end=crash)]).look(Coordinator(2).follow)
    halving, coordinator = Halving(), Coordinator(3)
    follower_of(tmp_path, [halving, LambdaCallback()], resume=True).look(coordinator.follow)
    assert halving.heard == [2]
    assert coordinator.decided == [(8, 0.25), (12, 0.125)]


def test_after_a_crash_built_in_callbacks_hear_the_whole_event_with_the_figures_that_it_had(tmp_path: Path) -> None:
    def crash(epoch: int, logs: dict[str, float]) -> None:
        if epoch == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        follower_of(tmp_path, [LambdaCallback(on_epoch_end=crash)]).look(Coordinator(2).follow)
    again = follower_of(tmp_path, [LambdaCallback()], resume=True)
    again.look(Coordinator(0).follow)  # before its coordinator has got so far again
    assert again.callbacks.history.history == {"loss": [0.5, 0.5]}


def test_a_record_of_an_earlier_version_is_gone_on_from(tmp_path: Path) -> None:
    state = {"learning_rate": 0.5, "epoch": 1, "epoch_begun": True, "judged_steps": 0}
    state["callbacks"] = [{}, {"epoch": [0], "history": {"loss": [0.25]}}]
    decision = {"stop_reason": "", "learning_rate": 0.5}
    earlier = {"callbacks": ["Halving"], "fired": 4, "steps": [], "decision": decision, "state": state}
    (tmp_path / STATE_FILE).write_text(json.dumps(earlier))
    it, coordinator = follower_of(tmp_path, [Halving()], resume=True), Coordinator(2)
    it.look(coordinator.follow)
    assert it.callbacks.history.history == {"loss": [0.25, 0.5]}
    assert coordinator.decided == [(4, 0.5), (8, 0.25)]


def test_a_rate_set_after_a_step_is_told_before_the_next_milestone_is_heard(tmp_path: Path) -> None:
    it, coordinator = follower_of(tmp_path, [callback := Halving()]), Coordinator()
    callback.on_train_batch_end = lambda batch, logs: setattr(callback.model, "learning_rate", 0.125)  # type: ignore[method-assign]
    it = follower_of(tmp_path, [callback])
    coordinator.steps = [0]
    it.look(coordinator.follow)
    asked = [(request.handled, request.learning_rate, request.between) for request in coordinator.requests]
    assert asked == [(0, 0.0, False), (0, 0.125, True), (4, 0.0625, False)]
    assert [request.decision for request in coordinator.requests] == [0, 1, 2]


def test_a_crash_before_the_coordinator_heard_has_the_decision_told_again(tmp_path: Path) -> None:
    def once(request: pb.FollowRequest) -> pb.FollowReply:
        if request.handled:
            raise Unreachable("gone")
        return Coordinator().follow(request)

    with pytest.raises(Unreachable):
        follower_of(tmp_path, [Halving()]).look(once)
    halving, coordinator = Halving(), Coordinator()
    follower_of(tmp_path, [halving], resume=True).look(coordinator.follow)
    assert (halving.heard, coordinator.decided) == ([], [(4, 0.5)])


def test_other_callbacks_do_not_go_on_with_a_run(tmp_path: Path) -> None:
    follower_of(tmp_path, [Halving()]).look(Coordinator().follow)
    with pytest.raises(ConfigurationError, match=r"has the callbacks Halving, this call \(none\)"):
        follower_of(tmp_path, [], resume=True)


def test_steps_are_told_once_whichever_coordinator_counts_them(tmp_path: Path) -> None:
    told: list[int] = []
    it = follower_of(tmp_path, [LambdaCallback(on_train_batch_end=lambda batch, logs: told.append(batch))])
    coordinator = Coordinator(0)
    coordinator.steps = [2, 0]
    it.look(coordinator.follow)
    coordinator.steps += [1, 2]
    it.look(coordinator.follow)
    assert told == [2, 0, 1]
    assert coordinator.requests[-1].wants_steps


def test_a_full_disk_stops_no_callback_and_the_record_comes_when_there_is_room(  # P21
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    halving, coordinator = Halving(), Coordinator()
    it = follower_of(tmp_path, [halving])
    with monkeypatch.context() as patch:
        patch.setattr(callback_follower, "write_durably", full)
        it.look(coordinator.follow)
    assert (halving.heard, coordinator.decided[-1]) == ([0], (4, 0.5))
    it.look(coordinator.follow)
    assert recorded(tmp_path) == [4, 0.5]
    assert "records of callbacks cannot be written: no space left on device" in capsys.readouterr().out


def test_an_error_begins_with_the_users_own_line(tmp_path: Path) -> None:
    def fail(epoch: int, logs: dict[str, float]) -> None:
        raise RuntimeError("no more room")

    with pytest.raises(CallbackFailed) as raised:
        follower_of(tmp_path, [LambdaCallback(on_epoch_end=fail)]).look(Coordinator().follow)
    lines = traceback.extract_tb(raised.value.error.__traceback__)
    assert [frame.name for frame in lines] == ["fail"]


def test_a_state_that_is_no_json_is_named(tmp_path: Path) -> None:
    class Odd(Callback):
        def get_state(self) -> dict[str, object]:
            return {"file": object()}

    with pytest.raises(CallbackFailed, match="a callback's state is no JSON"):
        follower_of(tmp_path, [Odd()]).look(Coordinator().follow)


def test_evaluated_weights_are_copied_and_then_forgotten(tmp_path: Path) -> None:
    class Keeping(Callback):
        uses_weights = True

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            self.model.save_weights(tmp_path / f"kept-{epoch}")

    for number, store in enumerate((LocalStore(tmp_path / "store"), MemoryStore())):
        name = "evaluated/000000000004-ab.safetensors"
        store.create(name, b"weights")
        store.create("evaluated/000000000008-cd.safetensors", b"later")
        running = Callbacks([Keeping()], Training(1.0, tmp_path), None, steps_per_epoch=4, epochs=9)
        coordinator = Coordinator()
        coordinator.evaluated = name
        folder = tmp_path / str(number)
        folder.mkdir()
        it = CallbackFollower(running, folder, lambda store=store: store, print, resume=False)
        it.look(coordinator.follow)
        assert (tmp_path / "kept-0").read_bytes() == b"weights"
        assert store.names("evaluated") == ["000000000008-cd.safetensors"]
        it.end()
        assert store.names("evaluated") == []
        assert (running.decides, running.ahead, running.uses_weights) == (True, 0, True)
