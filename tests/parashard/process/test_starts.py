"""Starts of services: their flags, what these are refused for, and that each is read back from its words."""

import socket
from pathlib import Path

import pytest

from parashard.process.addresses import PortRange
from parashard.process.shell import ExitCode, LogFormat
from parashard.process.starts import CoordinatorStart, ShardStart, Start, WorkerStart


def test_arguments_that_every_service_takes():
    found = Start.read([])
    assert (found.host, found.port, found.http_port, found.lifeline) == ("127.0.0.1", 0, 0, None)


STARTS = [
    Start(),
    CoordinatorStart(job=Path("job.toml"), run_dir=Path("runs/x")),
    CoordinatorStart(
        job=Path("job.toml"),
        run_dir=Path("/runs/x"),
        resume=True,
        callbacks="decide",
        callbacks_ahead=0,
        set=("cluster.shards=2", "job.seed=1"),
        linger_s=0.5,
        tls_dir=Path("/tls"),
    ),
    ShardStart(connect="runs/x", index=0),
    ShardStart(connect="[::1]:7000", index=3, advertise_data="proxy:7", trace="1", lifeline=9, insecure=True),
    ShardStart(connect="x:7", index=0, port=PortRange(7002, 7099), data_port=7001, http_port=PortRange(7002, 7099)),
    WorkerStart(connect="runs/x"),
    WorkerStart(
        connect="10.0.0.1:7000",
        name="worker-2",
        set=("data.path=/mnt/a b",),
        model_folder=Path("/models"),
        give_up_s=60.0,
        log_format=LogFormat.JSON,
        stopped_exit_code=75,
    ),
]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: type(start).__name__)
def test_a_start_is_read_back_from_its_words(start):
    assert type(start).read(start.words()) == start


def test_a_start_without_what_it_needs_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        ShardStart.read(["--connect", "runs/x"])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "--index" in capsys.readouterr().err


def test_the_host_auto_is_what_the_machines_own_name_stands_for(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-3")
    monkeypatch.setattr(socket, "gethostbyname", {"worker-3": "10.0.0.7"}.__getitem__)
    assert Start.read(["--host", "auto"]).host == "10.0.0.7"
    assert Start.read(["--host", "shard-0"]).host == "shard-0"


def test_a_machine_whose_own_name_stands_for_nothing_needs_another_host(monkeypatch, capsys):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "nameless")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_: unknown(name))
    with pytest.raises(SystemExit) as ended:
        Start.read(["--host", "auto"])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "'nameless' stands for no address" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "65536", "70000"])
def test_a_number_that_is_no_port_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        Start.read([f"--port={text}"])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["127.0.0.1:", ":7", "127.0.0.1:0", "127.0.0.1:70000", "host:-1"])
def test_an_address_that_cannot_be_connected_to_is_not_advertised(text, capsys):
    with pytest.raises(SystemExit) as ended:
        Start.read(["--advertise", text])
    assert ended.value.code == ExitCode.CONFIGURATION
    assert "to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["::1:7000", "[::1:7000", "fe80::1]:7000"])
def test_an_ipv6_address_without_brackets_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        Start.read(["--advertise", text])
    assert "is in brackets" in capsys.readouterr().err


def test_an_ipv6_address_in_brackets_is_advertised():
    assert Start.read(["--advertise", "[::1]:7000"]).advertise == "[::1]:7000"


@pytest.mark.parametrize("text", ["-1", "256"])
def test_a_number_that_is_no_exit_code_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        Start.read(["--stopped-exit-code", text])
    assert f"{text} is not an exit code: allowed are 0 to 255" in capsys.readouterr().err
