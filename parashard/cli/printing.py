"""Printing of tables, as wide as the terminal. Called by the commands that print one."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

UNBOUNDED = 10_000  # cells


def print_table(table: Table) -> None:
    """Print a table, wrapped to the terminal; where the output is none, such as a pipe to grep, not wrapped."""
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED
    console.print(table)
