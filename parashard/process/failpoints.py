"""Failpoints: named places in the protocol where a fault can be injected into a running product.

Off by default; `hit` then costs one test of an empty dictionary. Armed by the environment of a process:

    PARASHARD_FAILPOINTS="shard.push.applied=kill@3*20;worker.pull.done=sleep(0.5)@1..50*2"
    PARASHARD_FAILPOINTS_DIR=a folder that all processes of the run share
    PARASHARD_FAILPOINTS_SEED=7

`NAME=ACTION@K*N`: the action happens at the K-th hit in a process, at most N times in the whole run; both default to 1.
`@A..B` draws K for each process, so that processes die at different moments.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from parashard.errors import ConfigurationError

SPEC_VARIABLE = "PARASHARD_FAILPOINTS"
FOLDER_VARIABLE = "PARASHARD_FAILPOINTS_DIR"
SEED_VARIABLE = "PARASHARD_FAILPOINTS_SEED"
EXIT_CODE = 75  # parashard.process.shell.ExitCode.RETRY, which cannot be imported here
PROCESSES = "processes"  # marker folder of the processes that were armed
TIMES_MAX = 1_000_000  # of firings, and of processes in one run
SLEEP_MAX_S = 3600.0

FAILPOINTS: dict[str, str] = {
    "shard.boot.claimed": "A shard has claimed its incarnation and has not looked for a checkpoint.",
    "shard.boot.restored": "A shard has its variables, from a checkpoint or the initial values, and does not listen.",
    "shard.boot.registered": "The coordinator knows the shard; nothing has been served yet.",
    "shard.push.received": "A push is here, whole, and nothing of it is applied.",
    "shard.push.applied": "A push is in the weights and in the applied set; its ack has not left.",
    "shard.rows.grown": "With a push, or a round, the index of a table has grown; the answer has not left.",
    "shard.rows.ended": "With a push, or a round, rows of a table were ended by its rules; the answer has not left.",
    "shard.pull.read": "A pull's weights are read; the answer has not left.",
    "shard.checkpoint.cut": "A checkpoint's applied set is fixed; no file of it is written.",
    "shard.checkpoint.files": "A checkpoint's tensor files are durable; its manifest is not written.",
    "shard.rows.gone": "A file of keys whose rows are gone is durable; the checkpoint's manifest is not written.",
    "shard.rows.moved": "A file of an increment's rows is durable, likewise.",
    "shard.rows.all": "A file of all rows, which replaces those of older checkpoints, is durable, likewise.",
    "shard.checkpoint.manifest": "A checkpoint's manifest is durable; it is not reported.",
    "shard.checkpoint.collecting": "An old checkpoint is about to be deleted.",
    "shard.rollback.claimed": "A shard that rolls back has claimed its next incarnation and restored nothing.",
    "shard.stop.saving": "A shard that was asked to stop accepts nothing more and has not saved.",
    "worker.boot.joined": "A worker is a member of the job and has no lease.",
    "worker.lease.granted": "An answer with leases has arrived; the step loop has not seen it.",
    "worker.lease.reporting": "A lease call (report, renewal, request) is about to be sent.",
    "worker.pull.done": "A step's weights are here.",
    "worker.compute.done": "A step's gradient is computed; nothing of it has been sent.",
    "worker.push.between_messages": "A message of a push over gRPC is about to leave; others have left before it.",
    "worker.push.in_slot": "A push is in shared memory; its shard has not been notified.",
    "worker.push.between_shards": "A push is in flight to one shard, and not begun to the next.",
    "worker.push.done": "Every shard has acknowledged a push; it is not reported to the coordinator.",
    "coordinator.boot.claimed": "A coordinator has claimed its incarnation and has read no state.",
    "coordinator.boot.serving": "A coordinator listens; no process has registered with this incarnation.",
    "coordinator.register_shard": "A shard's registration is taken; the answer has not left.",
    "coordinator.lease.decided": "Leases are granted and reports counted; the answer has not left.",
    "coordinator.state.saved": "The coordinator's soft state is stored.",
    "coordinator.checkpoint.parts": "Every part of a drained checkpoint is stored; its manifest is not.",
    "coordinator.checkpoint.manifest": "A drained checkpoint's manifest is stored; it is not reported.",
    "coordinator.finish.weights": "The final weights are written; the report is not.",
    "coordinator.finish.report": "The report is written; the job's state is not yet done.",
}
"""Every failpoint's name and the state of the process there."""


class InjectedFault(RuntimeError):
    """Raised by the action `error`: simulates a bug, so it is deliberately not a handled error."""


class FailpointAction(NamedTuple):
    """The action at one failpoint."""

    name: str
    action: str  # "kill" (SIGKILL), "exit" (at once, with the code that asks for a restart), "sleep" or "error"
    sleep_s: float  # how long "sleep" takes
    first: int  # the hit of a process at which it happens is drawn from `first` to `last`
    last: int
    times: int  # bound on the firings in the whole run


_SPEC = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>kill|exit|error|sleep\((?P<sleep_s>\d{1,6}(\.\d{1,6})?)\))"
    r"(@(?P<first>\d{1,9})(\.\.(?P<last>\d{1,9}))?)?(\*(?P<times>\d{1,9}))?"
)

_armed: dict[str, FailpointAction] = {}
_hits_left: dict[str, int] = {}  # of each fault in this process, which fires once, when none is left
_folder = Path()
_counting = threading.Lock()


def hit(name: str) -> None:
    """Pass a failpoint: nothing happens unless this process was armed for it."""
    if _armed:
        _pass_armed(name)


def arm(environ: Mapping[str, str]) -> None:
    """Arm this process from an environment; an environment without failpoints disarms it."""
    global _armed, _folder  # noqa: PLW0603  # the switch that `hit` tests, for a whole process
    faults = parse(environ.get(SPEC_VARIABLE, ""))
    if not faults:
        _armed = {}
        return
    if not environ.get(FOLDER_VARIABLE):
        raise ConfigurationError(f"{SPEC_VARIABLE} is set and {FOLDER_VARIABLE} is not: say where firings are marked")
    _folder = Path(environ[FOLDER_VARIABLE])
    try:
        process = _mark(PROCESSES, TIMES_MAX)
    except OSError as error:
        raise ConfigurationError(f"{FOLDER_VARIABLE}={_folder}: {error.strerror}") from None
    seed = environ.get(SEED_VARIABLE, "0")
    _hits_left.update((fault.name, hit_of_process(fault, seed, process)) for fault in faults)
    _armed = {fault.name: fault for fault in faults}


def parse(spec: str) -> list[FailpointAction]:
    """Return the faults that a specification names, at most one for each failpoint."""
    faults: dict[str, FailpointAction] = {}
    for part in (part.strip() for part in spec.split(";")):
        if not part:
            continue
        found = _SPEC.fullmatch(part)
        if found is None:
            raise ConfigurationError(
                f"{SPEC_VARIABLE}: {part!r} cannot be read; allowed is NAME=ACTION, NAME=ACTION@K*N or "
                "NAME=ACTION@A..B*N, with ACTION kill, exit, error or sleep(SECONDS)"
            )
        name, first = found["name"], int(found["first"] or 1)
        fault = FailpointAction(
            name,
            found["action"].partition("(")[0],
            float(found["sleep_s"] or 0),
            first,
            int(found["last"] or first),
            int(found["times"] or 1),
        )
        if name not in FAILPOINTS:
            known = ", ".join(FAILPOINTS)
            raise ConfigurationError(f"{SPEC_VARIABLE}: {name!r} is no failpoint; there are {known}")
        if name in faults:
            raise ConfigurationError(f"{SPEC_VARIABLE}: {name} is named twice; allowed is once")
        if not 1 <= fault.first <= fault.last or not 1 <= fault.times <= TIMES_MAX or fault.sleep_s > SLEEP_MAX_S:
            raise ConfigurationError(
                f"{SPEC_VARIABLE}: {part!r}: hits count from 1, A is at most B, N is 1 to {TIMES_MAX}, "
                f"a sleep is at most {SLEEP_MAX_S:.0f} s"
            )
        faults[name] = fault
    return list(faults.values())


def hit_of_process(fault: FailpointAction, seed: str, process: int) -> int:
    """Return the hit at which a fault happens; a function of the seed and the number of the process."""
    return random.Random(f"{seed}/{fault.name}/{process}").randint(fault.first, fault.last)


def firings(folder: Path) -> Counter[str]:
    """Return how often each failpoint has fired in a run, from the markers in its folder."""
    return Counter({path.name: len(list(path.iterdir())) for path in folder.iterdir() if path.name in FAILPOINTS})


def _pass_armed(name: str) -> None:
    assert name in FAILPOINTS, f"{name!r} is no registered failpoint"
    fault = _armed.get(name)
    if fault is None:
        return
    with _counting:
        _hits_left[name] -= 1
        fires = _hits_left[name] == 0
    # Mark first: a fault that kills its process could not be counted afterwards.
    if fires and _mark(name, fault.times):
        _fire(fault)


def _mark(name: str, times: int) -> int:
    """Create the next marker, a new file, and return its number, from 1; 0 if there are `times` of them already."""
    folder = _folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(list(folder.iterdir())) + 1, times + 1):
        try:
            (folder / f"{number:06d}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    return 0


def _fire(fault: FailpointAction) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(EXIT_CODE)
        case "sleep":
            time.sleep(fault.sleep_s)
        case "error":
            raise InjectedFault(f"failpoint {fault.name}")
