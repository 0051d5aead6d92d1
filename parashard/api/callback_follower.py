"""CallbackFollower: passes a run's events from the coordinator to callbacks, each once, even across crashes.

`callbacks.json` in the run's folder records the progress and states of callbacks. It is written before each call of a
user's hook and before a decision is sent to the coordinator; later if the disk is full. After a crash the next process
continues after the call that was running. Implements rule P38 of docs/protocol.md.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.callbacks.running import CallbackDecision, Callbacks, Milestone, StepEnd
from parashard.checkpoints.catalogue import EVALUATED
from parashard.errors import ConfigurationError, StoreFailed
from parashard.launch.run_control import CallbackFailed, Follow
from parashard.models.base import TellsMetrics
from parashard.plan.intervals import IntervalSet
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.durable import replace_durably, write_durably
from parashard.store import Store

STATE_FILE = "callbacks.json"
"""Progress and states of callbacks, in a run's folder."""
AT_ONCE = 16
"""Most replies of the coordinator that one `look` handles before control returns to the run's supervision."""
BEST_FILE = "best_weights.safetensors"
"""Evaluated weights that a callback restored, in a run's folder."""
HERE = Path(__file__).parent.parent


class CallbackFollower:
    """Runs the callbacks of one run; they see batches, each of `parts` steps."""

    def __init__(
        self,
        callbacks: Callbacks,
        run_dir: Path,
        store: Callable[[], Store],
        say: Callable[[str], None],
        *,
        resume: bool,
        model: TellsMetrics | None = None,
        parts: int = 1,
    ) -> None:
        self.callbacks = callbacks
        self._parts = parts
        self._model = model
        self._path = run_dir / STATE_FILE
        self._store = cache(store)  # opened on first use
        self._begun = False
        self._earlier = _stored(self._path, callbacks.names) if resume else None
        self._handled = 0  # the last milestone that all callbacks have handled
        self._current_milestone: Milestone | None = None  # the milestone that they are handling
        self._decision = CallbackDecision()
        self._stored_decision = 0  # number of the last decision that a coordinator has stored
        self._steps = IntervalSet()  # batches that on_train_batch_end was called for
        self._steps_seen = 0
        self._coordinator = 0
        self._unsaved = False  # callbacks were called, and their decision is not recorded yet
        self._writes = BestEffort("records of callbacks", lambda text, over: say(text))
        callbacks.training.copy_weights = self._copy

    def look(self, follow: Follow) -> None:
        """Fetch new events from the coordinator, and call the callbacks."""
        if not self._begun:
            self._begin()
        for _ in range(AT_ONCE):
            if self._unsaved:
                self._record()
            reply = follow(self._request())
            self._stored_decision = self._decision.number
            decided = self._tell_steps(reply)
            if reply.HasField("milestone") and not decided:  # else send the new rate to the coordinator first
                self._tell(_milestone(reply.milestone, self._metrics_of, self._parts))
            elif not reply.steps:
                return

    def end(self) -> Path | None:
        """Call the callbacks' last hook; return the restored weights, None if the final ones stay."""
        self.callbacks.end()
        restored = self.callbacks.training.restored
        path = self._bring(restored) if isinstance(restored, str) else restored
        if self.callbacks.uses_weights:
            with suppress(StoreFailed):
                store = self._store()
                for name in store.names(EVALUATED):
                    if path is None or path != store.local_path(f"{EVALUATED}/{name}"):
                        store.delete(f"{EVALUATED}/{name}")
        return path

    def _begin(self) -> None:
        """Begin, or continue from the record."""
        earlier, callbacks, self._begun = self._earlier, self.callbacks, True
        if earlier is None:
            self._call_user(callbacks.begin)
            self._tell(Milestone(0))
            return
        self._handled, self._steps = earlier["fired"], IntervalSet(map(tuple, earlier["steps"]))
        self._decision = CallbackDecision(**earlier["decision"])
        self._call_user(lambda: callbacks.begin(earlier["state"]))
        if earlier.get("telling"):
            self._tell(Milestone(**earlier["telling"]))
        else:
            self._decided(callbacks.changed_rate())  # a rate that on_train_begin set

    def _request(self) -> pb.FollowRequest:
        planned = self._decision.planned if self._decision.number > self._stored_decision else ()
        return pb.FollowRequest(
            handled=self._handled,
            stop_reason=self._decision.stop_reason,
            learning_rate=self._decision.learning_rate,
            decision=self._decision.number,
            between=self._decision.between,
            planned=[pb.PlannedRate(epoch=epoch, learning_rate=rate) for epoch, rate in planned],
            wants_steps=self.callbacks.wants_steps,
            steps_seen=self._steps_seen,
            coordinator=self._coordinator,
        )

    def _decided(self, decision: CallbackDecision) -> bool:
        """Store a learning rate that was set between milestones; return whether one was."""
        if decision.learning_rate is None:
            return False
        self._decision, self._unsaved = decision._replace(stop_reason=self._decision.stop_reason), True
        return True

    def _tell_steps(self, reply: pb.FollowReply) -> bool:
        """Pass completed batches to callbacks, each once; return whether a learning rate was set."""
        ends = [StepEnd(end.step // self._parts, end.loss, dict(end.metrics)) for end in reply.steps]
        new = [end for end in ends if end.step not in self._steps]
        self._steps_seen, self._coordinator = reply.steps_seen, reply.coordinator
        if not new:
            return False
        for end in new:
            self._steps.add(end.step)
        self._record()
        return self._decided(self._call_user(lambda: self.callbacks.steps_ended(new)))

    def _tell(self, milestone: Milestone) -> None:
        """Pass a milestone to callbacks."""
        self._current_milestone = milestone
        self._record()
        if milestone.metrics is not None and self.callbacks.uses_weights and not milestone.weights:
            after = f"{milestone.after_steps:,}"
            warnings.warn(f"the weights evaluated after step {after} could not be stored for callbacks", stacklevel=2)
        self._decision = self._call_user(lambda: self.callbacks.reached(milestone, self._record))
        self._handled, self._current_milestone, self._unsaved = milestone.after_steps, None, True
        if self._record() and self.callbacks.uses_weights:
            self._forget_weights(milestone.after_steps)

    def _metrics_of(self, epoch: pb.EpochMetrics) -> dict[str, float]:
        """Return an epoch's metrics, including those that only the model's own metrics can compute."""
        metrics = {} if self._model is None or not epoch.sums else self._model.added_metrics
        own = {
            sums.name: metrics[sums.name].figure(np.array(sums.values)) for sums in epoch.sums if sums.name in metrics
        }
        found = {**epoch.figures, **own}
        return {name: float(found[name]) for name in sorted(found)}

    def _record(self) -> bool:
        """Record progress durably; return whether that succeeded, since a full disk must not stop callbacks (P21)."""
        content = {
            "callbacks": self.callbacks.names,
            "fired": self._handled,
            "telling": None if self._current_milestone is None else self._current_milestone._asdict(),
            "steps": list(self._steps.intervals()),
            "decision": self._decision._asdict(),
            "state": self._call_user(self.callbacks.state),
        }
        try:
            encoded = (json.dumps(content, default=float) + "\n").encode()
        except (TypeError, ValueError) as error:
            raise CallbackFailed(ConfigurationError(f"a callback's state is no JSON: {error}")) from None
        self._unsaved = not self._writes.attempt(lambda: write_durably(self._path, encoded))
        return not self._unsaved

    def _call_user(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # any error of a user's callback ends the run
            raise CallbackFailed(_from_its_own_lines(error)) from None

    # --- evaluated weights ---

    def _copy(self, name: str, path: Path) -> None:
        """Copy evaluated weights to a file, replacing it atomically."""
        store = self._store()
        local = store.local_path(name)
        if local is not None:
            replace_durably(path, lambda temporary: shutil.copyfile(local, temporary))
        else:
            replace_durably(path, lambda temporary: temporary.write_bytes(store.read(name, store.size(name))))

    def _bring(self, name: str) -> Path:
        """Move evaluated weights to the run's folder, which needs no space if the store is on the same disk."""
        path, local = self._path.parent / BEST_FILE, self._store().local_path(name)
        try:
            if local is None:
                self._copy(name, path)
            else:
                os.replace(local, path)
        except OSError as error:
            if local is None:
                raise StoreFailed(f"{path} cannot be written: {why_failed(error)}; {name} has the weights") from None
            return local
        return path

    def _forget_weights(self, up_to: int) -> None:
        """Delete the stored weights of handled evaluations, except those that callbacks hold."""
        with suppress(StoreFailed):
            store, held = self._store(), self.callbacks.held_weights
            for name in store.names(EVALUATED):
                if int(name.partition("-")[0]) <= up_to and f"{EVALUATED}/{name}" not in held:
                    store.delete(f"{EVALUATED}/{name}")


def _stored(path: Path, names: list[str]) -> dict[str, Any] | None:
    """Return the record of an earlier process, None if there is none; refuse other callbacks."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if found["callbacks"] != names:
        raise ConfigurationError(
            f"the run that is resumed has the callbacks {', '.join(found['callbacks']) or '(none)'}, this call "
            f"{', '.join(names) or '(none)'}: give the same ones, in the same order"
        )
    return found


def _milestone(
    reached: pb.Milestone, metrics_of: Callable[[pb.EpochMetrics], dict[str, float]], parts: int
) -> Milestone:
    """Convert the coordinator's Milestone message to the callbacks' Milestone, with judged steps as batches."""
    return Milestone(
        reached.after_steps,
        reached.first_epoch,
        list(reached.epoch_losses),
        {name: reached.metrics[name] for name in sorted(reached.metrics)} if reached.evaluated else None,
        reached.weights,
        reached.judged_steps // parts,
        list(reached.learning_rates),
        [metrics_of(epoch) for epoch in reached.epoch_metrics],
    )


def _from_its_own_lines(error: Exception) -> Exception:
    """Return an error whose traceback begins at the first line outside this package, if there is one."""
    place = error.__traceback__
    while place is not None and HERE in Path(place.tb_frame.f_code.co_filename).parents:
        place = place.tb_next
    return error.with_traceback(place) if place is not None else error
