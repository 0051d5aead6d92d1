"""Column: a column of a table of a job's status, as text, for a terminal and for the status page.

Pure. Made by `parashard.display.status_tables`; shown by `parashard.display.text_table` and by the coordinator's page.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """One column of a table.

    Attributes
    ----------
    title : str
        Above it.
    cells : tuple of str
        From top to bottom.
    is_text : bool
        True: aligned to the left, and may be truncated; False: a number, shown in full or not at all.
    rank : int
        Columns that do not fit are dropped in order of descending rank; 0: never dropped.
    """

    title: str
    cells: tuple[str, ...]
    is_text: bool = False
    rank: int = 0
