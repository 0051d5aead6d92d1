"""TensorFlow's ParameterServerStrategy over processes of its own: parameter servers and workers, this one the chief.

Called by the TensorFlow contestants. `python -m benchmarks.peers.tensorflow_cluster JOB INDEX CLUSTER` is one server.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from benchmarks.peers import seam


def start_cluster(workers: int, servers: int) -> tf.distribute.coordinator.ClusterCoordinator:
    """Start the processes, and return a coordinator of them; the kernel kills them with this process.

    Variables are cut as ours are by default: into at most one piece per server, none smaller than 256 KiB.
    """
    jobs = {"worker": workers, "ps": servers}
    cluster = {job: [f"127.0.0.1:{seam.free_port()}" for _ in range(count)] for job, count in jobs.items()}
    for job, count in jobs.items():
        for index in range(count):
            seam.start_server("benchmarks.peers.tensorflow_cluster", job, str(index), json.dumps(cluster))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


def main() -> None:
    """Serve until killed."""
    job, index, cluster = sys.argv[1:]
    server = tf.distribute.Server(
        tf.train.ClusterSpec(json.loads(cluster)), job_name=job, task_index=int(index), protocol="grpc"
    )
    print("serving", flush=True)
    server.join()


if __name__ == "__main__":
    main()
