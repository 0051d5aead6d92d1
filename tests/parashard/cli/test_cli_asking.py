"""Commands that ask a coordinator: which run they mean, and what they say when it is over or does not answer."""

import json
import os
from pathlib import Path

import pytest

from parashard.launch.run_folders import launcher_lock
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import ADDRESS_FILE
from support.command_line import REPORT, assert_refused, begun


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"]], ids=lambda command: command[0])
@pytest.mark.parametrize("where", ["nowhere", "localhost", "localhost:port", "localhost:99999"])
def test_a_place_that_is_no_coordinator_is_refused(parashard, command, where):
    assert_refused(parashard(*command, where), where, "neither a run directory nor host:port")


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"]], ids=lambda command: command[0])
def test_without_a_run_there_is_no_coordinator_to_ask(parashard, command):
    assert_refused(parashard(*command), "no run directory under runs/")


ASKING = [["doctor"], ["status"], ["scale", "--workers", "2"], ["checkpoint", "create"]]


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_folder_that_is_no_run_is_refused(parashard, command):
    Path("folder").mkdir()
    assert_refused(parashard(*command, "folder"), "there is no run in the folder folder", "job.toml", ADDRESS_FILE)


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_folder_with_a_job_file_of_its_users_is_no_run(parashard, command):
    assert_refused(parashard(*command, "."), "there is no run in the folder .", "a job.toml alone is no run")


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_run_without_a_coordinator_yet_may_be_asked_later(parashard, command):
    begun("small-1")
    ran = parashard(*command, "small-1")
    assert ran.exit_code == ExitCode.RETRY
    assert f"no coordinator has written runs/small-1/{ADDRESS_FILE} yet" in ran.err
    assert "within 0 s" not in ran.err


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
        (["doctor", "small-1"], "runs/small-1 is over (done: every step is in)"),
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


@pytest.mark.parametrize("command", [["status"], ["scale", "--workers", "2"], ["checkpoint", "create"]], ids=" ".join)
def test_a_run_whose_coordinator_is_silent_is_in_progress_or_says_how_to_continue(parashard, command, monkeypatch):
    monkeypatch.setattr("parashard.cli.checkpoint.AWAY_S", 0.0)
    run_dir = begun("small-1")
    (run_dir / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    here = parashard(*command, "small-1")
    assert "resume" not in here.err, "a run that another launcher starts, elsewhere perhaps"
    lock = launcher_lock(run_dir)
    silent = parashard(*command, "small-1")
    assert f"the run is in progress: process {os.getpid()}, which started it, restarts a coordinator that" in silent.err
    assert "resume" not in silent.err
    os.close(lock)
    gone = parashard(*command, "small-1")
    assert (gone.exit_code, gone.err.count("\n")) == (here.exit_code, 1)
    assert gone.err.startswith("parashard: no answer")
    assert gone.err.endswith("; its `parashard run` is gone. Continue: parashard resume runs/small-1\n")


@pytest.mark.parametrize("command", [["scale", "--workers", "2"], ["checkpoint", "create"]], ids=" ".join)
def test_a_run_that_is_over_is_not_waited_for(parashard, command):
    Path("run").mkdir()
    Path("run", ADDRESS_FILE).write_text('{"address": "127.0.0.1:1"}')
    Path("run", "report.json").write_text('{"state": "done", "reason": "every step is in"}')
    assert_refused(parashard(*command, "run"), "run is over (done: every step is in)")
