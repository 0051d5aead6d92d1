"""A program in its own process, under a time limit: its output, and the reason why that is incomplete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
END_S = 5.0  # for a program over its limit to end its own processes
WHY_MAX = 240  # characters


class Found(NamedTuple):
    """The output of a program."""

    lines: list[dict[str, Any]]  # the JSON objects that it has printed
    why: str = ""  # why it printed no more; empty if it ended well


@contextmanager
def bytecode_kept() -> Iterator[None]:
    """Let programs write bytecode to a temporary folder within the block, if the environment forbids to write any.

    Otherwise each would compile all of PyTorch, if that is installed without bytecode.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
            os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)
        yield


def run(module: str, words: Sequence[str], limit_s: float) -> Found:
    """Run a module of this folder in its own folder for at most `limit_s`; its processes end with it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", f"{__package__}.{module}", *words]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as printed,  # files: a process that outlives the program holds up no pipe
        tempfile.TemporaryFile("w+") as said,
    ):
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=printed, stderr=said, start_new_session=True
        )
        try:
            why = f"ended with {code}" if (code := process.wait(limit_s)) else ""
        except subprocess.TimeoutExpired:
            why = f"over its limit of {limit_s:.0f} s"
        finally:
            _end(process)
        return Found(_objects(_text(printed)), f"{why}: {_last_line(_text(said))}"[:WHY_MAX] if why else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # a run ends its processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _objects(printed: str) -> list[dict[str, Any]]:
    found = []
    for line in printed.splitlines():
        with suppress(ValueError):
            value = json.loads(line)
            found += [value] if isinstance(value, dict) else []
    return found


def _last_line(said: str) -> str:
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
