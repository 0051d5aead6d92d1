"""Durability of a shard: checkpoints, and recovery from them by a new incarnation."""
