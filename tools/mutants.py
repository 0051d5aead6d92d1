"""Run mutants of the pure cores against their unit tests: a mutant that no test fails on is a hole in the tests.

    python tools/mutants.py                      a sample of all cores; what an earlier run has told is not run again
    python tools/mutants.py --only leases.py     every mutant of one file
    python tools/mutants.py --write              and write benchmarks/results/mutants.md

A mutant is killed by the first test that fails, or by taking far longer than the tests do. Survivors must be in
`tools/equivalent_mutants.toml`, each with the reason why no test can tell it from the original.

Each mutant is a fork of one process that has imported pytest and everything else that is not ours: that is tenths of a
second before its first test. The fork imports our packages from a copy of the tree, and the mutated file from memory,
so nothing is ever written into a tree that somebody works in. mutmut and cosmic-ray run a command for each mutant
(seconds of imports here, for hundreds of mutants), and take one test command for a project, where each of our files
has tests of its own.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import math
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".mutants" / "verdicts.json"
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
TABLE = ROOT / "benchmarks" / "results" / "mutants.md"
CORES = (
    "coordinator/parashard_coordinator/core/*.py",
    "worker/parashard_worker/leased.py",
    "ps_server/parashard_server/core/*.py",
    "parashard/checkpoints/encoding.py",
    "parashard/checkpoints/manifest.py",
    "parashard/checkpoints/retention.py",
    "parashard/plan/intervals.py",
    "parashard/plan/partition.py",
    "parashard/plan/permutation.py",
    "parashard/plan/steps.py",
    "parashard/protocol/buffers.py",
    "parashard/security/shares.py",
    "parashard/transports/weight_memory.py",
)
ROOTS = {"coordinator": "parashard_coordinator", "ps_server": "parashard_server", "worker": "parashard_worker"}
KILLED_MIN = 0.95
OUR_OWN_FAULT = 70  # the exit code of a fork that has not come as far as its tests
EXTRA_CPU_S = 5  # beside SLOWER times what the tests take with no mutant; then the mutant never ends
SLOWER = 4
UNMUTATED_CPU_S = 1200
MEMORY_BYTES_MAX = 12 << 30
WALL_TIMES = 20  # as much of the clock, where other processes want the processors too

# --- which tests are whose ---


@cache
def core_files() -> tuple[str, ...]:
    """Return the paths of the files that are mutated."""
    return tuple(sorted(str(path.relative_to(ROOT)) for pattern in CORES for path in ROOT.glob(pattern)))


@cache
def imported_by(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports at its top."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{name.name}" for name in node.names)
    return frozenset(names)


@cache
def module_files() -> dict[str, Path]:
    """Return the files of the cores and of the tests' helpers, by their dotted names."""
    helpers = {f"support.{path.stem}": path for path in (ROOT / "tests/support").glob("*.py")}
    return {module_of(path): ROOT / path for path in core_files()} | helpers


def module_of(path: str) -> str:
    """Return the dotted name of a file of ours."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] in ROOTS else parts)


def reaches(test: Path, module: str) -> bool:
    """Return whether a test imports a module: itself, or by helpers and other cores."""
    seen: set[str] = set()
    left = [test]
    while left:
        names = imported_by(left.pop())
        if module in names:
            return True
        left += [module_files()[name] for name in names - seen if name in module_files()]
        seen |= names
    return False


@cache
def tests_of(path: str) -> tuple[tuple[str, ...], ...]:
    """Return the unit tests of a file, in the order in which they are run.

    First those of the folder that mirrors the file's with the file's name in theirs; then the others there that import
    it, or a helper or core that does; then those of the same service that import a core of its folder themselves.
    """
    parts = Path(path).with_suffix("").parts
    folder = ROOT / "tests" / Path(*(part for part in parts[:-1] if part not in ROOTS.values()))
    module = module_of(path)
    beside = {module_of(other) for other in core_files() if Path(other).parent == Path(path).parent}
    named: list[str] = []
    near: list[str] = []
    far: list[str] = []
    for test in sorted((ROOT / "tests" / parts[0]).rglob("test_*.py")):
        name = str(test.relative_to(ROOT))
        if test.parent == folder:
            if reaches(test, module):
                (named if parts[-1] in test.stem else near).append(name)
        elif parts[0] in ROOTS and imported_by(test) & beside:
            far.append(name)
    return tuple(named), tuple(near), tuple(far)


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of the contents of files."""
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()[:16]


# --- one mutant ---


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `by` is the first test that failed, or why there was none."""

    killed: bool
    by: str
    cpu_s: float


class Told:
    """A plugin of pytest that writes the first failure into a pipe, or with `times` what each test takes."""

    def __init__(self, pipe: int, *, times: bool) -> None:
        self._pipe, self._times = pipe, times
        self._before_s = time.process_time()

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
        How many run at once.
    """

    def __init__(self, copy: Path, jobs: int) -> None:
        self._copy, self._jobs, self._scratch = copy, jobs, copy / "scratch"
        self._scratch.mkdir()
        self._cpu_s: dict[str, float] = {}  # what each file of tests takes with no mutant
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
        """Import what the tests import and is not ours, so that every fork has it."""
        _, names, _ = self._ended(*self._fork([["--collect-only", *tests]], None, UNMUTATED_CPU_S, tell_modules=True))
        ours = ("parashard", *ROOTS.values(), "support", "conftest", "__main__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                if name.partition(".")[0] not in ours and not name.startswith("test_"):
                    with suppress(Exception):
                        importlib.import_module(name)
        gc.freeze()

    def measure(self, tests: Sequence[str], kept: Kept) -> None:
        """Run tests with no mutant: they must pass, and tell how long a mutant may take."""
        unknown = [test for test in tests if kept.cpu_s(test) is None]
        if unknown:
            code, told, _ = self._ended(*self._fork([unknown], None, UNMUTATED_CPU_S, tell_times=True))
            if code:
                failed = [line for line in told if "::" in line]
                sys.exit(f"without any mutant the tests fail (exit code {code}): {failed or told}")
            taken_s = dict.fromkeys(unknown, 0.0)
            for line in told:
                file, cpu_s = line.rsplit(" ", 1)
                taken_s[file] += float(cpu_s)
            kept.keep_times(taken_s)
        self._cpu_s = {test: kept.cpu_s(test) or 0.0 for test in tests}

    def run(self, mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, Verdict]]:
        """Run mutants; yield each with its verdict as soon as there is one."""
        waiting = list(reversed(mutants))
        running: dict[int, tuple[Mutant, int, float]] = {}  # pid -> its mutant, what it wrote, and its deadline
        with selectors.DefaultSelector() as ends:
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    mutant = waiting.pop()
                    pid, pipe, deadline_s = self._start(mutant)
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

    def _start(self, mutant: Mutant) -> tuple[int, int, float]:
        rounds = tests_of(mutant.path)
        limits_s = [EXTRA_CPU_S + SLOWER * sum(self._cpu_s[test] for test in tests) for tests in rounds]
        pid, pipe = self._fork(rounds, mutant, *limits_s)
        return pid, pipe, time.monotonic() + WALL_TIMES * sum(limits_s)

    def _verdict(self, pid: int, pipe: int) -> Verdict:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests started, and would keep the pipe open
        code, told, cpu_s = self._ended(pid, pipe)
        if code < 0:
            return Verdict(True, f"{signal.Signals(-code).name} after {cpu_s:.0f} s", cpu_s)
        if code not in (0, 1, 2, 4) or bool(code) != bool(told):  # passed, failed, or not imported
            sys.exit(f"a run ended with {code}, which says nothing of its mutant: {told}")
        return Verdict(bool(code), told[0] if told else "", cpu_s)

    def _ended(self, pid: int, pipe: int) -> tuple[int, list[str], float]:
        """Return a fork's exit code (a signal as a negative number), what it wrote, and its processor time."""
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

        Returns its number and the pipe in which it tells the first failure, or what else is asked for.
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
                    code = self._pytest(arguments, Told(writer, times=tell_times))
            if tell_modules:
                os.write(writer, "\n".join(sys.modules).encode())
        except BaseException as error:  # noqa: BLE001 (it ends with this function)
            os.write(writer, repr(error).encode()[:500])
        finally:
            os._exit(code)

    def _pytest(self, arguments: Sequence[str], told: Told) -> int:
        import pytest
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)  # the smallest example that fails is of no interest here
        settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
        settings.load_profile("mutants")
        options = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        options += [f"--basetemp={self._scratch / str(os.getpid())}", "--rootdir", str(self._copy)]
        return int(pytest.main([*options, *arguments], plugins=[told]))


# --- a sample of them ---


def all_mutants(only: str) -> list[Mutant]:
    """Return the mutants of all cores, or of those files whose path has `only` in it."""
    return [m for path in core_files() if only in path for m in mutants_of(path, (ROOT / path).read_text())]


def identity(mutant: Mutant) -> str:
    """Return the name of a mutant among those of all files."""
    return f"{mutant.path}: {mutant.name}"


def sampled(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return `size` mutants, drawn by their names: a change of the code changes few of the others drawn."""
    drawn = sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {identity(m)}".encode()).digest())[:size]
    return sorted(drawn, key=lambda m: (m.path, m.begin, m.name))


def equivalent() -> dict[str, str]:
    """Return the reasons why mutants are equivalent, by the mutants' names."""
    listed = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    return {f"{path}: {one['mutant']}": one["reason"] for path, many in listed.items() for one in many}


class Kept:
    """Verdicts of earlier runs, as far as they still hold, and what tests take with no mutant.

    One that was killed stays killed while its file is the same; a survivor is run again when a test has changed.
    """

    def __init__(self) -> None:
        told = json.loads(KEPT.read_text()) if KEPT.exists() else {"verdicts": {}, "times": {}}
        self._verdicts: dict[str, dict[str, Any]] = told["verdicts"]
        self._times: dict[str, tuple[str, float]] = told["times"]

    def verdict(self, mutant: Mutant) -> Verdict | None:
        """Return what is known of a mutant, if it still holds."""
        entry = self._verdicts.get(identity(mutant))
        if entry is None or entry["file"] != _file_digest(mutant.path):
            return None
        if not entry["verdict"]["killed"] and entry["tests"] != _tests_digest(mutant.path):
            return None
        return Verdict(**entry["verdict"])

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        """Keep a verdict, on disk too."""
        digests = {"file": _file_digest(mutant.path), "tests": _tests_digest(mutant.path)}
        self._verdicts[identity(mutant)] = {**digests, "verdict": asdict(verdict)}
        self._write()

    def cpu_s(self, test: str) -> float | None:
        """Return what a file of tests takes with no mutant, if it passed and neither it nor a core has changed."""
        digest, cpu_s = self._times.get(test, ("", None))
        return cpu_s if digest == _unmutated_digest(test) else None

    def keep_times(self, taken_s: dict[str, float]) -> None:
        """Keep what tests that passed take, on disk too."""
        self._times |= {test: (_unmutated_digest(test), round(cpu_s, 3)) for test, cpu_s in taken_s.items()}
        self._write()

    def _write(self) -> None:
        KEPT.parent.mkdir(exist_ok=True)
        fresh = KEPT.with_suffix(".new")
        fresh.write_text(json.dumps({"verdicts": self._verdicts, "times": self._times}, indent=1))
        fresh.replace(KEPT)


@cache
def _unmutated_digest(test: str) -> str:
    helpers = sorted((ROOT / "tests/support").glob("*.py"))
    return digest_of([ROOT / test, *helpers, *(ROOT / path for path in core_files())])


@cache
def _file_digest(path: str) -> str:
    return digest_of([ROOT / path])


@cache
def _tests_digest(path: str) -> str:
    tests = [ROOT / test for tests in tests_of(path) for test in tests]
    return digest_of([*tests, *sorted((ROOT / "tests/support").glob("*.py"))])


def main() -> None:
    """Run a sample, tell what survived, and end with 1 where that is too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=320, help="how many mutants to draw (320)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at once (1)")
    parser.add_argument("--only", default="", help="all mutants of the files with this text in their path; no sample")
    parser.add_argument("--write", action="store_true", help="write the table of results")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    asked = parser.parse_args()
    everything = all_mutants(asked.only)
    mutants = everything if asked.only else sampled(everything, asked.sample, asked.seed)
    if asked.list:
        print("\n".join(map(identity, mutants)))
        return
    kept, reasons = Kept(), equivalent()
    verdicts = {identity(m): verdict for m in mutants if (verdict := kept.verdict(m)) is not None}
    left = [m for m in mutants if identity(m) not in verdicts]
    for m in left:
        _tests_digest(m.path)  # of the tests that are run, whatever happens to them meanwhile
    print(f"{len(mutants)} of {len(everything)} mutants; {len(verdicts)} are known, {len(left)} are run", flush=True)
    if left:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for plugins takes longer than most tests
        with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
            runner = Runner(Path(copy), asked.jobs)
            tests = sorted({test for m in left for tests in tests_of(m.path) for test in tests})
            runner.warm_up(tests)
            runner.measure(tests, kept)
            for number, (mutant, verdict) in enumerate(runner.run(left), 1):
                verdicts[identity(mutant)] = verdict
                kept.keep(mutant, verdict)
                what = f"killed by {verdict.by}" if verdict.killed else "SURVIVED"
                print(f"{number}/{len(left)} {verdict.cpu_s:.1f} s {identity(mutant)}: {what}", flush=True)
    survivors = [m for m in mutants if not verdicts[identity(m)].killed]
    killed = len(mutants) - len(survivors)
    unexplained = [m for m in survivors if identity(m) not in reasons]
    stale = sorted(set(reasons) - set(map(identity, all_mutants("")))) if not asked.only else []
    wrong = sorted(name for name, verdict in verdicts.items() if verdict.killed and name in reasons)
    print(f"\nkilled {killed} of {len(mutants)} ({killed / len(mutants):.1%})")
    for m in survivors:
        print(f"  {m.path}:{m.line} {m.name}: {reasons.get(identity(m), 'NO REASON IS LISTED')}")
    for name in stale:
        print(f"  listed as equivalent, and no such mutant: {name}")
    for name in wrong:
        print(f"  listed as equivalent, and killed: {name}")
    if asked.write and not asked.only:
        TABLE.write_text(table(asked, everything, mutants, verdicts, reasons))
    if unexplained or stale or wrong or killed < KILLED_MIN * len(mutants):
        sys.exit(1)


def table(
    asked: argparse.Namespace,
    everything: Sequence[Mutant],
    mutants: Sequence[Mutant],
    verdicts: dict[str, Verdict],
    reasons: dict[str, str],
) -> str:
    """Return the results as Markdown: how many of which kind and file were killed, and every survivor."""
    survivors = [m for m in mutants if not verdicts[identity(m)].killed]
    killed = len(mutants) - len(survivors)
    lines = [
        f"`make mutants`: seed {asked.seed}, {len(mutants)} of {len(everything):,} mutants drawn, {killed} killed "
        f"({killed / len(mutants):.1%}), {len(survivors)} survived. `tools/mutants.py` says how.",
        "",
        "## Killed, by what was changed",
        "",
        "| change | mutants | drawn | killed |",
        "| --- | --- | --- | --- |",
        *_rows([m.kind for m in everything], [m.kind for m in mutants], [m.kind for m in survivors]),
        "",
        "## Killed, by file",
        "",
        "| file | mutants | drawn | killed |",
        "| --- | --- | --- | --- |",
        *_rows([m.path for m in everything], [m.path for m in mutants], [m.path for m in survivors]),
        "",
        "## Survivors",
        "",
        "| file | mutant | why no test can tell |",
        "| --- | --- | --- |",
    ]
    for m in survivors:
        name = m.name.replace("|", "\\|")
        lines.append(f"| {m.path} | {name} | {reasons.get(identity(m), 'NO REASON IS LISTED')} |")
    return "\n".join(lines) + "\n"


def _rows(everything: Sequence[str], drawn: Sequence[str], survived: Sequence[str]) -> list[str]:
    return [
        f"| {what} | {everything.count(what)} | {drawn.count(what)} | {drawn.count(what) - survived.count(what)} |"
        for what in sorted(set(everything))
    ]


if __name__ == "__main__":
    main()
