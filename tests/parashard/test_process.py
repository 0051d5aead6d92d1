"""The shell around a service: exit codes by what the starter must do, one line for an error, signals, the lifeline."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from parashard import errors
from parashard.errors import ConfigurationError, ParashardError
from parashard.process import (
    ExitCode,
    Stop,
    credentials_of,
    exit_code_of,
    port,
    service_arguments,
    told_address,
    write_address,
)
from parashard.security.identity import Role

PRELUDE = """
import sys
from parashard import errors
from parashard.process import ExitCode, run_service
lifeline = int(sys.argv[1]) if len(sys.argv) > 1 else None
"""
DEADLINE_S = 30.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that runs a service, given as its source, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(serve: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"{PRELUDE}\n{serve}\nsys.exit(run_service('shard-0', lifeline, serve))",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


WAIT = (
    "def serve(stop):\n    print('up', flush=True)\n    stop.wait(60)\n    print(stop.reason)\n    return ExitCode.DONE"
)


def test_exit_codes_are_what_starters_and_orchestrators_rely_on():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "CONFIGURATION": 2,
        "FENCED": 3,
        "RETRY": 75,
    }


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


def test_arguments_that_every_service_takes():
    found = service_arguments("A service.").parse_args([])
    assert (found.host, found.port, found.http_port, found.lifeline) == ("127.0.0.1", 0, 0, None)


def test_the_host_auto_is_what_the_machines_own_name_stands_for(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-3")
    monkeypatch.setattr(socket, "gethostbyname", {"worker-3": "10.0.0.7"}.__getitem__)
    assert service_arguments("A service.").parse_args(["--host", "auto"]).host == "10.0.0.7"
    assert service_arguments("A service.").parse_args(["--host", "shard-0"]).host == "shard-0"


def test_a_machine_whose_own_name_stands_for_nothing_needs_another_host(monkeypatch, capsys):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nameless")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(SystemExit) as ended:
        service_arguments("A service.").parse_args(["--host", "auto"])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "'nameless' stands for no IPv4 address" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "65536", "70000"])
def test_a_number_that_is_no_port_is_refused(text, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="0 to 65535"):
        port(text)
    with pytest.raises(SystemExit) as ended:
        service_arguments("A service.").parse_args([f"--port={text}"])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "0 to 65535" in capsys.readouterr().err


def test_a_service_tells_where_it_listens_unless_another_address_leads_there(tmp_path):
    parser, file = service_arguments("A service."), tmp_path / "shard-0.json"
    assert told_address(parser.parse_args([]), "127.0.0.1:4000") == "127.0.0.1:4000"
    assert list(tmp_path.iterdir()) == []
    found = parser.parse_args(["--advertise", "proxy:7", "--address-file", str(file)])
    assert told_address(found, "127.0.0.1:4000") == "proxy:7"
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:4000", "data_address": ""}
    told_address(found, "127.0.0.1:4000", "127.0.0.1:4001")
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:4000", "data_address": "127.0.0.1:4001"}


def test_an_address_file_is_replaced_whole(tmp_path):
    file = tmp_path / "coordinator.json"
    write_address(file, {"address": "127.0.0.1:1", "pid": 7})
    with file.open() as reader:
        write_address(file, {"address": "127.0.0.1:2"})
        assert json.load(reader) == {"address": "127.0.0.1:1", "pid": 7}
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:2"}
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigurationError, match=r"none/x\.json cannot be written: No such file"):
        write_address(tmp_path / "none" / "x.json", {"address": "127.0.0.1:2"})


@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.0.1:", ":7", "127.0.0.1:0", "127.0.0.1:70000", "host:-1"])
def test_an_address_that_nobody_could_connect_to_is_not_advertised(text, capsys):
    with pytest.raises(SystemExit) as ended:
        service_arguments("A service.").parse_args(["--advertise", text])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "to 65535" in capsys.readouterr().err


def test_an_error_is_one_line_at_the_end_of_standard_error_and_an_exit_code(start):
    process = start("def serve(stop):\n    raise errors.BadData('x.npz is torn')")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.CONFIGURATION
    assert said.splitlines()[-1] == "parashard shard-0: x.npz is torn"
    assert "Traceback" not in said


def test_a_bug_is_a_traceback_and_exit_code_1(start):
    process = start("def serve(stop):\n    raise ZeroDivisionError")
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


@pytest.mark.parametrize("text", ["-1", "256"])
def test_a_number_that_is_no_exit_code_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        service_arguments("A shard.").parse_args(["--stopped-exit-code", text])
    assert f"{text} is not an exit code: allowed are 0 to 255" in capsys.readouterr().err


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
        "import structlog\n"
        "def serve(stop):\n"
        "    structlog.get_logger().info('serving', address='127.0.0.1:7', partitions=3)\n"
        "    structlog.get_logger().debug('too much')\n"
        "    return ExitCode.DONE"
    )
    said, logged = process.communicate(timeout=DEADLINE_S)
    assert said == ""
    (line,) = logged.splitlines()
    assert line.startswith("timestamp=2")
    assert "level=info event=serving" in line
    assert "address=127.0.0.1:7 partitions=3" in line


class TestWhereItListens:
    """Off loopback only with credentials, or where it is spelled out that everybody may come."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_on_loopback_without_more(self, host):
        assert credentials_of(service_arguments("x").parse_args(["--host", host]), Role.SHARD) is None

    @pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "fe80::1"])
    def test_elsewhere_not_without_credentials(self, host):
        with pytest.raises(ConfigurationError, match=f"host '{host}' is off loopback, and there are no credentials; "):
            credentials_of(service_arguments("x").parse_args(["--host", host]), Role.SHARD)

    def test_elsewhere_with_insecure(self):
        assert (
            credentials_of(service_arguments("x").parse_args(["--host", "10.0.0.1", "--insecure"]), Role.SHARD) is None
        )

    def test_elsewhere_with_credentials_of_the_right_role(self, certificates):
        folder = str(certificates.folder(Role.SHARD))
        arguments = service_arguments("x").parse_args(["--host", "10.0.0.1", "--tls-dir", folder])
        assert str(credentials_of(arguments, Role.SHARD).folder) == folder
        with pytest.raises(ConfigurationError, match="this process is a coordinator"):
            credentials_of(arguments, Role.COORDINATOR)

    def test_the_environment_names_the_folder_unless_the_command_line_does(self, monkeypatch, certificates):
        monkeypatch.setenv("PARASHARD_TLS_DIR", "/nowhere")
        with pytest.raises(ConfigurationError, match=r"/nowhere/ca\.pem: No such file"):
            credentials_of(service_arguments("x").parse_args([]), Role.SHARD)
        given = service_arguments("x").parse_args(["--tls-dir", str(certificates.folder(Role.SHARD))])
        assert credentials_of(given, Role.SHARD)
        monkeypatch.setenv("PARASHARD_TLS_DIR", "")
        assert credentials_of(service_arguments("x").parse_args([]), Role.SHARD) is None
