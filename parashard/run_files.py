"""Names of the files in a run directory, for all who write or read them."""

JOB_FILE = "job.toml"
NEW_JOB_FILE = "job.new.toml"  # until the coordinator has taken it
REPORT_FILE = "report.json"
WEIGHTS_FILE = "weights.safetensors"
HISTORY_FILE = "history.jsonl"
CHECKPOINTS = "checkpoints"
"""The checkpoint store, unless the job says otherwise."""
