"""Whether training stays as good with many workers: tasks, workers in virtual time, methods, one table."""
