"""The state of a run as people see it: the live view, tables, the summary."""
