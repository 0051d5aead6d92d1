"""How pushes and pulls travel between a client and a shard: the interface `Transport` and its implementations."""
