"""Runs on this machine: the run directory, its processes, and how a run ends."""
