"""Read-only serving of a run's committed or live weights and rows: versions, look-ups, differences for subscribers."""
