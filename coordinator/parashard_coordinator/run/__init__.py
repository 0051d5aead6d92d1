"""The run around the core: the job resolved, the clock, what is stored, the report at the end."""
