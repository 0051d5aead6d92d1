"""render slurm: what is in the script, and what it does, with commands of Slurm that only note how they are called."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.render.slurm import render_slurm
from support.small_job import SMALL_JOB
from support.waiting import DEADLINE_S, eventually

LINES_MAX = 120
SLURM = {
    "squeue": "for word; do case $word in --name=*) cat ${word#*=} ;; --jobs=*) cat state; echo >>asked ;; esac; done",
    "sbatch": 'echo sbatch "$@" >>calls',
    "scancel": 'echo scancel "$@" >>calls',
    "scontrol": 'echo scontrol "$@" >>calls; echo COMPLETING >state; kill -TERM "$PPID"',
    "sleep": "",
}
"""State is in files of the working directory: tasks by the jobs' names, a task's state; `calls` has the rest."""
PROCESS = (
    "trap 'echo saved >>calls; exit 75' TERM; echo started >>calls; for i in {1..3000}; do read -rt 0.02 <>pause; done"
)
"""A process that saves when it is asked to end; it ends by itself after a minute."""


class Script:
    """A rendered script in a folder with such commands."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.file = folder / "slurm-small.sh"
        self.file.write_text(text)
        self.name = (
            next(line for line in text.splitlines() if line.startswith("NAME=")).split()[0].removeprefix("NAME=")
        )
        for command, does in SLURM.items():
            self.command(command, does)
        self.command("process", PROCESS)
        os.mkfifo(folder / "pause")
        (folder / "owners").mkdir()
        (folder / "state").write_text("RUNNING")
        for role in ("coordinator", "shard", "worker"):
            self.queue(role, "")
        self.environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def command(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def queue(self, role: str, tasks: str) -> None:
        (self.folder / f"{self.name}-{role}").write_text(tasks)

    def run(self, *words: str) -> list[str]:
        """Run a command of the script; return which of Slurm's it called since the last time."""
        command = ["bash", str(self.file), *words]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert ran.returncode == 0, ran.stderr
        called = self.calls()
        (self.folder / "calls").unlink(missing_ok=True)
        return called

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def render(tmp_path) -> Callable[..., str]:
    """Return a function that renders the job with some keys set."""
    job = tmp_path / "small.toml"
    job.write_text(SMALL_JOB)

    def rendered(*sets: str, **options: object) -> str:
        loaded = load_job(job, [parse_set(text) for text in sets], environ={})
        given = {"file": "slurm-small.sh", "run_dir": tmp_path, "sets": sets, **options}
        return render_slurm(loaded, **given)

    return rendered


@pytest.fixture
def script(render, tmp_path) -> Script:
    sets = ("cluster.insecure=true", "cluster.shards=2", "cluster.workers=3")
    process = str(tmp_path / "bin" / "process")
    return Script(tmp_path, render(*sets, python=process, server_options="-p safe", worker_options="-p spot"))


def assigned(text: str, name: str) -> list[str]:
    """Return the words that a line of the script gives a variable, as bash reads them."""
    printed = subprocess.run(
        ["bash", "-c", f"{next(line for line in text.splitlines() if line.startswith(f'{name}='))}\n"
         f'printf "%s\\n" "${{{name}[@]}}"'],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    return printed.stdout.splitlines()


def test_the_script_is_short_and_bash_reads_it(render):
    text = render()
    assert len(text.splitlines()) <= LINES_MAX
    subprocess.run(["bash", "-n"], input=text, text=True, timeout=DEADLINE_S, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: THE SCRIPT FOR SLURM IS NOT CHECKED")
def test_shellcheck_finds_nothing(render):
    ran = subprocess.run(
        ["shellcheck", "-"], input=render(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.stdout == ""


def test_values_reach_the_script_whatever_is_in_them(render):
    odd = Path("/it's a folder/$HOME")
    text = render(
        'job.name="small"', run_dir=odd, python="/opt/my python", worker_options="--gres=gpu:1 --comment='two words'"
    )
    assert assigned(text, "RUN") == [str(odd)]
    assert assigned(text, "PYTHON") == ["/opt/my python"]
    assert assigned(text, "WORKER_OPTIONS") == ["--gres=gpu:1", "--comment=two words"]
    assert 'job.name="small"' in assigned(text, "JOB")
    assert assigned(text, "JOB")[-2:] == ["--set", "cluster.launcher=external"]


def test_a_relative_path_is_of_the_folder_where_render_runs(render, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    csv = 'data={source="csv", path="part.csv", label="y"}'
    sets = assigned(render(csv, "checkpoint.url=kept", "job.seed=7", run_dir=Path("/run")), "JOB")[4:]
    loaded = load_job(tmp_path / "small.toml", [parse_set(text) for text in sets if text != "--set"], environ={}).job
    monkeypatch.chdir("/")
    again = load_job(tmp_path / "small.toml", [parse_set(text) for text in sets if text != "--set"], environ={}).job
    assert again == loaded
    assert (loaded.data.path, loaded.checkpoint.url, loaded.job.seed) == (tmp_path / "part.csv", f"{tmp_path}/kept", 7)


def test_slurm_warns_a_task_in_time_for_it_to_save(render):
    assert "#SBATCH --signal=B:TERM@60\n" in render()
    assert "#SBATCH --signal=B:TERM@95\n" in render("cluster.grace_s=90")


def test_processes_listen_where_the_job_says(render):
    assert assigned(render(), "HOST") == ["auto"]
    assert assigned(render("cluster.interface=ib0"), "HOST") == ["interface:ib0"]
    assert assigned(render(), "PORTS") == ["0"]
    assert assigned(render('cluster.port="7000-7099"'), "PORTS") == ["7000-7099"]


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("cluster.host=10.1.0.7", r"cluster.host: found 10.1.0.7; allowed on Slurm: auto"),
        ("cluster.port=7000", r"cluster.port: found 7000; allowed on Slurm: unset, or a range"),
        (
            "checkpoint.url=memory://x",
            r"checkpoint.url: found memory://x; allowed on Slurm: .* a folder that all ",
        ),
    ],
)
def test_what_several_processes_cannot_share_is_refused(render, key, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        render(key)


def test_another_run_of_the_job_has_jobs_of_other_names(render, tmp_path):
    assert assigned(render(), "NAME") != assigned(render(run_dir=tmp_path / "other"), "NAME")


def test_a_template_of_ones_own_is_filled(render, tmp_path):
    own = tmp_path / "own.sh"
    own.write_text("#!/bin/bash\nexec mine @{shards} --run @{run} ${@}\n")
    assert render("cluster.shards=5", own_template=own) == f"#!/bin/bash\nexec mine 5 --run {tmp_path} ${{@}}\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"worker_options": "--comment='open"}, r"flag --worker-options: found .* \(No closing quotation\); allowed: "),
        ({"worker_options": "gpu"}, r"flag --worker-options: found 'gpu', which belongs to no option; allowed: "),
        ({"server_options": "--mem=4G x"}, r"flag --server-options: found 'x', which belongs to no option; allowed: "),
        ({"server_options": "-pcpu x"}, r"flag --server-options: found 'x', which belongs to no option; allowed: "),
        ({"server_options": "--hold x"}, r"flag --server-options: found 'x', which belongs to no option; allowed: "),
        ({"server_options": "--"}, r"flag --server-options: found '--', which belongs to no option; allowed: "),
        ({"server_options": "-- x"}, r"flag --server-options: found '--', which belongs to no option; allowed: "),
        ({"worker_options": "-Wa0-3"}, r"flag --worker-options: found '-Wa0-3'; allowed: -W and each other option by "),
        ({"worker_options": "-HJmine"}, r"flag --worker-options: found '-HJmine'; allowed: -H and each other option"),
        ({"worker_options": "-vvv"}, r"flag --worker-options: found '-vvv'; allowed: -v and each other option by "),
        ({"worker_options": "-t 9 -p"}, r"flag --worker-options: found '-p' at the end; allowed: -p VALUE"),
        ({"worker_options": "--mem"}, r"flag --worker-options: found '--mem' at the end; allowed: --mem VALUE"),
        ({"own_template": Path("/not/there")}, r"flag --template: /not/there cannot be read: No such file"),
    ],
)
def test_mistakes_are_told_with_what_is_allowed(render, options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        render(**options)


@pytest.mark.parametrize("flag", ["--server-options", "--worker-options"])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--array=0-3", "--array"),
        ("-p spot --array 0-3", "--array"),
        ("-a0-3", "--array"),
        ("--job-name=mine", "--job-name"),
        ("-J mine", "--job-name"),
        ("--chdir=/tmp", "--chdir"),
        ("-D /tmp", "--chdir"),
        ("--output=/dev/null", "--output"),
        ("-o out.log", "--output"),
        ("--dependency=singleton", "--dependency"),
        ("-d singleton", "--dependency"),
        ("--requeue", "--requeue"),
        ("--no-requeue", "--no-requeue"),
        ("--signal=USR1@10", "--signal"),
        ("--arra=0-3", "--array"),
        ("--sig USR1@10", "--signal"),
        ("--open-mode=truncate", "--open-mode"),
        ("--wrap=rm", "--wrap"),
        ("-H '-a 0-3'", "--array"),
    ],
)
def test_an_option_that_is_the_scripts_own_is_refused(render, flag, words, option):
    with pytest.raises(ConfigurationError, match=f"^flag {flag}: found .*; {option} is the script's own; allowed: "):
        render(**{flag[2:].replace("-", "_"): words})


def test_options_that_resemble_those_of_the_script_are_taken(render):
    words = ["-A", "mine", "-p", "a-J", "--error=a-D.log", "--no-kill", "--comment", "-a b"]
    assert assigned(render(worker_options=shlex.join(words)), "WORKER_OPTIONS") == words


@pytest.mark.parametrize("last", ["-W", "--hold", "--exclusive", "--no-k", "--nice", "-N2"])
def test_an_option_that_takes_no_value_may_be_the_last(render, last):
    assert assigned(render(worker_options=f"-p spot {last}"), "WORKER_OPTIONS") == ["-p", "spot", last]


@pytest.mark.parametrize("found", ["@{partition}", "@{run-dir}", "@{run.x}", "@{}", "@{run"])
def test_a_placeholder_without_a_value_is_told_with_its_line(render, tmp_path, found):
    own = tmp_path / "own.sh"
    own.write_text(f"#!/bin/bash\nexec mine x{found}\n")
    with pytest.raises(ConfigurationError, match=rf"own.sh:2: found {re.escape(found)}; allowed: @\{{name\}}, "):
        render(own_template=own)


def test_an_empty_template_is_refused(render, tmp_path):
    own = tmp_path / "own.sh"
    own.write_text("\n")
    with pytest.raises(ConfigurationError, match=r"flag --template: .*own.sh is empty; allowed: a script"):
        render(own_template=own)


def test_up_submits_an_array_for_each_role_and_then_only_what_is_missing(script):
    script.command("sbatch", f"{SLURM['sbatch']}; echo 0 7_0 >{script.name}-coordinator")
    coordinator, shards, workers = map(shlex.split, script.run("up"))
    assert {"--array=0", f"--job-name={script.name}-coordinator", "safe"} < set(coordinator)
    assert {"--array=0,1", "--dependency=after:7_0", "--output=logs/shard-%a.log", "safe"} < set(shards)
    assert {"--array=0,1,2", "--dependency=after:7_0", "spot"} < set(workers)
    assert workers[-3:] == [str(script.file), "task", "worker"]

    script.queue("shard", "0 8_0\n1 8_1\n")
    script.queue("worker", "2 9_2\n0 9_0\n")
    (missing,) = script.run("up")
    assert "--array=1" in missing.split()


def test_up_cancels_none_of_the_workers_that_scale_has_added(script):
    for role, tasks in (("coordinator", 1), ("shard", 2), ("worker", 8)):
        script.queue(role, "".join(f"{task} 9_{task}\n" for task in range(tasks) if (role, task) != ("worker", 1)))
    (missing,) = script.run("up")
    assert "--array=1" in missing.split()


def test_scale_submits_what_is_missing_and_cancels_what_is_above(script):
    script.queue("coordinator", "0 7_0\n")
    script.queue("worker", "0 9_0\n2 9_2\n10 9_10\n")
    submitted, cancelled = script.run("scale", "2")
    assert "--array=1" in submitted.split()
    assert cancelled == "scancel 9_2 9_10"
    assert script.run("scale", "0") == ["scancel 9_0 9_2 9_10"]


def test_scale_before_up_is_refused(script):
    command = ["bash", str(script.file), "scale", "2"]
    ran = subprocess.run(
        command, cwd=script.folder, env=script.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (ran.returncode, script.calls()) == (2, [])
    assert ran.stderr == f"found no coordinator; first: {script.file} up\n"


def test_scale_says_nothing_of_the_coordinator_where_the_queue_cannot_be_read(script):
    script.command("squeue", "echo unreachable >&2; exit 1")
    command = ["bash", str(script.file), "scale", "2"]
    ran = subprocess.run(
        command, cwd=script.folder, env=script.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (ran.returncode, script.calls(), ran.stderr) == (1, [], "unreachable\n")


@pytest.mark.parametrize("words", [["scale"], ["scale", "3x"], ["scale", "-1"], ["scale", "9" * 20], ["grow"], []])
def test_a_mistaken_command_gets_the_usage_and_calls_nothing(script, words):
    command = ["bash", str(script.file), *words]
    ran = subprocess.run(
        command, cwd=script.folder, env=script.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (ran.returncode, script.calls()) == (2, [])
    assert ran.stderr.startswith("The job small on Slurm, "), ran.stderr
    assert "scale 8    have 8 workers" in ran.stderr


def test_down_cancels_the_workers_first_and_the_coordinator_last(script):
    for role, task in (("coordinator", "0 7_0\n"), ("shard", "0 8_0\n1 8_1\n"), ("worker", "1 9_1\n")):
        script.queue(role, task)
    assert script.run("down") == ["scancel 9_1", "scancel 8_0 8_1", "scancel 7_0"]


@pytest.fixture
def task(script, popen) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a task as Slurm does; what it started ends with the test."""

    groups: list[int] = []

    def start(role: str = "worker", restarts: int = 0) -> subprocess.Popen[str]:
        slurm = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(restarts)}
        command, environ = ["bash", str(script.file), "task", role], script.environ | slurm
        running = popen(command, cwd=script.folder, env=environ, start_new_session=True)
        groups.append(running.pid)
        return running

    yield start
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture
def running(script, task) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a worker's task, and waits until its process runs."""

    def start(restarts: int = 0) -> subprocess.Popen[str]:
        started = task(restarts=restarts)
        eventually(lambda: script.calls().count("started") == restarts + 1, "its process runs")
        return started

    return start


def test_a_task_that_is_asked_to_leave_saves_asks_once_to_be_queued_again_and_never_ends_with_0(script, running):
    task = running()
    task.send_signal(signal.SIGTERM)
    assert task.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "saved", "scontrol requeue 9_3"]  # though that sent the signal again


def test_a_task_stays_until_slurm_has_taken_it_back_though_it_could_not_be_queued_again(script, running):
    script.command("scontrol", 'echo scontrol >>calls; kill -TERM "$PPID"')
    task, asked = running(), script.folder / "asked"
    task.send_signal(signal.SIGTERM)
    eventually(lambda: asked.exists() and len(asked.read_text()) > 3, "it has asked again and again")
    assert task.poll() is None
    (script.folder / "state").write_text("COMPLETING")
    assert task.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "saved", "scontrol"]


def test_a_request_that_slurm_does_not_take_is_made_again(script, running):
    script.command("scontrol", "echo scontrol >>calls; mkdir tried || { echo COMPLETING >state; exit 0; }; exit 1")
    task = running()
    task.send_signal(signal.SIGTERM)
    assert task.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "saved", "scontrol", "scontrol"]


def test_a_task_whose_state_slurm_did_not_tell_asks_again_and_is_queued(script, running):
    script.command("squeue", f"mkdir busy || exec_it=1; [ $exec_it ] || exit 1; {SLURM['squeue']}")
    task = running()
    task.send_signal(signal.SIGTERM)
    assert task.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "saved", "scontrol requeue 9_3"]


def test_a_task_that_is_cancelled_saves_and_does_not_ask_to_come_back(script, running):
    task = running()
    (script.folder / "state").write_text("COMPLETING")
    task.send_signal(signal.SIGTERM)
    assert task.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "saved"]


def test_the_older_copy_of_a_task_asks_for_nothing(script, running):
    older, later = running(), running(restarts=1)
    older.send_signal(signal.SIGTERM)  # a node that was lost is back, and ends what it finds there
    assert older.wait(DEADLINE_S) == 143
    assert script.calls() == ["started", "started", "saved"]
    later.send_signal(signal.SIGTERM)
    assert later.wait(DEADLINE_S) == 143
    assert script.calls()[3:] == ["saved", "scontrol requeue 9_3"]


def test_a_process_that_fails_is_started_again_but_not_by_the_older_copy_of_its_task(script, running):
    script.command("process", "echo started >>calls; until [ -e fails ]; do read -rt 0.02 <>pause; done; exit 75")
    older, later = running(), running(restarts=1)
    (script.folder / "fails").touch()
    assert older.wait(DEADLINE_S) == 3
    assert later.wait(DEADLINE_S) == 75
    assert script.calls() == ["started"] * 21  # one by the older copy, and as many as there may be


@pytest.mark.parametrize("code", [0, 2, 4])
def test_a_task_ends_with_the_job(script, task, code):
    script.command("process", f"echo started >>calls; exit {code}")
    assert task().wait(DEADLINE_S) == code
    assert script.calls() == ["started"]


def test_a_task_of_a_job_that_is_done_starts_nothing(script, task):
    (script.folder / "report.json").write_text('{\n  "state": "done"\n}\n')
    assert task().wait(DEADLINE_S) == 0
    assert script.calls() == []


def test_a_run_that_is_done_is_not_brought_up_again(script):
    (script.folder / "report.json").write_text('{\n  "state": "done"\n}\n')
    assert script.run("up") == []


def test_when_the_coordinator_has_ended_nobody_waits_in_the_queue(script, task):
    script.command("process", "exit 1")  # the job has failed
    script.queue("worker", "0 9_0\n")
    script.queue("shard", "1 8_1\n")
    assert task("coordinator").wait(DEADLINE_S) == 1
    assert script.calls() == ["scancel 9_0", "scancel 8_1"]
