"""The command line: a user's mistake is one line on standard error and exit code 2, never a traceback.

Commands run in this process, through `main` as the console script does; an exception that escapes it fails the test.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from parashard import __version__
from parashard.cli import run as run_commands
from parashard.cli.main import app
from parashard.display.live import NoView
from parashard.job.layers import parse_set
from parashard.job.load import LoadedJob, as_toml, load_job
from parashard.launch.run import Outcome
from parashard.launch.run_folders import launcher_lock
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import ADDRESS_FILE
from support.command_line import Ran, run_command
from support.small_job import SMALL_JOB

Command = Callable[..., Ran]


@pytest.fixture
def parashard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command in a folder with `job.toml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("job.toml").write_text(SMALL_JOB)

    def run(*arguments: str) -> Ran:
        return run_command(monkeypatch, capsys, *arguments)

    return run


def assert_refused(ran: Ran, *parts: str) -> None:
    """One line, from us, with what is wrong in it."""
    assert ran.exit_code == ExitCode.CONFIGURATION, ran
    assert ran.out == ""
    assert ran.err.startswith("parashard: ")
    assert ran.err.count("\n") == 1, ran.err
    for part in parts:
        assert part in ran.err, f"{part!r} is not in {ran.err!r}"


# --- a user's mistakes ---

MISTAKES = {
    "unknown key": (["--set", "job.epoch=3"], ["job.epoch", "unknown key", "did you mean job.epochs?"]),
    "unknown table": (["--set", "checkpoints.every_s=3"], ["checkpoints", "unknown key", "did you mean checkpoint?"]),
    "wrong type": (["--set", "job.epochs=two"], ["--set", "job.epochs", '"two"', "an integer"]),
    "text that looks like a number": (["--set", 'job.epochs="2"'], ["job.epochs", "an integer"]),
    "out of range": (["--set", "job.batch_size=0"], ["job.batch_size", "0", ">"]),
    "model of the tests": (["--set", "model.kind=legder"], ["softmax, mlp, cnn, module:factory\n"]),
    "unknown kind": (["--set", "optimizer.kind=adamax"], ["optimizer.kind", "adamax", "adamw"]),
    "--set without =": (["--set", "job.epochs"], ["--set", "key.path=value"]),
    "--set without a key": (["--set", "=3"], ["--set", "key.path=value"]),
    "--set below a value": (["--set", "job.epochs.more=3"], ["job.epochs", "no table"]),
    "bad consistency": (["--consistency", "sometimes"], ["--consistency", "sometimes", "ssp:"]),
    "consistency without a bound": (["--consistency", "ssp"], ["--consistency", "ssp:"]),
    "consistency with a bad bound": (["--consistency", "sync:0"], ["--consistency", "sync:0"]),
    "no shards": (["--shards", "0"], ["--shards", "cluster.shards", "0"]),
    "bad device": (["--device", "tpu"], ["--device", "tpu", "cpu"]),
    "not utf-8": (["--set", "job.name=a\udcffb"], ["job.name", "UTF-8"]),
}


@pytest.mark.parametrize("command", ["run", "config"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_flag_is_one_line(parashard, command, mistake):
    flags, parts = MISTAKES[mistake]
    assert_refused(parashard(command, "job.toml", *flags), *parts)
    assert not Path("runs").exists()  # nothing was begun


BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "not TOML": (b"[job\nname = 3", ["not TOML"]),
    "binary": (b"\x89PNG\r\n\x1a\n\xff", ["0x89", "UTF-8"]),
    "empty": (b"", []),
    "unknown key": (SMALL_JOB.replace("epochs", "epochz").encode(), ["epochz"]),
    "a table that is a number": (SMALL_JOB.replace("[model]", "[modell]").encode(), ["modell"]),
}


@pytest.mark.parametrize("command", ["run", "config"])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_job_file_is_named(parashard, command, kind):
    content, parts = BAD_FILES[kind]
    Path("bad.toml").write_bytes(content)
    ran = parashard(command, "bad.toml")
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert ran.err.startswith("parashard: ")
    assert "Traceback" not in ran.err
    for part in ["bad.toml", *parts]:
        assert part in ran.err


@pytest.mark.parametrize(("path", "says"), [("none.toml", "there is no such file"), (".", "this is a folder")])
def test_a_job_file_that_is_not_there_is_named(parashard, path, says):
    assert_refused(parashard("run", path), path, says)


def test_a_mistake_in_the_environment_is_named(parashard, monkeypatch):
    monkeypatch.setenv("PARASHARD_JOB__EPOCHS", "many")
    assert_refused(parashard("run", "job.toml"), "environment PARASHARD_JOB__EPOCHS", "job.epochs", "an integer")


def test_a_variable_with_one_underscore_is_refused_with_the_right_spelling(parashard, monkeypatch):
    monkeypatch.setenv("PARASHARD_JOB_EPOCHS", "5")
    assert_refused(parashard("run", "job.toml"), "PARASHARD_JOB_EPOCHS", "did you mean PARASHARD_JOB__EPOCHS?")
    assert not Path("runs").exists()


def test_a_variable_that_is_not_read_is_warned_of(parashard, monkeypatch):
    monkeypatch.setenv("PARASHARD_WORKERS", "5")
    ran = parashard("config", "job.toml", "--json")
    assert ran.exit_code == 0
    assert ran.err == (
        "parashard: warning: environment PARASHARD_WORKERS: ignored, only compose files read it; "
        "did you mean PARASHARD_CLUSTER__WORKERS?\n"
    )
    assert json.loads(ran.out)["cluster.workers"]["origin"] == "default"


def test_a_run_directory_with_something_in_it_is_refused(parashard):  # P2
    Path("used").mkdir()
    Path("used/report.json").touch()
    assert_refused(parashard("run", "job.toml", "--run-dir", "used"), "used", "not empty")
    assert list(Path("used").iterdir()) == [Path("used/report.json")]


def test_a_run_directory_that_is_a_file_is_refused(parashard):
    assert_refused(parashard("run", "job.toml", "--run-dir", "job.toml"), "job.toml", "File exists")


def test_a_cluster_that_others_start_is_not_run_here(parashard):
    assert_refused(parashard("run", "job.toml", "--set", "cluster.launcher=external"), "external", "parashard worker")


def test_data_that_is_not_there_ends_the_run_with_the_reason(parashard):
    ran = parashard("run", "job.toml", "--set", 'data={source="idx", path="no/such/folder"}', "--run-dir", "run")
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert "no/such/folder" in ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("\n") == 1
    assert "logs" not in ran.err
    assert not Path("run").exists()


def test_a_folder_that_was_there_stays_and_is_empty_after_a_mistake(parashard):
    Path("run").mkdir()
    ran = parashard("run", "job.toml", "--set", "cluster.host=198.51.100.7", "--run-dir", "run")
    assert_refused(ran, "off loopback")
    assert list(Path("run").iterdir()) == []


@pytest.mark.parametrize("command", ["run", "chaos"])
def test_after_a_mistake_the_terminal_is_given_back_and_no_folder_is_left(parashard, monkeypatch, command):
    closed: list[bool] = []

    class View(NoView):
        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(f"parashard.cli.{command}.open_view", lambda _: View())
    assert_refused(parashard(command, "job.toml", "--set", "cluster.host=198.51.100.7"), "off loopback")
    assert closed
    assert list(Path("runs").iterdir()) == []


def test_after_a_mistake_a_run_that_goes_on_keeps_its_folder(parashard):
    folder = begun("small-1")
    assert_refused(parashard("resume", "--set", "cluster.host=198.51.100.7"), "off loopback")
    assert_refused(parashard("run", "job.toml", "--resume", "--set", "cluster.host=198.51.100.7"), "off loopback")
    assert (folder / "job.toml").exists()


@pytest.mark.parametrize("key", ["cluster.device", "cluster.shard_device"])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(parashard, monkeypatch, key):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    monkeypatch.setattr(
        "parashard.launch.local_cluster.LocalCluster.start", lambda *_: pytest.fail("a process was started")
    )
    ran = parashard("run", "job.toml", "--set", f"{key}=cuda")
    assert_refused(ran, key, "needs CuPy", "parashard[cuda12]")
    assert not list(Path("runs").glob("*")), "no folder of a run that never began"


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"]], ids=lambda command: command[0])
@pytest.mark.parametrize("where", ["nowhere", "localhost", "localhost:port", "localhost:99999"])
def test_a_place_that_is_no_coordinator_is_refused(parashard, command, where):
    assert_refused(parashard(*command, where), where, "neither a run directory nor host:port")


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"]], ids=lambda command: command[0])
def test_without_a_run_there_is_nobody_to_ask(parashard, command):
    assert_refused(parashard(*command), "no run directory under runs/")


def test_a_damaged_address_file_is_named(parashard):
    Path("run").mkdir()
    Path("run", ADDRESS_FILE).write_text("{")
    assert_refused(parashard("status", "run"), ADDRESS_FILE, "damaged")


def test_a_coordinator_that_does_not_answer_may_be_asked_later(parashard):
    ran = parashard("status", "127.0.0.1:1")
    assert ran.exit_code == ExitCode.RETRY
    assert ran.err.startswith("parashard: ")
    assert ran.err.count("\n") == 1
    assert "127.0.0.1:1" in ran.err


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "job.toml", "--shards", "two"], ["walk"], ["run", "job.toml", "--fast"], ["scale"]]
)
def test_usage_errors_are_exit_code_2_too(parashard, arguments):
    ran = parashard(*arguments)
    assert (ran.exit_code, ran.out) == (ExitCode.CONFIGURATION, "")
    assert "Traceback" not in ran.err


# --- what it prints ---


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(parashard, word):
    assert parashard(word) == (0, f"parashard {__version__}\n", "")


def test_the_module_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "parashard", "version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"parashard {__version__}\n"


def test_config_as_json_tells_every_value_and_its_origin(parashard, monkeypatch):
    monkeypatch.setenv("PARASHARD_JOB__SEED", "7")
    ran = parashard("config", "job.toml", "--json", "--workers", "3", "--set", "model.kind=mlp", "--set", "job.seed=8")
    assert (ran.exit_code, ran.err, ran.out.count("\n")) == (0, "", 1)
    values = json.loads(ran.out)
    assert values["job.epochs"] == {"value": 2, "origin": "file job.toml"}
    assert values["cluster.workers"] == {"value": 3, "origin": "flag --workers"}
    assert values["job.seed"] == {"value": 8, "origin": "flag --set"}  # flag > environment
    assert values["model.kind"]["value"] == "mlp"
    assert values["cluster.shards"]["origin"] == "default"
    assert parashard("config", "job.toml", "--json").out.count('"environment PARASHARD_JOB__SEED"') == 1


def test_config_as_a_table_has_a_line_for_every_value(parashard):
    keys = json.loads(parashard("config", "job.toml", "--json").out)
    ran = parashard("config", "job.toml")
    assert (ran.exit_code, ran.err) == (0, "")
    assert {line.split()[0] for line in ran.out.splitlines()[1:]} >= set(keys)


def test_help_begins_with_run_and_shows_no_type_of_flags(parashard):
    said = parashard("--help").out
    commands = [line.split()[0] for line in said.partition("Commands:\n")[2].splitlines()]
    assert commands[:2] == ["run", "resume"]
    for words in [["--help"], ["run", "--help"], ["checkpoint", "ls", "--help"], ["certs", "--help"]]:
        assert "bool" not in parashard(*words).out.lower(), words


def test_help_tells_the_whole_first_paragraph_of_a_command(parashard):
    # click would cut it: "Make a certificate authority; keep its key off the machines..."
    assert "..." not in parashard("certs", "--help").out.partition("Commands:")[2]


def test_help_says_of_a_command_what_its_own_help_says():
    # It does so without the command's file: the table in `parashard.cli.main` has the sentence.
    commands = typer.main.get_command(app).commands
    told = {name: found.help for name, found in type(typer.main.get_command(app)).table.items()}
    own = {name: " ".join(commands[name].help.partition("\n\n")[0].split()) for name in told}
    assert told == own


def test_a_shell_is_given_what_completes_commands(parashard, monkeypatch):
    Path("runs/digits-1").mkdir(parents=True)
    Path("runs/digits-1/job.toml").touch()
    monkeypatch.setenv("_PARASHARD_COMPLETE", "complete_bash")
    for typed, words in {"parashard ru": ["run", "runs"], "parashard resume dig": ["digits-1"]}.items():
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        assert parashard().out.split() == words


def test_help_is_shown_without_a_command(parashard):
    ran = parashard()
    assert "parameter server" in ran.out + ran.err
    assert parashard("--help").exit_code == 0


def test_a_run_that_is_over_tells_its_report(parashard):
    Path("run").mkdir()
    Path("run", ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    Path("run", "report.json").write_text('{"job": "small", "accuracy": 0.5}')
    ran = parashard("status", "run", "--json")
    assert (ran.exit_code, json.loads(ran.out), ran.out.count("\n")) == (0, {"job": "small", "accuracy": 0.5}, 1)


@pytest.mark.parametrize(
    ("report", "parts"),
    [
        ({"state": "done"}, ["done: every step is in", "0.9712", "weights.safetensors"]),
        (
            {"state": "stopped", "reason": "interrupted"},
            ["stopped: interrupted", "1,400 of 1,400", "parashard resume run"],
        ),
    ],
    ids=["done", "failed"],
)
def test_without_json_people_read_the_report(parashard, report, parts):
    Path("run").mkdir()
    Path("run", ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    Path("run", "report.json").write_text(json.dumps({**REPORT, **report}))
    ran = parashard("status", "run")
    assert (ran.exit_code, "{" in ran.out) == (0, False)
    for part in parts:
        assert part in ran.out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["status", "small-1", "--json"], '"accuracy": 0.5'),
        (["scale", "small-1", "--workers", "2"], "runs/small-1 is over (done: every step is in)"),
        (["checkpoint", "create", "small-1"], "runs/small-1 is over (done: every step is in)"),
        (["checkpoint", "ls", "small-1", "--json"], "[]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_has_its_name_for_every_command(parashard, command, told):
    run_dir = begun("small-1")
    (run_dir / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    (run_dir / "checkpoints").mkdir()
    (run_dir / "report.json").write_text('{"state": "done", "reason": "every step is in", "accuracy": 0.5}')
    ran = parashard(*command)
    assert told in ran.out + ran.err


def test_a_worker_joins_a_run_by_its_name(parashard, monkeypatch):
    begun("small-1")
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    for where in ("small-1", "runs/small-1", "host:1", "elsewhere"):
        parashard("worker", "--connect", where)
    assert [words[words.index("--connect") + 1] for words in started] == [
        *["runs/small-1"] * 2,
        "host:1",
        "elsewhere",
    ]


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"]], ids=" ".join)
def test_a_run_whose_launcher_is_gone_says_how_to_continue(parashard, command):
    run_dir = begun("small-1")
    (run_dir / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    here = parashard(*command, "small-1")
    assert "resume" not in here.err, "a run that another launcher starts, elsewhere perhaps"
    lock = launcher_lock(run_dir)
    assert "resume" not in parashard(*command, "small-1").err
    os.close(lock)
    gone = parashard(*command, "small-1")
    assert (gone.exit_code, gone.err.count("\n")) == (here.exit_code, 1)
    assert gone.err.startswith("parashard: nobody answers")
    assert gone.err.endswith("; its `parashard run` is gone. Continue: parashard resume runs/small-1\n")


@pytest.mark.parametrize("command", [["scale", "--workers", "2"], ["checkpoint", "create"]], ids=" ".join)
def test_nobody_waits_for_a_run_that_is_over(parashard, command):
    Path("run").mkdir()
    Path("run", ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    Path("run", "report.json").write_text('{"state": "done", "reason": "every step is in"}')
    assert_refused(parashard(*command, "run"), "run is over (done: every step is in)")


# --- run, with the cluster played ---

REPORT = {
    "job": "small",
    "state": "done",
    "reason": "every step is in",
    "steps_total": 1400,
    "steps_applied": [1400, 1400],
    "skipped_steps": 0,
    "examples_per_s": 1234.5,
    "wall_s": 1.5,
    "training_loss": 0.2,
    "held_out": {"accuracy": 0.9712, "loss": 0.1, "mean_squared_error": 353.1234, "other": None},
    "staleness": {"p50": 0, "p95": 1, "max": 2},
    "step_lag": {"max": 3},
    "network": {"transfer_s": 2.0, "waited_s": 0.5, "overlapped_share": 0.75},
    "bytes": {
        "pushed": 3 << 20,
        "pushed_float32": 6 << 20,
        "pulled": 1 << 20,
        "pull_unmoved": 0,
        "saved_share": 0.4286,
    },
    "duplicate_pushes": 5,
    "worker_restarts": 1,
    "shard_restarts": 0,
    "coordinator_restarts": 2,
    "weights_sha256": "ab" * 32,
}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says how the next run ends."""

    def play(exit_code: int, report: dict[str, object], reason: str = "") -> None:
        monkeypatch.setattr(
            run_commands,
            "run_job",
            lambda loaded, folder, view, *, init, output, resume, from_checkpoint, tls_dir, trace: Outcome(
                exit_code, report, reason, folder
            ),
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
        "network time overlapped": "75 %",
        "traffic": "3.0 MiB pushed, 1.0 MiB pulled",
        "traffic saved by encoding": "43 %",
        "repeated gradients ignored": "5",
        "restarts": "1 worker, 2 coordinators",
        "weights": "with [/brackets]/weights.safetensors",
        "sha256": "abababababababab",
        "run": "with [/brackets]",
    }


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


def begun(name: str, *sets: str) -> Path:
    """Make a run directory as `parashard run --set ...` leaves it, newer than the others; return it."""
    folder = Path("runs", name).absolute()
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(as_toml(load_job("job.toml", [parse_set(text) for text in sets], {}).job))
    (folder / "origin.json").write_text(json.dumps({"job_file": str(Path("elsewhere/job.toml").absolute())}))
    number = int(name.rpartition("-")[2])
    for path in (folder / "job.toml", folder):
        os.utime(path, (number, number))
    return folder


def taken_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LoadedJob, Path]]:
    """Have runs end well at once; return the list that they are noted in."""
    taken: list[tuple[LoadedJob, Path]] = []

    def run(loaded: LoadedJob, folder: Path, _: object, *, resume: bool, **more: object) -> Outcome:
        assert resume
        taken.append((loaded, folder))
        return Outcome(ExitCode.DONE, REPORT, "", folder)

    monkeypatch.setattr(run_commands, "run_job", run)
    return taken


@pytest.mark.parametrize("flags", [["--log-format", "json"], []])
def test_a_worker_by_hand_logs_for_people_unless_it_is_told_otherwise(
    parashard: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    parashard("worker", "--connect", "host:1", *flags)
    ((*_, flag, form),) = started
    assert (flag, str(form)) == ("--log-format", "json" if flags else "text")


@pytest.mark.parametrize("flags", [["--trace"], []])
def test_a_worker_that_is_to_trace_is_told_so(
    parashard: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: started.append(words))
    parashard("worker", "--connect", "host:1", *flags)
    assert [[word for word in words if word == "--trace"] for words in started] == [flags]
