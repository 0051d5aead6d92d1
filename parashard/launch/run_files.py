"""Names of the files in a run directory, for all who write or read them."""

from pathlib import Path

JOB_FILE = "job.toml"
NEW_JOB_FILE = "job.new.toml"  # until the coordinator has taken it
ORIGIN_FILE = "origin.json"  # where the job file came from, and so its model
REPORT_FILE = "report.json"
WEIGHTS_FILE = "weights.safetensors"
PREPROCESSING_FILE = "preprocessing.json"
"""How inputs are made and what outputs mean (docs/preprocessing.md); in the checkpoint store, too."""
HISTORY_FILE = "history.jsonl"
CHECKPOINTS = "checkpoints"
"""The checkpoint store, unless the job says otherwise."""


def beside(weights: Path) -> Path:
    """Return the file beside a copy of weights that says how inputs are made: w.safetensors, w.preprocessing.json."""
    return weights.with_name(f"{weights.stem}.{PREPROCESSING_FILE}")
