"""Training in the process that calls `fit`: a shard and its replicas, and no other process.

Of `parashard` the part that imports all three services: their arithmetic and records are used as they are, so that
weights have the bits of `sync:N` on a cluster. It is imported when such a strategy trains.
"""
