"""The tests marked gpu, what matters most first: `python -m benchmarks.gpu.marked`.

Prints pytest's words to standard error, and a row of `benchmarks.gpu` for each process of tests and each failure. JAX'
tests have a process of their own: both it and PyTorch load cuBLAS and cuDNN, and PyTorch's calls fail where JAX was
first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.limited import ROOT
from benchmarks.gpu.rows import missing
from benchmarks.training import clean_up_when_ended

TABLE = "Tests marked gpu"
ORDER = ("tests/worker", "tests/ps_server", "tests/frameworks", "tests")
MARKED = re.compile(r"\bmark\.gpu\b|\bcupy_somewhere\b")  # the mark itself, or the fixture that has it
RESULT = re.compile(r"^=*\s*(\d+ (?:passed|failed|skipped|error|deselected).* in [\d.]+s)")


def files() -> list[str]:
    """Return the files that have such tests, in their order."""
    found = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARKED.search(path.read_text()))
    names = [str(path.relative_to(ROOT)) for path in found]
    return sorted(names, key=lambda name: next(i for i, folder in enumerate(ORDER) if name.startswith(f"{folder}/")))


def run(case: str, of: Sequence[str]) -> int:
    """Run the tests of some files, print rows, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-rfEs", "-m", "gpu", "-p", "no:cacheprovider", *of]
    result = "they did not end"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                name, _, why = line.partition(" ")[2].strip().partition(" - ")
                print(json.dumps(missing(TABLE, Path(name).name, why or "failed")), flush=True)
            if match := RESULT.match(line):
                result = match[1]
    print(json.dumps(missing(TABLE, case, result)), flush=True)
    return process.returncode


def main() -> None:
    """Run all, and end with 1 if one failed."""
    clean_up_when_ended()
    groups: dict[str, list[str]] = {"CuPy and PyTorch": [], "JAX": []}
    for name in files():
        groups["JAX" if "_jax_" in name else "CuPy and PyTorch"].append(name)
    sys.exit(any([run(case, of) for case, of in groups.items()]))


if __name__ == "__main__":
    main()
