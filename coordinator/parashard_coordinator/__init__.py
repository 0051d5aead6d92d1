"""The coordinator process: who is in the job, who computes which step, and how the job goes."""
