"""Transports of pushes and pulls between a client and a shard: the interface `Transport` and its implementations."""
