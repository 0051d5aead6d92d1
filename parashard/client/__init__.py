"""A worker's side of the data plane: one pull or push on every shard."""
