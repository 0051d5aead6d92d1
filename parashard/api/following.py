"""CallbackFollower: feeds callbacks with what a run's coordinator tells, each event once, whatever is killed.

Owns the order that makes it so: an event is recorded in the run's folder before callbacks hear of it, and what they
decided before the coordinator does. So after a crash an effect may be lost, and is never repeated. Implements rule P38
of docs/protocol.md. Called by `parashard.launch.running` or `parashard.api.in_process.training`, and by
`parashard.api.fits` at the end.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parashard._proto import coordinator_pb2 as pb
from parashard.callbacks.events import Decision, Milestone, StepEnd
from parashard.callbacks.running import Callbacks
from parashard.checkpoints.catalogue import EVALUATED
from parashard.errors import ConfigurationError, StoreFailed
from parashard.launch.following import CallbackFailed, Follow
from parashard.plan.intervals import IntervalSet
from parashard.process.side_effects import why_failed
from parashard.store.base import Store
from parashard.store.durable import replace_durably, write_durably

STATE_FILE = "callbacks.json"
"""In a run's folder: how far callbacks are, and their states."""
AT_ONCE = 16
"""Milestones that are handled until the run is supervised again."""
HERE = Path(__file__).parent.parent


class CallbackFollower:
    """Runs the callbacks of one run.

    Parameters
    ----------
    callbacks : Callbacks
        What is called.
    run_dir : Path
        Gets their state.
    store : callable
        Opens the run's checkpoint store, where evaluated weights are.
    say : callable
        Tells people what goes wrong.
    resume : bool
        True: go on from the state in the folder.

    Raises
    ------
    ConfigurationError
        If that state is of other callbacks, or cannot be read.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        run_dir: Path,
        store: Callable[[], Store],
        say: Callable[[str], None],
        *,
        resume: bool,
    ) -> None:
        self._callbacks = callbacks
        self._path = run_dir / STATE_FILE
        self._open_store = store
        self._store: Store | None = None
        self._say = say
        self._begun = False
        self._earlier = _stored(self._path, callbacks.names) if resume else None
        self._fired = 0
        self._decision = Decision()
        self._steps = IntervalSet()  # that on_train_batch_end was called for
        self._steps_seen = 0
        self._coordinator = 0
        self._state: dict[str, Any] = {}  # of the callbacks, before the event that is being fired
        self._unsaved = False  # callbacks have fired, and what they decided is not recorded yet
        self._trouble = ""

    @property
    def arguments(self) -> Sequence[str]:
        """What the coordinator is started with."""
        store = ["--store-evaluated"] if self.stores_evaluated else []
        return ["--callbacks", "decide" if self.decides else "follow", *store]

    @property
    def decides(self) -> bool:
        """Whether a callback may stop the run or change the learning rate."""
        return self._callbacks.decides

    @property
    def stores_evaluated(self) -> bool:
        """Whether a callback uses the weights that were evaluated."""
        return self._callbacks.uses_weights

    @property
    def learning_rate(self) -> float:
        """The rate that callbacks have left, before the optimizer's schedule."""
        return self._callbacks.training.learning_rate

    @property
    def wants_steps(self) -> bool:
        """Whether a callback is told of every step."""
        return self._callbacks.wants_steps

    def look(self, follow: Follow, *, last: bool) -> None:
        """Ask what has happened, and call the callbacks."""
        if not self._begun:
            self._begin()
        # At the end nothing is supervised any more: all is told that is left.
        for _ in itertools.count() if last else range(AT_ONCE):
            if self._unsaved and not self._record():
                return
            reply = follow(self._request())
            more = self._tell_steps(reply)
            if reply.HasField("milestone"):
                if not self._handle(reply.milestone):
                    return
            elif not more:
                return

    @property
    def history(self) -> dict[str, list[float]]:
        """The figures of every epoch so far."""
        return self._callbacks.history.history

    def end(self) -> Path | None:
        """Call the callbacks' last hook; return the weights to go on with, if not the final ones."""
        self._callbacks.end()
        if self._callbacks.uses_weights:
            self._forget_weights(None)
        return self._callbacks.training.restored

    def _begin(self) -> None:
        """Begin, or go on from the record."""
        earlier, callbacks = self._earlier, self._callbacks
        if earlier is not None:
            self._fired, self._steps = earlier["fired"], IntervalSet(map(tuple, earlier["steps"]))
            self._decision = Decision(**earlier["decision"])
        self._fire(lambda: callbacks.begin(None if earlier is None else earlier["state"]))
        self._begun = True
        if earlier is None:
            self._decision = self._fire(callbacks.begin_epoch)
        self._state, self._unsaved = callbacks.state(), True

    def _request(self) -> pb.FollowRequest:
        return pb.FollowRequest(
            handled=self._fired,
            stop_reason=self._decision.stop_reason,
            learning_rate=self._decision.learning_rate or 0.0,
            wants_steps=self._callbacks.wants_steps,
            steps_seen=self._steps_seen,
            coordinator=self._coordinator,
        )

    def _tell_steps(self, reply: pb.FollowReply) -> bool:
        """Tell of completed steps, each once; return whether there are more of them."""
        new = [StepEnd(end.step, end.loss) for end in reply.steps if end.step not in self._steps]
        if reply.steps_missed:
            self._say(f"{reply.steps_missed:,} steps were forgotten before on_train_batch_end could be called for them")
        if new:
            for end in new:
                self._steps.add(end.step)
            if not self._record():
                for end in new:
                    self._steps.discard(end.step)
                return False
            self._fire(lambda: self._callbacks.steps_ended(new))
            self._state = self._callbacks.state()
        self._steps_seen, self._coordinator = reply.steps_seen, reply.coordinator
        return bool(reply.steps)

    def _handle(self, reached: pb.Milestone) -> bool:
        """Tell of a milestone; return False if it could not be recorded, so that it comes again."""
        before = self._fired, self._decision
        self._fired, self._decision = reached.after_steps, Decision()
        if not self._record():
            self._fired, self._decision = before
            return False
        milestone = Milestone(
            reached.after_steps,
            reached.first_epoch,
            list(reached.epoch_losses),
            {name: reached.metrics[name] for name in sorted(reached.metrics)} if reached.evaluated else None,
            self._copier(reached.weights) if reached.weights else None,
            reached.judged_steps,
        )
        if reached.evaluated and self._callbacks.uses_weights and not reached.weights:
            self._say(f"the weights evaluated after step {reached.after_steps:,} could not be stored, and are not kept")
        self._decision = self._fire(lambda: self._callbacks.reached(milestone))
        self._state, self._unsaved = self._callbacks.state(), True
        if self._record() and self._callbacks.uses_weights:
            self._forget_weights(reached.after_steps)
        return True

    def _record(self) -> bool:
        """Store what was fired and decided, durably; return False if that fails, as on a full disk."""
        content = {
            "callbacks": self._callbacks.names,
            "fired": self._fired,
            "steps": list(self._steps.intervals()),
            "decision": self._decision._asdict(),
            "state": self._state,
        }
        try:
            write_durably(self._path, (json.dumps(content) + "\n").encode())
        except OSError as error:
            if not self._trouble:
                self._trouble = why_failed(error)
                self._say(f"callbacks wait: {self._path.name} cannot be written: {self._trouble}")
            return False
        except (TypeError, ValueError) as error:
            raise CallbackFailed(ConfigurationError(f"a callback's state is no JSON: {error}")) from None
        self._unsaved, self._trouble = False, ""
        return True

    def _fire(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a user's callback raises ends the run
            raise CallbackFailed(_from_its_own_lines(error)) from None

    # --- the weights that were evaluated ---

    def _copier(self, name: str) -> Callable[[Path], None]:
        def copy(path: Path) -> None:
            store = self._stored()
            local = store.local_path(name)
            if local is not None:
                replace_durably(path, lambda temporary: shutil.copyfile(local, temporary))
            else:
                replace_durably(path, lambda temporary: temporary.write_bytes(store.read(name, store.size(name))))

        return copy

    def _forget_weights(self, up_to: int | None) -> None:
        """Delete the stored weights of handled evaluations, which later ones replace."""
        with suppress(StoreFailed):
            store = self._stored()
            for name in store.names(EVALUATED):
                if up_to is None or int(name.partition("-")[0]) <= up_to:
                    store.delete(f"{EVALUATED}/{name}")

    def _stored(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store


def _stored(path: Path, names: list[str]) -> dict[str, Any] | None:
    """Return the record of an earlier process; None: there is none."""
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


def _from_its_own_lines(error: Exception) -> Exception:
    """Return an error whose traceback begins with the first line that is not of this package, if there is one."""
    place = error.__traceback__
    while place is not None and HERE in Path(place.tb_frame.f_code.co_filename).parents:
        place = place.tb_next
    return error.with_traceback(place) if place is not None else error
