"""Machine code: loaded by later processes from a folder of this user alone, never stale, else compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.process import cached_code
from parashard.process.cached_code import Loop, Vector, inlined, private_folder

CALLER = "def scaled(values):\n    for at in range(len(values)):\n        values[at] = rule(values[at])\n"
RULE = "def rule(value):\n    return value * {factor}\n"
VALUES = Vector("float64")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder in which the folder of code is; both are empty."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "base"))
    cached_code.environment.cache_clear()
    yield tmp_path / "base"
    cached_code.environment.cache_clear()


def loop_of(folder: Path, factor: int = 2, **constants: Any) -> Loop:
    """Return a loop as a new process declares it, which calls a rule of another file."""
    rule, caller = folder / "rule.py", folder / "caller.py"
    for file, text in {rule: RULE.format(factor=factor), caller: CALLER}.items():
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
    made: dict[str, Any] = {"__name__": cached_code.__name__, **constants}
    exec(compile(rule.read_text(), str(rule), "exec"), made)
    made["rule"] = inlined(made["rule"])
    exec(compile(caller.read_text(), str(caller), "exec"), made)
    return Loop(made["scaled"], VALUES, sources=[rule])


def run(loop: Loop, factor: int = 2) -> bool:
    """Assert that a loop does what its text says, and return whether its code was loaded."""
    values = np.arange(3.0)
    loop(values)
    assert values.tolist() == [0, factor, 2 * factor]
    stats = loop.code.stats  # type: ignore[attr-defined]
    return bool(stats.cache_hits)


def test_a_later_process_loads_what_an_earlier_one_compiled(tmp_path: Path, base: Path) -> None:
    assert [run(loop_of(tmp_path)) for _ in range(3)] == [False, True, True]
    assert (base / "parashard-numba").stat().st_mode & 0o777 == 0o700


def test_code_of_a_changed_rule_is_not_loaded(tmp_path: Path) -> None:
    assert [run(loop_of(tmp_path, factor), factor) for factor in (2, 3, 2, 3)] == [False, False, True, True]


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "the CPU": lambda patch: patch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another"),
    "Numba": lambda patch: patch.setattr("numba.__version__", "another"),
    "LLVM": lambda patch: patch.setattr("llvmlite.__version__", "another"),
    "NumPy": lambda patch: patch.setattr("numpy.__version__", "another"),
    "Python": lambda patch: patch.setattr("sys.version", "another"),
    "a setting of Numba's": lambda patch: patch.setenv("NUMBA_OPT", "1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_is_compiled_again_when_what_it_depends_on_changes(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loop_of(tmp_path)._folder()
    CHANGES[change](monkeypatch)
    cached_code.environment.cache_clear()
    assert loop_of(tmp_path)._folder() != before is not None


def test_a_number_and_the_kind_of_an_argument_are_among_it(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)
    others = [loop_of(tmp_path, LARGEST=np.float32(1.0)), Loop(loop.function, Vector("float32"))]
    assert len({one._folder() for one in (loop, *others)}) == 3


def divided(values):  # type: ignore[no-untyped-def]
    values[0] = 1.0 / values[0]


def test_code_of_another_way_to_compile_is_not_loaded(tmp_path: Path) -> None:
    text = Path(cached_code.__file__).read_text()
    (other := tmp_path / "other_way.py").write_text(text.replace('error_model="numpy"', 'error_model="python"'))
    spec = importlib.util.spec_from_file_location("other_way", other)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(other_way := importlib.util.module_from_spec(spec))
    Loop(divided, VALUES)(np.zeros(1))
    with pytest.raises(ZeroDivisionError):
        other_way.Loop(divided, VALUES)(np.zeros(1))


def _link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def _file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


UNSAFE: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "its group may write": lambda folder, _: folder.chmod(0o720),
    "all may write": lambda folder, _: folder.chmod(0o702),
    "a link": lambda folder, _: _link(folder),
    "a file": lambda folder, _: _file(folder),
    "of another user": lambda _, patch: patch.setattr(os, "geteuid", lambda: os.getuid() + 1),
    "read-only": lambda _, patch: patch.setattr(os, "access", lambda *_: False),
}


@pytest.mark.parametrize("fault", UNSAFE)
def test_no_code_is_loaded_or_kept_where_another_user_may_write(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(loop_of(tmp_path, 5), 5)
    other = tmp_path / "empty"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(other))
    folder = private_folder()
    assert folder is not None
    UNSAFE[fault](folder, monkeypatch)
    assert private_folder() is None
    assert [run(loop_of(tmp_path)) for _ in range(2)] == [False, False]
    assert not any(path.suffix in (".nbi", ".nbc") for path in other.rglob("*"))


def test_without_numbas_variable_code_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert private_folder() == tmp_path / "cache" / "parashard-numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert private_folder() == tmp_path / ".cache" / "parashard-numba"


def test_numbas_setting_of_other_places_keeps_code_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_LOCATOR_CLASSES", "InTreeCacheLocator")
    assert [run(loop_of(tmp_path)) for _ in range(2)] == [False, False]


@pytest.mark.parametrize("damage", ["empty", "cut", "of zeros", "unwritable"])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_damaged_files_are_replaced(suffix: str, damage: str, tmp_path: Path) -> None:
    run(loop_of(tmp_path))
    folder = private_folder()
    assert folder is not None
    (kept,) = folder.rglob(f"*{suffix}")
    content = kept.read_bytes()
    if damage == "unwritable":
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "of zeros": bytes(len(content))}[damage])
    assert [run(loop_of(tmp_path)) for _ in range(3)][-1]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from test_cached_code import loop_of, run
folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
replace, calls = os.replace, []
def replaced(*paths):
    calls.append(paths)
    if len(calls) == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = replaced
print("go", flush=True)
sys.stdin.readline()
run(loop_of(folder))
"""


def test_processes_that_write_at_once_or_are_killed_while_they_write_leave_no_broken_cache(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    (own := tmp_path / "texts").mkdir()
    loop_of(own)  # writes the texts, which the others find
    started = []
    for killed_at in (1, 2, 0):  # before the index is in place, before the code is; not at all
        command = [sys.executable, "-c", PROGRAM, str(own), str(killed_at)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append((killed_at, subprocess.Popen(command, env=environ, **pipes)))
    for _, process in started:
        assert process.stdout.readline() == b"go\n"
    for _, process in started:
        process.stdin.write(b"\n")
        process.stdin.flush()
    ends = [process.wait(60) for _, process in started]
    for _, process in started:
        process.stdin.close()
        process.stdout.close()
    assert all(code in (0, -9) for code in ends)
    assert ends[2:] == [0]
    assert [run(loop_of(tmp_path / "texts")) for _ in range(2)] == [True, True]
