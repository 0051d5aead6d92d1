"""Rows of embedding tables on a shard: their memory, the index by key, and a readable reference."""
