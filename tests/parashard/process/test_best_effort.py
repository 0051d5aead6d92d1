"""Writes that decide nothing: their failures are counted and told, and raise nothing (P21)."""

from __future__ import annotations

import ast
import errno
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.errors import StoreFailed
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import BestEffort, failed_writes, lossy, why_failed

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("parashard", "ps_server", "worker", "coordinator")


class Full(io.StringIO):
    """A stream on a disk that is full until a test makes room."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = OSError(errno.ENOSPC, "No space left on device")

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def fails(error: Exception) -> None:
    raise error


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_is_counted_and_reported_once_and_once_more_when_it_is_over() -> None:
    told: list[tuple[str, bool]] = []
    before = failed_writes().get("notes", 0)
    notes = BestEffort("notes", lambda *line: told.append(line))
    assert [notes.attempt(lambda: fails(NO_SPACE)) for _ in range(3)] == [False] * 3
    assert (notes.error, notes.failures) == ("no space left on device", 3)
    assert notes.attempt(lambda: None)
    assert notes.attempt(lambda: None)
    assert (notes.error, notes.failures, failed_writes()["notes"] - before) == ("", 0, 3)
    assert told == [
        ("notes cannot be written: no space left on device", False),
        ("notes are written again; 3 writes failed", True),
    ]


def test_a_failing_store_is_a_failure_and_a_bug_is_none() -> None:
    notes = BestEffort("notes", lambda text, over: None)
    assert not notes.attempt(lambda: fails(StoreFailed("s3://b: access denied")))
    assert notes.error == "s3://b: access denied"
    with pytest.raises(ZeroDivisionError):
        notes.attempt(lambda: fails(ZeroDivisionError()))


@pytest.mark.parametrize("error", [NO_SPACE, BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("closed file")])
def test_a_stream_that_takes_no_text_raises_nothing_and_says_later_what_it_lost(error: Exception) -> None:
    full = Full()
    full.error = error
    stream = lossy(full, "test lines")
    before = failed_writes().get("test lines", 0)
    assert stream.write("lost\n") == 5
    stream.write("lost, too\n")
    full.error = None
    stream.write("kept\n")
    stream.write("kept, too\n")
    assert full.getvalue() == "kept\nparashard: test lines are written again; 2 writes failed\nkept, too\n"
    assert failed_writes()["test lines"] - before == 2


def test_a_stream_is_wrapped_once_and_is_otherwise_what_it_was() -> None:
    stream = lossy(Full(), "test lines")
    assert lossy(stream, "test lines") is stream
    assert stream.isatty() is False


def test_retries_back_off_to_a_bound() -> None:
    assert [retry_pause_s(failures) for failures in (0, 1, 2, 3, 6, 10_000)] == [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]


def test_the_cause_is_reported_in_few_words() -> None:
    assert why_failed(OSError(errno.EIO, "whatever")) == "input/output error"
    assert why_failed(OSError("torn")) == "torn"
    assert why_failed(ValueError()) == "ValueError"


def exits(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the line of each `os._exit` in a file, and whether nothing before it in its function can keep it away."""
    text = path.read_text()
    if "os._exit(" not in text:
        return
    tree = ast.parse(text)
    sure: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            sure.update(it for last in node.finalbody for it in ast.walk(last) if isinstance(it, ast.stmt))
        elif isinstance(node, ast.FunctionDef):
            begins = node.body[1:2] if ast.get_docstring(node) else node.body[:1]
            sure.update(begins)
            sure.update(case.body[0] for first in begins if isinstance(first, ast.Match) for case in first.cases)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and ast.unparse(statement.value).startswith("os._exit("):
            yield statement.lineno, statement in sure


def test_whatever_gives_up_ends_its_process_though_its_last_words_fail() -> None:  # P21
    found = {
        f"{path.relative_to(ROOT)}:{line}": sure
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, sure in exits(path)
    }
    assert len(found) >= 6, "they are found"
    assert [place for place, sure in found.items() if not sure] == []
