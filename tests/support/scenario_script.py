"""Scenarios that read as scripts: commands, a line of dashes, and what the core answers, in virtual time.

A file in `scenarios/` holds blocks divided by empty lines; a block is a command, "----", and its expected output, or
comments. Commands:

    job POLICY key=value ...              a new core with two shards that have registered; keys of `Options`
    worker-1 joins                        a new incarnation under this name; "before-worker-1" makes calls of the last
    one worker-1 lease N [completes STEPS] [, reply lost]
                                          one call: reports, lists what it holds, asks for N steps
    worker-1 fails STEP REASON            reports a step that it could not compute
    worker-1 judges NUMBER key=value ...  reports an evaluation
    worker-1 dies                         the launcher sees its process end
    tick SECONDS                          time passes, and the coordinator looks for silent workers
    shard-1 returns with STEPS            a new incarnation of a shard, and what it has applied ("nothing": no step)
    status                                how the job stands and who holds what

`python tests/support/scenario_script.py FILE` prints the file with the answers that the code gives today.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from parashard.errors import ParashardError
from parashard.job.policy import Policy
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import LeaseAnswer
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.policies import leasing_policy
from parashard_coordinator.core.supervision import Exit, LocalLauncher, ProcessName
from support.coordinator_cases import Caller, announce, core_of, done, judged

SHARDS = 2
DIVIDER = "----"


class Scenario:
    """One job, its workers, and the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.callers: dict[str, Caller] = {}
        self.incarnations = [1] * SHARDS
        self.exits = 0
        self.core: Core

    def answer(self, command: str) -> list[str]:
        """Run one command; return what it answers, and after it what the core tells people."""
        subject, *words = command.split()
        told: list[str]
        try:
            if subject == "job":
                told = self._job(words)
            elif subject == "tick":
                told = self._tick(float(words[0]))
            elif subject == "status":
                told = self._status()
            elif subject.startswith("shard-"):
                told = self._shard_returns(int(subject.removeprefix("shard-")), words)
            else:
                told = getattr(self, f"_worker_{words[0]}")(subject, words[1:])
        except ParashardError as error:
            told = [f"{type(error).__name__}: {error}"]
        told += [f"* {event}" for event in self.core.job.new_events]
        self.core.job.new_events.clear()
        return told or ["ok"]

    def _job(self, words: list[str]) -> list[str]:
        options: dict[str, Any] = {key: _value(value) for key, _, value in (word.partition("=") for word in words[1:])}
        evaluate_after = options.pop("evaluate_after", [])
        options["steps_total"] = options.pop("steps")
        policy = leasing_policy(Policy.parse(words[0]))
        launcher = LocalLauncher(SHARDS, 1.0, 5)
        self.core = core_of(policy, evaluate_after, launcher, shards=SHARDS, **options)
        self.core.job.new_events.clear()
        return []

    def _tick(self, seconds: float) -> list[str]:
        self.now_s += seconds
        self.core.tick(self.now_s)
        return []

    def _status(self) -> list[str]:
        leases = self.core.job.leases
        held = {name: sorted(leases.held_by(name)) for name in sorted(self.callers)}
        reason = f": {self.core.job.reason}" if self.core.job.over else ""
        return [
            f"{self.core.job.state.name.lower()}{reason}",
            f"complete {_steps(leases.complete)} of {leases.target}",
            *(f"{name} holds {' '.join(map(str, steps))}" for name, steps in held.items() if steps),
        ]

    def _shard_returns(self, shard: int, words: list[str]) -> list[str]:
        self.incarnations[shard] += 1
        applied = [(step, step + 1) for step in _numbers(words[2:])]
        announce(self.core, shard, self.incarnations[shard], applied, restored="restored")
        return []

    def _worker_joins(self, name: str, words: list[str]) -> list[str]:
        if name in self.callers:
            self.callers[f"before-{name}"] = self.callers[name]
        self.callers[name] = Caller(self.core, name, self.now_s)
        return []

    def _worker_lease(self, name: str, words: list[str]) -> list[str]:
        lost = words[-3:] == [",", "reply", "lost"]
        words = words[:-3] if lost else words
        completed = _numbers(words[2:]) if "completes" in words else []
        skips = self.core.job.leases.skips
        acks = [step for s in completed for step in done(s, incarnations=self.incarnations, skipped=s in skips)]
        answer = self.callers[name].call(self.now_s, want=int(words[0]), completed=acks, lost=lost)
        return ["the reply is lost", *_told(answer)] if lost else _told(answer)

    def _worker_fails(self, name: str, words: list[str]) -> list[str]:
        self.callers[name].call(self.now_s, failed=[(int(words[0]), " ".join(words[1:]))])
        return []

    def _worker_judges(self, name: str, words: list[str]) -> list[str]:
        metrics = {key: float(value) for key, _, value in (word.partition("=") for word in words[1:])}
        self.callers[name].call(self.now_s, evaluated=judged(int(words[0]), self.incarnations, **metrics))
        return []

    def _worker_dies(self, name: str, words: list[str]) -> list[str]:
        process = ProcessName("worker", int(name.removeprefix("worker-")))
        self.exits += 1
        self.core.supervise([Exit(process, -9, "killed by signal 9", self.exits)], [], self.now_s)
        return []


def _told(answer: LeaseAnswer) -> list[str]:
    told = [f"drops {step}: it is complete" for step in answer.revoked]
    told += [
        f"gets evaluation after {e.after_step}" + ("" if e.round is None else f" of round {e.round}")
        for e in answer.evaluations
    ]
    if answer.granted:
        told.append("gets " + " ".join(f"{g.step}{' (to skip)' if g.skip else ''}" for g in answer.granted))
    return told or [f"gets nothing: {answer.reason}"]


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if "," in text:
        return [int(part) for part in text.split(",")]
    return float(text) if "." in text else int(text)


def _numbers(words: list[str]) -> list[int]:
    found = []
    for word in words:
        first, _, last = word.partition("-")
        found += [] if word == "nothing" else range(int(first), int(last or first) + 1)
    return found


def _steps(steps: IntervalSet) -> str:
    shown = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in steps.intervals()]
    return " ".join(shown) or "nothing"


def transcript(text: str) -> str:
    """Return a scenario with the answers that the code gives."""
    scenario, blocks = Scenario(), []
    for block in text.strip().split("\n\n"):
        lines = block.partition(f"\n{DIVIDER}")[0].splitlines()
        command = [line for line in lines if not line.startswith("#")]
        assert len(command) <= 1, f"a block has one command, found {command}"
        blocks.append("\n".join([*lines, DIVIDER, *scenario.answer(command[0])] if command else lines))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    sys.stdout.write(transcript(Path(sys.argv[1]).read_text()))
