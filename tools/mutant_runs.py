"""Runs of mutants: each is a fork of this process, which has imported everything but our own packages.

`tools/mutants.py` chooses the mutants, and keeps their verdicts.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import math
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutant_tests import ROOT, ROOTS, module_of, tests_of
from mutations import Mutant

OUR_OWN_FAULT = 70  # exit code of a fork that failed before its tests
EXTRA_CPU_S = 5  # added to SLOWER times the tests' CPU time without a mutant; beyond that the mutant never ends
SLOWER = 4
UNMUTATED_CPU_S = 1200
MEMORY_BYTES_MAX = 12 << 30
WALL_TIMES = 20  # wall-clock limit over CPU limit, since other processes use the processors, too


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant: `by` is the first test that failed, or why none did."""

    killed: bool
    by: str
    cpu_s: float


class FailureReporter:
    """A plugin of pytest that writes the first failure, or with `times` each test's CPU time, into a pipe."""

    def __init__(self, pipe: int, *, times: bool) -> None:
        self._pipe, self._times = pipe, times
        self._before_s = time.process_time()

    def pytest_collection(self) -> None:
        """Draw the examples of `make test`, without shrinking one that fails."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), phases=phases, derandomize=True, database=None)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._pipe, report.nodeid.encode()[:500] + b"\n")
        elif self._times and report.when == "teardown":
            now_s = time.process_time()
            os.write(self._pipe, f"{report.nodeid.partition('::')[0]} {now_s - self._before_s:.3f}\n".encode())
            self._before_s = now_s

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._pipe, f"the import of {report.nodeid}\n".encode()[:500])


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a text in memory; its name and path are those of the file in the copy."""

    def __init__(self, module: str, path: Path, source: bytes) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def get_source(self, fullname: str) -> str:
        return self._source.decode()

    def is_package(self, fullname: str) -> bool:
        return False

    def get_filename(self, fullname: str) -> str:
        return str(self._path)


class Runner:
    """Runs mutants in forks of this process, over a copy of the tree.

    Parameters
    ----------
    copy : Path
        A folder for the copy of the tree.
    jobs : int
        Number of forks at a time.
    """

    def __init__(self, copy: Path, jobs: int) -> None:
        self._copy, self._jobs, self._scratch = copy, jobs, copy / "scratch"
        self._scratch.mkdir()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)

    def warm_up(self, tests: Sequence[str]) -> None:
        """Import the foreign modules that the tests import, so that every fork has them."""
        _, names, _ = self._ended(*self._fork([["--collect-only", *tests]], None, UNMUTATED_CPU_S, tell_modules=True))
        ours = ("parashard", *ROOTS.values(), "support", "conftest", "__main__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                if name.partition(".")[0] not in ours and not name.startswith("test_"):
                    with suppress(Exception):
                        importlib.import_module(name)
        gc.freeze()

    def measure(self, tests: Sequence[str]) -> dict[str, float]:
        """Run tests without a mutant, which must pass; return the CPU seconds of each test file."""
        code, told, _ = self._ended(*self._fork([tests], None, UNMUTATED_CPU_S, tell_times=True))
        if code:
            failed = [line for line in told if "::" in line]
            sys.exit(f"without any mutant the tests fail (exit code {code}): {failed or told}")
        taken_s = dict.fromkeys(tests, 0.0)
        for line in told:
            file, cpu_s = line.rsplit(" ", 1)
            taken_s[file] += float(cpu_s)
        return taken_s

    def run(self, mutants: Sequence[Mutant], cpu_s: Mapping[str, float]) -> Iterator[tuple[Mutant, Verdict]]:
        """Run mutants, given the CPU seconds of each test file; yield each with its verdict as soon as there is one."""
        waiting = list(reversed(mutants))
        running: dict[int, tuple[Mutant, int, float]] = {}  # pid -> mutant, pipe, deadline
        with selectors.DefaultSelector() as ends:
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    mutant = waiting.pop()
                    pid, pipe, deadline_s = self._start(mutant, cpu_s)
                    running[pid] = mutant, pipe, deadline_s
                    ends.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                next_s = min(deadline_s for _, _, deadline_s in running.values())
                ended = ends.select(max(0.0, next_s - time.monotonic()))
                late = {pid for pid, (_, _, deadline_s) in running.items() if deadline_s <= time.monotonic()}
                for pid in late:
                    os.kill(pid, signal.SIGKILL)
                for key, _ in ended:
                    pid = key.data
                    ends.unregister(key.fd)
                    os.close(key.fd)
                    mutant, pipe, _ = running.pop(pid)
                    yield mutant, self._verdict(pid, pipe)

    def _start(self, mutant: Mutant, cpu_s: Mapping[str, float]) -> tuple[int, int, float]:
        rounds = tests_of(mutant.path)
        limits_s = [EXTRA_CPU_S + SLOWER * sum(cpu_s[test] for test in tests) for tests in rounds]
        pid, pipe = self._fork(rounds, mutant, *limits_s)
        return pid, pipe, time.monotonic() + WALL_TIMES * sum(limits_s)

    def _verdict(self, pid: int, pipe: int) -> Verdict:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes of its tests would keep the pipe open
        code, told, cpu_s = self._ended(pid, pipe)
        if code < 0:
            return Verdict(True, f"{signal.Signals(-code).name} after {cpu_s:.0f} s", cpu_s)
        if code not in (0, 1, 2, 4) or bool(code) != bool(told):  # passed, failed, or not imported
            sys.exit(f"a run ended with {code}, which says nothing of its mutant: {told}")
        return Verdict(bool(code), told[0] if told else "", cpu_s)

    def _ended(self, pid: int, pipe: int) -> tuple[int, list[str], float]:
        """Return a fork's exit code (a signal as a negative number), its output, and its CPU time."""
        with open(pipe, "rb") as told:
            lines = told.read().decode().splitlines()
        _, status, used = os.wait4(pid, 0)
        shutil.rmtree(self._scratch / str(pid), ignore_errors=True)
        return os.waitstatus_to_exitcode(status), lines, round(used.ru_utime + used.ru_stime, 1)

    def _fork(
        self,
        rounds: Sequence[Sequence[str]],
        mutant: Mutant | None,
        *limits_s: float,
        tell_modules: bool = False,
        tell_times: bool = False,
    ) -> tuple[int, int]:
        """Fork a process that runs pytest with each of these arguments until a test fails, each within its limit.

        Returns its process ID, and the pipe for the first failure, or for the modules or times that are asked for.
        """
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            return pid, reader
        code = OUR_OWN_FAULT
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nowhere, fd)
            os.chdir(self._copy)
            sys.path[:0] = [str(self._copy), *(str(self._copy / root) for root in ROOTS)]
            if mutant is not None:
                source = mutant.applied_to((self._copy / mutant.path).read_bytes())
                sys.meta_path.insert(0, MutatedModule(module_of(mutant.path), self._copy / mutant.path, source))
            code = 0
            for arguments, limit_s in zip(rounds, limits_s, strict=True):
                if arguments and not code:
                    used_s = math.ceil(time.process_time() + limit_s)
                    resource.setrlimit(resource.RLIMIT_CPU, (used_s, resource.RLIM_INFINITY))
                    code = self._pytest(arguments, FailureReporter(writer, times=tell_times))
            if tell_modules:
                os.write(writer, "\n".join(sys.modules).encode())
        except BaseException as error:  # noqa: BLE001 (it ends with this function)
            os.write(writer, repr(error).encode()[:500])
        finally:
            os._exit(code)

    def _pytest(self, arguments: Sequence[str], told: FailureReporter) -> int:
        import pytest

        options = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        options += [f"--basetemp={self._scratch / str(os.getpid())}", "--rootdir", str(self._copy)]
        return int(pytest.main([*options, *arguments], plugins=[told]))
