"""Run mutants of the pure cores against their unit tests: a mutant that no test fails on is a hole in the tests.

    python tools/mutants.py                      a sample of all cores; what an earlier run has told is not run again
    python tools/mutants.py --only leases.py     every mutant of one file
    python tools/mutants.py --write              and write benchmarks/results/mutants.md

A mutant is killed by the first test that fails, or by taking far longer than the tests do. Survivors must be in
`tools/equivalent_mutants.toml`, each with the reason why no test can tell it from the original.

Each mutant is a fork of one process that has imported pytest and everything else that is not ours: that is tenths of a
second before its first test. The fork imports our packages from a copy of the tree, and the mutated file from memory,
so nothing is ever written into the working tree. Why not a kept tool: cosmic-ray runs a command for each
mutant, which here is seconds of imports; mutmut 3 forks too, but first runs all tests to learn which reach a function,
so that a job of whole processes would vouch for a core, and leaves what is outside of functions alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mutant_runs import Runner, Verdict
from mutant_tests import ROOT, core_files, digest_of, tests_of
from mutations import Mutant, mutants_of

KEPT = ROOT / ".mutants" / "verdicts.json"
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
TABLE = ROOT / "benchmarks" / "results" / "mutants.md"
KILLED_MIN = 0.95


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
    """Verdicts of earlier runs that are still valid, and the CPU times of tests without a mutant.

    A killed mutant stays killed while its file is the same; a survivor is run again when a test has changed.
    """

    def __init__(self) -> None:
        told = json.loads(KEPT.read_text()) if KEPT.exists() else {"verdicts": {}, "times": {}}
        self._verdicts: dict[str, dict[str, Any]] = told["verdicts"]
        self._times: dict[str, tuple[str, float]] = told["times"]

    def verdict(self, mutant: Mutant) -> Verdict | None:
        """Return the verdict on a mutant if it is still valid, else None."""
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
        """Return the CPU time of a test file without a mutant, if it passed and neither it nor a core has changed."""
        digest, cpu_s = self._times.get(test, ("", None))
        return cpu_s if digest == _unmutated_digest(test) else None

    def keep_times(self, taken_s: dict[str, float]) -> None:
        """Keep the CPU times of tests that passed, on disk too."""
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
    """Run a sample, report the survivors, and exit with 1 if there are too many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=320, help="number of mutants to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants to run at once (default: %(default)s)")
    parser.add_argument(
        "--only", default="", help="run every mutant of the files with this text in their path, instead of a sample"
    )
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
        _tests_digest(m.path)  # cached now: the tests may be edited during the run
    print(f"{len(mutants)} of {len(everything)} mutants; {len(verdicts)} are known, {len(left)} are run", flush=True)
    if left:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # looking for plugins takes longer than most tests
        with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
            runner = Runner(Path(copy), asked.jobs)
            tests = sorted({test for m in left for tests in tests_of(m.path) for test in tests})
            runner.warm_up(tests)
            if unknown := [test for test in tests if kept.cpu_s(test) is None]:
                kept.keep_times(runner.measure(unknown))
            cpu_s = {test: kept.cpu_s(test) or 0.0 for test in tests}
            for number, (mutant, verdict) in enumerate(runner.run(left, cpu_s), 1):
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
        "Survivors of this seed have been answered with tests: its rate is a floor that is kept, no estimate for all "
        "mutants. `python tools/mutants.py --seed N` draws others.",
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
