"""A user's mistake is one line on standard error and exit code 2, never a traceback."""

import json
import sys
from pathlib import Path

import pytest

from parashard.display.live import JobView
from parashard.process.shell import ExitCode
from support.command_line import assert_refused, begun
from support.small_job import SMALL_JOB

MISTAKES = {
    "unknown key": (["--set", "job.epoch=3"], ["job.epoch", "unknown key", "did you mean job.epochs?"]),
    "unknown table": (["--set", "checkpoints.every_s=3"], ["checkpoints", "unknown key", "did you mean checkpoint?"]),
    "wrong type": (["--set", "job.epochs=two"], ["--set", "job.epochs", '"two"', "an integer"]),
    "text that looks like a number": (["--set", 'job.epochs="2"'], ["job.epochs", "an integer"]),
    "out of range": (["--set", "job.batch_size=0"], ["job.batch_size", "0", ">"]),
    "model of the tests": (
        ["--set", "model.kind=legder"],
        ["allowed: softmax, mlp, cnn, wide_deep, fm, deepfm, dlrm, module:factory\n"],
    ),
    "unknown kind": (["--set", "optimizer.kind=adamax"], ["optimizer.kind", "adamax", "adamw"]),
    "--set without =": (["--set", "job.epochs"], ["--set", "key.path=value"]),
    "--set without a key": (["--set", "=3"], ["--set", "key.path=value"]),
    "--set below a value": (["--set", "job.epochs.more=3"], ["job.epochs", "no table"]),
    "a key of a thousand parts": (["--set", f"{'a.' * 1000}a=1"], ["--set", "2,001 characters"]),
    "a NUL in a URL": (["--set", 'checkpoint.url="s3://a\\u0000b"'], ["checkpoint.url", "NUL"]),
    "bad consistency": (["--consistency", "sometimes"], ["--consistency", "sometimes", "ssp:"]),
    "consistency without a bound": (["--consistency", "ssp"], ["--consistency", "ssp:"]),
    "consistency with a bad bound": (["--consistency", "sync:0"], ["--consistency", "sync:0"]),
    "no shards": (["--shards", "0"], ["--shards", "cluster.shards", "0"]),
    "bad device": (["--device", "tpu"], ["--device", "tpu", "cpu"]),
    "a key by its flag and by --set": (
        ["--shards", "2", "--set", "cluster.shards=3"],
        ["found --shards and --set cluster.shards; allowed: one of the two"],
    ),
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


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("ssh:", "local, ssh:HOSTFILE, ray, ray:HOST:PORT, ray:auto, ray:local, external or kubernetes"),
        ("ray:http://h:10", 'cluster.launcher: found "ray:http://h:10"; allowed: local'),
        ("ray::", 'cluster.launcher: found "ray::"; allowed: local'),
        ("slurm", "flag --on: cluster.launcher"),
        ("ssh:nowhere", "nowhere: No such file or directory"),
    ],
)
def test_places_that_are_none_are_refused(parashard, on, says):
    assert_refused(parashard("run", "job.toml", "--on", on), says)


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

    class View(JobView):
        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(f"parashard.cli.{command}.open_view", lambda _, **__: View())
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


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "job.toml", "--shards", "two"], ["walk"], ["run", "job.toml", "--fast"], ["scale"]]
)
def test_usage_errors_are_exit_code_2_too(parashard, arguments):
    ran = parashard(*arguments)
    assert (ran.exit_code, ran.out) == (ExitCode.CONFIGURATION, "")
    assert "Traceback" not in ran.err


def test_a_run_directory_with_too_long_a_name_is_refused(parashard):
    assert_refused(parashard("run", "job.toml", "--run-dir", "l" * 300), "run directory", "too long")
