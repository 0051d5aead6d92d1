"""The display of a run: live view, tables, summary."""
