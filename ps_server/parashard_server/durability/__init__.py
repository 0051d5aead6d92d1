"""What survives a shard's process: checkpoints, the write-ahead log, and how a new incarnation takes them up."""
