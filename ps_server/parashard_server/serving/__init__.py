"""Serving of requests to a shard over gRPC, TCP and shared memory; their memory, and the shard's lock."""
