"""Read-only serving of what a run's shards have committed: versions, lookups, differences for subscribers."""
