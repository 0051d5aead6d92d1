"""Training in the process that calls `fit`: a shard and its replicas, and no other process.

The only part of `parashard` that imports the services: their arithmetic and their records are used as they are, so that
weights have the bits of `sync:N` on a cluster. It is imported when such a strategy trains.
"""
