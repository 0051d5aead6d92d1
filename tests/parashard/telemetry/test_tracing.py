"""Whether a process traces: only if it is told to, and then it must be able to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.process.extras import install
from parashard.process.starts import TRACE_VARIABLE, Start
from parashard.telemetry.tracing import tracing

ROOT = Path(__file__).resolve().parents[3]
MISSING = "import sys; sys.modules['opentelemetry.sdk'] = None; sys.argv = ['x', *sys.argv[1:]];"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


@pytest.mark.parametrize("off", ["", "0", "false", "no", "OFF"])
def test_a_process_does_not_trace_unless_it_is_told_to(off: str) -> None:
    with tracing(off, "shard", "shard-0") as tracer:
        assert tracer is None


@pytest.mark.parametrize("on", ["1", "true", "Yes", "on"])
def test_a_process_that_is_told_to_traces(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with tracing(on, "shard", "shard-0") as tracer:
        assert tracer is not None


def test_what_is_neither_yes_nor_no_is_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"PARASHARD_TRACE: found 'maybe'; allowed: 1, true, yes, on; 0, false"),
        tracing("maybe", "shard", "shard-0"),
    ):
        pass


def test_the_flag_or_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    assert Start.read([]).trace == ""
    assert Start.read(["--trace"]).trace == "1"
    monkeypatch.setenv(TRACE_VARIABLE, "yes")
    assert Start.read([]).trace == "yes"


@pytest.mark.parametrize(
    ("service", "more"),
    [("worker", []), ("server", ["--index", "0"]), ("coordinator", ["--job", "x.toml", "--run-dir", "x"])],
)
def test_without_the_packages_a_service_says_which_to_install(service: str, more: list[str]) -> None:
    connect = [] if service == "coordinator" else ["--connect", "127.0.0.1:1"]
    done = run(f"{MISSING} from parashard_{service}.__main__ import main; sys.exit(main())", *connect, *more, "--trace")
    assert done.returncode == 2
    assert f"is not installed: {install('otel')}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_word_in_the_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "maybe")
    done = run("import sys; from parashard_worker.__main__ import main; sys.exit(main())", "--connect", "127.0.0.1:1")
    assert done.returncode == 2
    assert "parashard worker: environment PARASHARD_TRACE: found 'maybe'; allowed: 1, true" in done.stderr
    assert "Traceback" not in done.stderr
