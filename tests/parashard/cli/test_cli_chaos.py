"""`parashard chaos`: what its flags mean, what it prints, and that a broken promise is a failure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parashard.chaos.campaign import LENGTHS_S
from parashard.cli import chaos as chaos_commands
from parashard.cli.chaos import broken_promises
from parashard.job.load import LoadedJob
from parashard.launch.run import Outcome
from parashard.launch.runs import Run
from parashard.process.shell import ExitCode
from support.command_line import run_command
from support.small_job import SMALL_JOB

JOB = f"""{SMALL_JOB}
[checkpoint]
every_s = 60.0
"""
KEPT = {"job": "small", "state": "done", "reason": "every step is in", "steps_total": 9, "steps_applied": [9, 9]}
TRANSPORT = {"transport": "tcp"}
KEPT |= {"ledger_wrong": 0, "weights_sha256": "c0ffee", "worker_restarts": 2}

Chaos = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked() -> list[tuple[LoadedJob, tuple[Any, ...]]]:
    """Return what the command asked the runner for."""
    return []


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, asked: list[tuple[LoadedJob, tuple[Any, ...]]]) -> Callable[..., None]:
    """Return a function that says how the job ends."""

    def replace(report: dict[str, Any], exit_code: int = 0, reason: str = "every step is in") -> None:
        def run(run: Run, _: object, seed: int, *options: object) -> Outcome:
            asked.append((run.loaded, (seed, *options)))
            figures = {**report, "faults": {"kill_worker": 2, "delay": 0}, "seed": seed, **TRANSPORT}
            return Outcome(exit_code, figures, reason, run.folder)

        monkeypatch.setattr(chaos_commands, "run_chaos", run)

    replace(KEPT)
    return replace


@pytest.fixture
def chaos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: Callable[..., None]
) -> Chaos:
    """Return a function that runs the command on a job file, and returns its exit code and what it said."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_command(monkeypatch, capsys, "chaos", "job.toml", *arguments)

    return run


def test_it_prints_the_runs_report_with_the_faults_and_the_seed(chaos):
    code, out, _ = chaos("--seed", "7", "--json")
    assert code == ExitCode.DONE
    assert json.loads(out) == {**KEPT, "faults": {"kill_worker": 2, "delay": 0}, "seed": 7, **TRANSPORT}


def test_people_get_lines(chaos):
    code, out, _ = chaos("--seed", "7")
    assert code == ExitCode.DONE
    for line in (
        "small: done: every step is in",
        "faults        2: 2 kill_worker",
        "ledger_wrong  0",
        "seed          7",
    ):
        assert line in out.splitlines()
    assert "transport     tcp" in out.splitlines()


def test_flags_say_what_strikes(chaos, asked):
    chaos("--seed", "7", "--mean-interval-s", "0.5", "--faults", "30", "--kill", "worker,shard", "--delay")
    assert asked[0][1] == (7, 0.5, 30, ("kill_worker", "kill_shard", "delay", "duplicate"))


def test_without_flags_everything_strikes_until_the_end_by_a_seed_that_is_told(chaos, asked):
    _, out, _ = chaos("--json")
    options = asked[0][1]
    assert options == (json.loads(out)["seed"], 5.0, None, tuple(LENGTHS_S)[:-1])
    chaos("--json", "--run-dir", "other")
    assert asked[1][1][0] != options[0]


def test_a_job_under_faults_is_saved_every_second_unless_another_time_is_set(chaos, asked):
    chaos()
    chaos("--set", "checkpoint.every_s=0.5", "--workers", "3", "--shards", "2", "--consistency", "sync:4")
    first, second = asked[0][0], asked[1][0]
    assert first.job.checkpoint.every_s == 1.0
    assert first.origins["checkpoint.every_s"] == "flag chaos"
    assert second.job.checkpoint.every_s == 0.5
    cluster = second.job.cluster
    assert (cluster.workers, cluster.shards, str(second.job.consistency.policy)) == (3, 2, "sync:4")


@pytest.mark.parametrize(
    ("asked_for", "runs_as"), [("", "tcp"), ("auto", "tcp"), ("tcp", "tcp"), ("grpc", "grpc"), ("shm", "shm")]
)
def test_tensors_go_through_the_links_and_the_choice_of_a_transport_is_reported(chaos, asked, asked_for, runs_as):
    said = 'chaos: cluster.transport is "auto" and runs as "tcp"'
    code, out, _ = chaos(*(["--set", f"cluster.transport={asked_for}"] if asked_for else []))
    assert code == ExitCode.DONE
    assert asked[0][0].job.cluster.transport == runs_as
    assert (said in out) == (asked_for in ("", "auto"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ledger_wrong": 3}, "ledger_wrong is 3, not 0"),
        ({"torn": 1}, "torn is 1, not 0"),
        ({"steps_applied": [9, 8]}, "steps applied are [9, 8], not 9 on every shard"),
    ],
)
def test_a_broken_promise_is_a_failure_that_names_its_seed(chaos, ends, changed, said):
    ends({**KEPT, **changed})
    code, _, err = chaos("--seed", "7")
    assert code == ExitCode.FAILED
    assert f"{said}; --seed 7; see " in err


def test_a_job_that_did_not_finish_is_a_failure_with_its_reason(chaos, ends):
    ends({}, exit_code=1, reason="shard-0 is lost")
    code, out, err = chaos("--seed", "7", "--json")
    assert (code, "shard-0 is lost; --seed 7" in err) == (ExitCode.FAILED, True)
    failed = {"job": "small", "state": "failed", "faults": {"kill_worker": 2, "delay": 0}, "seed": 7}
    assert json.loads(out) == {**failed, **TRANSPORT}
    code, out, _ = chaos("--seed", "7", "--run-dir", "other", "--set", "cluster.transport=tcp")
    assert (code, out.splitlines()[0]) == (ExitCode.FAILED, "job: failed: shard-0 is lost")


def test_a_job_that_was_not_finished_breaks_no_promise():
    assert broken_promises({"state": "failed", "steps_total": 9, "steps_applied": [3, 4]}) == []
    assert broken_promises(KEPT) == []
    assert broken_promises({}) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--kill", "server"), "--kill: found 'server'"), (("--mean-interval-s", "0"), "mean-interval-s")],
)
def test_what_cannot_be_meant_is_refused(chaos, asked, arguments, said):
    code, _, err = chaos(*arguments)
    assert (code, said in err, asked) == (ExitCode.CONFIGURATION, True, [])
