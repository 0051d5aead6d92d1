"""Rows of embedding tables on a shard: their memory, and the index by key."""
