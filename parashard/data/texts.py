"""Texts of cells: which stand for a missing value, which are numbers, and which mean the same.

Pure functions of one text, the same for every format, for training, held-out tables and prediction. Knows no column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

MISSING = ("", "na", "n/a", "nan", "null")
"""Cells that stand for a missing value in every column, in small letters and without the spaces around them."""

_WHOLE = re.compile(r"(-?)0*([0-9]+?)(?:\.0+)?")
_BEGINS_NUMBER = tuple("-0123456789")
_LEADING_ZERO = re.compile(r"\s*[+-]?0[0-9]+\s*")


class Marks(NamedTuple):
    """Which texts stand for a missing value besides `MISSING`, and which of those do not, in a column of text.

    Both are compared without the spaces around them.
    """

    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def is_missing(self, text: str, *, in_text: bool = True) -> bool:
        """Return whether a cell stands for a missing value, in a column of text or of numbers."""
        text = text.strip()
        return (text.lower() in MISSING and not (in_text and text in self.never)) or text in self.also


def marks_of(missing: str | Sequence[str], not_missing: Sequence[str] = ()) -> Marks:
    """Return the marks of a job file's keys; an empty text says nothing more."""
    also = (missing,) if isinstance(missing, str) else missing
    return Marks(tuple(text.strip() for text in also if text.strip()), tuple(text.strip() for text in not_missing))


def canonical(text: str) -> str:
    """Return the form in which texts are compared: that of " 2.0" and "02" is "2", of "TRUE" it is "true"."""
    # Fractions, exponents and the case of other texts are as they are: 1.10 and 1.1 may be versions.
    text = text.strip()
    if text[:1] in _BEGINS_NUMBER:
        whole = _WHOLE.fullmatch(text)
        if whole is not None:
            sign, digits = whole.groups()
            return digits if digits == "0" else sign + digits
        return text
    return text.lower() if len(text) in (4, 5) and text.lower() in ("true", "false") else text


def has_leading_zero(text: str) -> bool:
    """Return whether a text is a whole number with a zero before it, as codes have, and amounts have not."""
    return "0" in text and _LEADING_ZERO.fullmatch(text) is not None


def number_of(text: str) -> float | None:
    """Return the finite number that a cell holds; None if it holds none."""
    try:
        value = math.nan if "_" in text else float(text)  # Python accepts 1_000, which no table means
    except ValueError:
        return None
    return value if math.isfinite(value) else None
