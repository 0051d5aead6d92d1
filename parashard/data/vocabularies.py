"""Vocabularies of columns: files with the texts that a column is known to have, one a line.

Owns their reading and what a line may be. Knows no key. Called by the sources of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from parashard.data.base import kind_of_failure
from parashard.data.columns import NO_MARKS, shown_cell
from parashard.data.texts import Marks
from parashard.errors import BadData

VOCABULARY_BYTES_MAX = 4 << 20
"""Most bytes of the vocabularies of a job, which is saved with them; columns of more texts have hashed keys."""


def read_vocabularies(paths: Mapping[str, Path], marks: Marks = NO_MARKS) -> dict[str, tuple[str, ...]]:
    """Return the texts of each column, in the order of their lines.

    Parameters
    ----------
    paths : mapping of str to Path
        By column: UTF-8, a text in each line; spaces around it do not count.
    marks : Marks
        What stands for a missing value.

    Raises
    ------
    BadData
        A file cannot be read, is empty, has a line that stands for a missing value or a text twice, or all are too
        large together; the message names the key of the job file, the file and the line.
    Unavailable
        A file is there and the system does not give its content now.
    """
    found, left = {}, VOCABULARY_BYTES_MAX
    for column, path in paths.items():
        where = f"{path}: the vocabulary of column {shown_cell(column)}"
        content = _read(path, where, left)
        left -= len(content)
        try:
            found[column] = tuple(_texts(content.decode("utf-8-sig"), where, marks))
        except UnicodeDecodeError as error:
            raise BadData(f"{where}: is not text in UTF-8: {error}") from None
    return found


def _read(path: Path, where: str, left: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(left + 1)
    except OSError as error:
        raise kind_of_failure(error)(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(content) > left:
        raise BadData(
            f"{where}: makes the vocabularies of the job larger than {VOCABULARY_BYTES_MAX >> 20} MiB, which is most; "
            "without a vocabulary (data.vocabularies) a column's keys are hashed"
        )
    return content


def _texts(content: str, where: str, marks: Marks) -> Iterator[str]:
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split("\n") if content.strip() else [], start=1):
        text = line.strip()
        if not text and number == content.count("\n") + 1:
            break  # behind the last line's end
        if marks.is_missing(text):
            raise BadData(f"{where}: line {number} has {shown_cell(text)}, which stands for a missing value")
        if lines.setdefault(text, number) != number:
            raise BadData(f"{where}: lines {lines[text]} and {number} are both {shown_cell(text)}")
        yield text
    if not lines:
        raise BadData(f"{where}: is empty; allowed: a text in each line")
