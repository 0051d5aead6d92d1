"""`parashard run` and `parashard resume` with the cluster played: what they print, and whose values a run has."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from parashard.cli import run as run_commands
from parashard.display.status_tables import summary_lines
from parashard.job.load import LoadedJob
from parashard.launch.programs import Program, ResumeFlags, read_resume_flags, write_program
from parashard.launch.run import Outcome
from parashard.launch.runs import Run
from parashard.process.shell import ExitCode
from support.command_line import REPORT, assert_refused, begun


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says how the next run ends."""

    def play(exit_code: int, report: dict[str, object], reason: str = "") -> None:
        monkeypatch.setattr(
            run_commands,
            "run_job",
            lambda run, view: Outcome(exit_code, report, reason, run.folder),
        )

    return play


def test_a_finished_run_ends_with_a_summary(parashard, played):
    played(ExitCode.DONE, REPORT)
    ran = parashard("run", "job.toml", "--run-dir", "with [/brackets]")
    assert (ran.exit_code, ran.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in ran.out.splitlines())
    assert {name: value.strip() for name, value in lines.items()} == {
        "small": "done: every step is in",
        "steps": "1,400 of 1,400, applied by every shard",
        "throughput": "1,234 examples/s over 1.5 s",
        "held-out accuracy": "0.9712",
        "held-out loss": "0.1000",
        "held-out mean squared error": "353.1234",
        "training loss": "0.2000",
        "staleness": "p50 0, p95 1, max 2 pushes",
        "step lag": "max 3 steps",
        "transfers": "take 40 % of a step, 75 % of that while computing",
        "traffic": "3.0 MiB pushed, 1.0 MiB pulled",
        "traffic saved": "43 %",
        "repeated gradients ignored": "5",
        "restarts": "1 worker, 2 coordinators",
        "weights": "with [/brackets]/weights.safetensors",
        "sha256": "abababababababab",
        "run": "with [/brackets]",
    }


NOT_LEARNED = "the training loss has not fallen: 2.3 in the first 8 steps; lower optimizer.learning_rate"


@pytest.mark.parametrize("json_", [False, True])
def test_the_last_line_of_a_run_whose_model_did_not_learn_says_so(parashard, played, json_: bool) -> None:
    report = REPORT | {"problems": ["another", NOT_LEARNED], "not_learned": NOT_LEARNED}
    played(ExitCode.DONE, report)
    ran = parashard("run", "job.toml", "--run-dir", "run", *(["--json"] if json_ else []))
    assert ran.exit_code == 0
    told = f"done, but the model did not learn: {NOT_LEARNED}"
    if json_:
        assert json.loads(ran.out) == report
        assert ran.err == f"parashard: {told}\n"
    else:
        assert ran.out.splitlines()[-1] == told
        assert ran.out.count(NOT_LEARNED) == 1
        assert "another" in ran.out


def test_what_a_pipeline_would_hide_stands_beside_what_transfers_take() -> None:
    network = {"overlapped_share": 0.0, "step_share": 0.4, "pipeline": "cluster.pipeline_depth = 1 would hide 40 %"}
    lines = [line.plain for line in summary_lines(REPORT | {"network": network}, Path("run"))]
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("transfers ")] == [
        "take 40 % of a step; cluster.pipeline_depth = 1 would hide 40 %"
    ]


def test_the_report_of_an_earlier_version_has_no_share_of_a_step() -> None:
    lines = [line.plain for line in summary_lines(REPORT | {"network": {"overlapped_share": 0.75}}, Path("run"))]
    assert not any(line.startswith("transfers ") for line in lines)


def test_a_run_that_was_stopped_is_not_said_to_be_done() -> None:
    stopped = REPORT | {"state": "stopped", "problems": [NOT_LEARNED], "not_learned": NOT_LEARNED}
    lines = [line.plain for line in summary_lines(stopped, Path("run"))]
    assert [line.split()[0] for line in lines if NOT_LEARNED in line] == ["problem"]


def test_a_copy_of_the_weights_is_named():
    lines = [line.plain.split() for line in summary_lines(REPORT, Path("run"), Path("kept/model.safetensors"))]
    assert ["copied", "to", "kept/model.safetensors"] in lines


def test_an_interrupted_run_ends_with_a_summary_and_how_to_continue(parashard, played):
    stopped = REPORT | {"state": "stopped", "reason": "interrupted", "steps_applied": [700, 690]}
    del stopped["weights_sha256"]
    played(130, stopped, "stopped at step 690 of 1,400 (saved). Continue: parashard resume run")
    ran = parashard("run", "job.toml", "--run-dir", "run")
    assert ran.exit_code == 130
    assert ran.err == "parashard: stopped at step 690 of 1,400 (saved). Continue: parashard resume run\n"
    assert ran.out.splitlines()[0].split() == ["small", "stopped:", "interrupted"]
    assert "690 to 700 of 1,400, applied by the shards" in ran.out
    assert "weights" not in ran.out


@pytest.mark.parametrize(
    ("metrics", "rows"),
    [
        ({"accuracy": 0.9712}, [["held-out", "accuracy", "0.9712"]]),
        (
            {"loss": 0.25, "mean_absolute_error": None, "mean_squared_error": 2.5e9},
            [["held-out", "loss", "0.2500"], ["held-out", "mean", "squared", "error", "2.5e+09"]],
        ),
        ({}, []),
    ],
)
def test_the_summary_names_the_metrics_that_the_model_has(parashard, played, metrics, rows):
    played(ExitCode.DONE, REPORT | {"held_out": metrics})
    ran = parashard("run", "job.toml", "--run-dir", "run")
    shown = [line.split() for line in ran.out.splitlines()]
    assert [words for words in shown if words[0] in ("held-out", "training")] == [*rows, ["training", "loss", "0.2000"]]


def test_with_json_the_last_line_is_the_report(parashard, played):
    played(ExitCode.DONE, REPORT)
    ran = parashard("run", "job.toml", "--json")
    assert (ran.exit_code, json.loads(ran.out.splitlines()[-1])) == (0, REPORT)


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.CONFIGURATION, ExitCode.FENCED, ExitCode.RETRY])
def test_a_run_that_failed_says_why_and_where_the_logs_are(parashard, played, code):
    played(code, {}, "a shard ended: killed by SIGKILL")
    ran = parashard("run", "job.toml", "--run-dir", "run", "--json")
    assert ran.exit_code == code
    assert ran.err == "parashard: a shard ended: killed by SIGKILL; logs are in run/logs\n"
    where = {"run_dir": str(Path("run").absolute()), "weights": None}
    assert json.loads(ran.out) == {"job": "small", "state": "failed", **where}


def test_a_run_that_is_resumed_has_its_own_values(parashard, monkeypatch):
    run_dir = begun("small-1", "job.epochs=50", "optimizer.learning_rate=0.5")
    monkeypatch.setenv("PARASHARD_JOB__SEED", "9")  # of now: the run began without it
    taken = taken_up(monkeypatch)
    ran = parashard("run", "job.toml", "--resume", "--workers", "3")
    assert (ran.exit_code, ran.err) == (0, "")
    ((loaded, folder),) = taken
    assert folder == run_dir
    assert (loaded.job.job.epochs, loaded.job.job.seed, loaded.job.optimizer.learning_rate) == (50, 0, 0.5)
    assert loaded.job.cluster.workers == 3
    assert loaded.path == Path("job.toml").absolute()
    assert ran.out.splitlines()[0] == (
        "runs/small-1 goes on with its own values; not taken from job.toml: job.seed = 9 (the run: 0), "
        "job.epochs = 2 (the run: 50), optimizer.learning_rate = 0.1 (the run: 0.5)"
    )


def test_a_run_that_is_resumed_as_it_began_says_nothing_of_it(parashard, monkeypatch):
    begun("small-1", "job.epochs=50")
    taken_up(monkeypatch)
    assert "own values" not in parashard("run", "job.toml", "--resume", "--set", "job.epochs=50").out


def test_resume_needs_no_job_file_and_takes_the_newest_unfinished_run(parashard, monkeypatch):
    begun("small-1")
    wanted = begun("small-2", "job.epochs=50")
    done = begun("small-3")
    (done / "report.json").write_text('{"state": "done", "reason": "every step is in"}')
    Path("job.toml").unlink()
    taken = taken_up(monkeypatch)
    assert parashard("resume", "--device", "cpu").exit_code == 0
    assert parashard("resume", "small-1").exit_code == 0
    assert parashard("resume", "runs/small-2").exit_code == 0
    assert [folder.name for _, folder in taken] == ["small-2", "small-1", "small-2"]
    loaded, folder = taken[0]
    assert (folder, loaded.job.job.epochs, loaded.job.cluster.device) == (wanted, 50, "cpu")
    assert loaded.path == Path("elsewhere/job.toml").absolute(), "where its model is looked up"
    assert_refused(parashard("resume", "small-3"), "small-3 is done: every step is in")
    assert_refused(parashard("resume", "small-4"), "'small-4' is no run", "under runs/")


def test_without_an_unfinished_run_there_is_nothing_to_resume(parashard):
    assert_refused(parashard("resume"), "no unfinished run under runs/")


def taken_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LoadedJob, Path]]:
    """Have runs end well at once; return the list that they are noted in."""
    taken: list[tuple[LoadedJob, Path]] = []

    def run(run: Run, view: object) -> Outcome:
        assert run.resume
        taken.append((run.loaded, run.folder))
        return Outcome(ExitCode.DONE, REPORT, "", run.folder)

    monkeypatch.setattr(run_commands, "run_job", run)
    return taken


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Path, dict[str, str]]]:
    """Programs that were started again: words, folder, environment."""
    taken: list[tuple[list[str], Path, dict[str, str]]] = []

    def execve(path: str, words: Sequence[str], environ: dict[str, str]) -> NoReturn:
        taken.append(([path, *words[1:]], Path.cwd(), environ))
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execve)
    return taken


def test_a_script_is_started_again_to_go_on_with_its_run(parashard, started, monkeypatch):
    run_dir, there = begun("train-1"), Path("there").absolute()
    there.mkdir()
    script = there / "train.py"
    script.touch()
    write_program(run_dir, Program("fit", str(script), ("/bin/python", "train.py", "--seed", "1"), str(there)))
    monkeypatch.setenv("HERE", "1")
    words = ["--shards", "3", "--set", "checkpoint.keep=7", "--from-checkpoint", "j2"]
    assert parashard("resume", "train-1", *words).exit_code == 0
    [(command, folder, environ)] = started
    assert (command, folder) == (["/bin/python", "train.py", "--seed", "1"], there)
    assert (environ["PARASHARD_RESUME"], environ["PARASHARD_RUNS"]) == (str(run_dir), str(run_dir.parent))
    assert read_resume_flags(environ["PARASHARD_RESUME_FLAGS"]) == ResumeFlags(
        [("checkpoint.keep", 7, "--set"), ("cluster.shards", 3, "--shards")], "j2"
    )
    assert environ["HERE"] == "1"


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        (Program("fit"), [], "is of a notebook, or of another program without a script: fit(..., resume=True)"),
        (Program("ps.Cluster"), [], "without a script: ps.Cluster(..., resume=True)"),
        (Program("ps.Coordinator", "/there/train.py", ("python",)), [], "which cannot go on with a run"),
        (Program("fit", "/there/train.py", ("python",)), [], "its script /there/train.py is gone"),
        (Program("fit", __file__, ("/no/python",), "/"), [], "cannot be started again in /: No such file"),
        (Program("fit", __file__), [], "PARASHARD_RESUME=runs/train-1 python "),
        (Program("fit", __file__, ("python",)), ["--json", "--output", "w"], "--output, --json: of a script's run"),
        (Program("fit", __file__, ("python",)), ["--set", "job.epochs=3"], "--set job.epochs: of a script's run"),
    ],
)
def test_a_program_that_cannot_be_started_again_is_told_of(parashard, program, words, told):
    write_program(begun("train-1"), program)
    assert_refused(parashard("resume", *words), told)
