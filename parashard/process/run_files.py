"""Names of the files in a run directory."""

from __future__ import annotations

import os
from pathlib import Path

JOB_FILE = "job.toml"
NEW_JOB_FILE = "job.new.toml"  # until the coordinator has accepted it
ORIGIN_FILE = "origin.json"  # path of the original job file, beside which its model is
REPORT_FILE = "report.json"
PROGRAM_FILE = "program.json"
"""The program that a run belongs to, and how to restart it."""
CALLS_FILE = "calls.json"
"""Results of a script's calls before its run."""
WEIGHTS_FILE = "weights.safetensors"
VARIABLES_FILE = "variables.safetensors"
"""The weights as variables, where `WEIGHTS_FILE` has them as the model's framework does."""
PREPROCESSING_FILE = "preprocessing.json"
"""Encoding of inputs and meaning of outputs (docs/preprocessing.md); also in the checkpoint store."""
HISTORY_FILE = "history.jsonl"
CHECKPOINTS = "checkpoints"
"""The default checkpoint store."""
LOGS = "logs"
"""Folder with a log file for each process."""


def beside(weights: Path) -> Path:
    """Return the preprocessing file of a copy of weights: w.safetensors has w.preprocessing.json."""
    return weights.with_name(f"{weights.stem}.{PREPROCESSING_FILE}")


def short_path(path: str | Path) -> str:
    """Return a path as a user would type it: relative where it lies below the working directory."""
    try:
        absolute, here = os.path.abspath(path), os.getcwd()
    except FileNotFoundError:  # the working directory is gone
        return str(path)
    return os.path.relpath(absolute, here) if absolute.startswith(f"{here}{os.sep}") else str(path)
