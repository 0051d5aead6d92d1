"""Durability of a shard: checkpoints, the write-ahead log, and recovery from them by a new incarnation."""
