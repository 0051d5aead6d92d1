"""The shell around a service: exit codes by what the starter must do, one line for an error, signals, the lifeline."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from parashard import errors
from parashard.errors import ParashardError
from parashard.launch.local_cluster import LOG_TAIL_BYTES
from parashard.process.shell import FILES_WANTED, ExitCode, Stop, exit_code_of

PRELUDE = """
import sys
from parashard import errors
from parashard.launch.local_cluster import LOG_TAIL_BYTES
from parashard.process.shell import ExitCode, run_service
lifeline = int(sys.argv[1]) if len(sys.argv) > 1 else None
"""
DEADLINE_S = 30.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(popen: Start) -> Start:
    """Return a function that runs a service, given as its source, in a process of its own."""

    def run(serve: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        program = f"{PRELUDE}\n{serve}\nsys.exit(run_service('shard-0', lifeline, serve))"
        return popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )

    return run


WAIT = (
    "def serve(stop):\n    print('up', flush=True)\n    stop.wait(60)\n    print(stop.reason)\n    return ExitCode.DONE"
)


def test_exit_codes_are_what_starters_and_orchestrators_rely_on():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "CONFIGURATION": 2,
        "FENCED": 3,
        "JOB_FAILED": 4,
        "IO_ERROR": 74,
        "RETRY": 75,
    }


@pytest.mark.parametrize("letter", ["x", "\N{WHITE SUN WITH RAYS}"], ids=["ASCII", "Unicode"])
def test_a_long_error_is_told_so_that_the_launcher_reads_its_beginning(start, letter):
    says = f"raise errors.BadData('table.csv: row 7: found ' + {letter!r} * 50_000)"
    process = start(f"def serve(stop):\n    {says}")
    line = process.communicate(timeout=DEADLINE_S)[1].splitlines()[-1]
    assert line.startswith(f"parashard shard-0: table.csv: row 7: found {letter}")
    assert len(line.encode()) < LOG_TAIL_BYTES


@pytest.mark.parametrize("kind", ParashardError.leaves(), ids=lambda kind: kind.__name__)
def test_every_error_ends_a_process_as_its_group_says(kind):
    expected = ExitCode.FAILED
    for group, code in (
        (errors.ConfigurationError, ExitCode.CONFIGURATION),
        (errors.Fenced, ExitCode.FENCED),
        (errors.RetryLater, ExitCode.RETRY),
    ):
        if issubclass(kind, group):
            expected = code
    assert exit_code_of(kind("why")) is expected


def test_the_first_reason_to_stop_stays():
    stop = Stop()
    assert (stop.asked, stop.reason, stop.wait(0.0)) == (False, "", False)
    stop.ask("SIGTERM")
    stop.ask("SIGINT")
    assert (stop.asked, stop.reason, stop.wait(0.0)) == (True, "SIGTERM", True)


def test_an_error_is_one_line_at_the_end_of_standard_error_and_an_exit_code(start):
    process = start("def serve(stop):\n    raise errors.BadData('x.npz is torn')")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.CONFIGURATION
    assert said.splitlines()[-1] == "parashard shard-0: x.npz is torn"
    assert "Traceback" not in said


@pytest.mark.parametrize("allowed", [FILES_WANTED - 1000, FILES_WANTED + 1000])
def test_a_service_may_open_as_many_files_as_its_ports_may_have_connections(start, allowed):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < allowed:
        pytest.skip(f"a process may have only {hard} files here")
    lower = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({allowed}, {hard}))"
    tell = "    print(resource.getrlimit(resource.RLIMIT_NOFILE))\n    return ExitCode.DONE"
    said, _ = start(f"{lower}\ndef serve(stop):\n{tell}").communicate(timeout=DEADLINE_S)
    assert said.strip() == str((max(allowed, FILES_WANTED), hard))


def test_a_service_of_a_failed_job_says_that_a_restart_is_useless(start):
    process = start("def serve(stop):\n    raise errors.JobFailed('the job has failed: NaN')")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.JOB_FAILED
    assert said.splitlines()[-1] == "parashard shard-0: the job has failed: NaN"


def test_a_bug_is_a_traceback_and_exit_code_1(start):
    process = start("def serve(stop):\n    raise ZeroDivisionError")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.FAILED
    assert "ZeroDivisionError" in said.splitlines()[-1]


def test_a_bug_ends_the_process_though_a_thread_waits_for_ever(popen):
    program = f"""{PRELUDE}
import threading
from parashard.launch.local_cluster import LOG_TAIL_BYTES
from parashard.process.shell import end_process
def serve(stop):
    threading.Thread(target=threading.Event().wait).start()
    raise ZeroDivisionError
end_process(run_service('worker-0', lifeline, serve))"""
    process = popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.FAILED
    assert "ZeroDivisionError" in said.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_asks_the_service_to_end(start, number):
    process = start(WAIT)
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (ExitCode.DONE, f"{number.name}\n")


STOPPED_WITH_75 = "import functools\nrun_service = functools.partial(run_service, stopped_exit_code=75)\n"


@pytest.mark.parametrize("serve", [WAIT, WAIT.replace("return ExitCode.DONE", "raise errors.NotReady('waiting')")])
def test_a_service_that_was_asked_to_end_says_so_with_the_exit_code_it_was_given(start, serve):
    process = start(STOPPED_WITH_75 + serve)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 75


@pytest.mark.parametrize(("code", "expected"), [("DONE", 0), ("FAILED", 1), ("CONFIGURATION", 2)])
def test_that_exit_code_is_of_no_other_end(start, code, expected):
    assert start(f"{STOPPED_WITH_75}def serve(stop):\n    return ExitCode.{code}").wait(DEADLINE_S) == expected


def test_a_closed_lifeline_ends_the_process_at_once(start):
    read, write = os.pipe()
    try:
        process = start(WAIT, str(read), pass_fds=(read,))
        assert process.stdout.readline() == "up\n"
    finally:
        os.close(read)
        os.close(write)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (ExitCode.RETRY, "")


def test_a_thread_that_dies_takes_the_process_with_it(start):
    process = start(
        "import threading\n"
        "def broken():\n    raise ZeroDivisionError\n"
        "def serve(stop):\n    threading.Thread(target=broken).start()\n    stop.wait(60)\n    return ExitCode.DONE"
    )
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.FAILED
    assert "thread-died" in said
    assert "ZeroDivisionError" in said


def test_logs_are_structured_lines_on_standard_error(start):
    process = start(
        "from parashard.process.logs import log\n"
        "def serve(stop):\n"
        "    log.info('serving', address='127.0.0.1:7', partitions=3)\n"
        "    log.debug('too much')\n"
        "    return ExitCode.DONE"
    )
    said, logged = process.communicate(timeout=DEADLINE_S)
    assert said == ""
    (line,) = logged.splitlines()
    assert line.startswith("timestamp=2")
    assert "level=info event=serving" in line
    assert "address=127.0.0.1:7 partitions=3" in line
