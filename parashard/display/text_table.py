"""Tables and lists of items as lines of text that fit a width; excess is dropped. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
    """One column of a table: the title above it, and its cells from top to bottom."""

    title: str
    cells: tuple[str, ...]
    is_text: bool = False  # aligned to the left, and may be truncated; else a number, shown in full or not at all
    rank: int = 0  # columns that do not fit are dropped in order of descending rank; 0: never dropped


GAP = "  "
ITEM_GAP = "   "
TEXT_CELLS_MIN = 8
CUT = "\u2026"


def table_lines(columns: Sequence[Column], width: int) -> list[str]:
    """Return the titles and the rows, as lines of at most `width` cells."""
    kept = list(columns)
    while _total([_width(column) for column in kept]) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    widths = [_width(column) for column in kept]
    shrinkable = [i for i, column in enumerate(kept) if column.is_text]
    while shrinkable and _total(widths) > width:
        widest = max(shrinkable, key=lambda i: widths[i])
        if widths[widest] <= TEXT_CELLS_MIN:
            break
        widths[widest] -= 1
    rows = zip(*((column.title, *column.cells) for column in kept), strict=True)
    return [
        cut(GAP.join(_aligned(*one) for one in zip(row, widths, kept, strict=True)).rstrip(), width) for row in rows
    ]


def item_lines(items: Sequence[str], width: int) -> list[str]:
    """Return items in sequence, on as many lines as needed; only an item longer than a line is truncated."""
    lines: list[str] = []
    for item in items:
        longer = f"{lines[-1]}{ITEM_GAP}{item}" if lines else ""
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(item)
    return [cut(line, width) for line in lines]


def text_lines(text: str, width: int, most: int) -> list[str]:
    """Wrap a text to at most `most` lines; a mark shows a truncation."""
    indent = GAP if width > TEXT_CELLS_MIN else ""
    lines = wrap(text, max(1, width), subsequent_indent=indent, break_on_hyphens=False) or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]}{CUT}"]
    return [cut(line, width) for line in lines]


def cut(text: str, width: int) -> str:
    """Truncate a text to `width` cells at its end, with a mark."""
    if cell_len(text) <= width:
        return text
    return f"{set_cell_size(text, width - 1).rstrip()}{CUT}" if width > 0 else ""


def cut_in_the_middle(text: str, width: int) -> str:
    """Truncate a text to `width` cells in the middle: names differ at the end."""
    if cell_len(text) <= width:
        return text
    tail = ""
    for character in reversed(text):
        if cell_len(character + tail) > width // 2:
            break
        tail = character + tail
    return cut(text, width - cell_len(tail)) + tail


def _width(column: Column) -> int:
    return max(cell_len(text) for text in (column.title, *column.cells))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _aligned(text: str, width: int, column: Column) -> str:
    shown = cut_in_the_middle(text, width) if column.is_text else text
    padding = " " * (width - cell_len(shown))
    return shown + padding if column.is_text else padding + shown


UNBOUNDED = 10_000  # cells


def print_table(
    names: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
) -> None:
    """Print a table, wrapped to the terminal; other output, such as a pipe to grep, is not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED
    console.print(table)
