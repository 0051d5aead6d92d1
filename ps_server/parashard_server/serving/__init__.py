"""How requests reach a shard: gRPC, TCP and shared memory, the memory they use, and whose turn it is."""
