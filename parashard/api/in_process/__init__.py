"""Training in the process that calls `fit`: a shard and its replicas, without other processes.

The only part of `parashard` that imports all three services: it uses their arithmetic and records unchanged, so that
weights are bit-identical to `sync:N` on a cluster. It is imported when such a strategy trains.
"""
