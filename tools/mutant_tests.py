"""The files that are mutated, and the unit tests of each. Called by `tools/mutants.py` and `tools/mutant_runs.py`."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORES = (
    "coordinator/parashard_coordinator/core/*.py",
    "worker/parashard_worker/leased.py",
    "ps_server/parashard_server/core/*.py",
    "parashard/checkpoints/encoding.py",
    "parashard/checkpoints/manifest.py",
    "parashard/checkpoints/retention.py",
    "parashard/plan/intervals.py",
    "parashard/plan/partition.py",
    "parashard/plan/seeding.py",
    "parashard/plan/steps.py",
    "parashard/protocol/messages.py",
)
ROOTS = {"coordinator": "parashard_coordinator", "ps_server": "parashard_server", "worker": "parashard_worker"}


@cache
def core_files() -> tuple[str, ...]:
    """Return the paths of the files that are mutated."""
    files = {pattern: list(ROOT.glob(pattern)) for pattern in CORES}
    assert all(files.values()), f"no file: {[pattern for pattern, found in files.items() if not found]}"
    return tuple(sorted(str(path.relative_to(ROOT)) for found in files.values() for path in found))


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

    First, in the folder that mirrors the file's, those with the file's name in theirs; then the others there that
    import it directly or through a helper or core; then those of the same service that directly import a core of its
    folder.
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
