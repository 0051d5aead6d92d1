"""The sections of a job file that belong to no other package: job, consistency, evaluation, checkpoint, cluster.

Relations between keys are in `schema`.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.policy import Policy
from parashard.plan.partition import Partitioner, fixed_shards, maximum_size, minimum_size, whole
from parashard.process.addresses import OF_INTERFACE, Port, PortRange, checked_host, is_ray_address, port_of
from parashard.transports.base import TransportKind

QUEUE_GRAIN_BYTES = 64 << 10  # receive buffers are multiples of it, so that their number is bounded as well
QUEUE_BYTES_LEAST = 256 << 20  # the least that `cluster.queue_bytes = 0` stands for
QUEUE_WORKERS_MAX = 8  # most workers that it counts if they need not be on the shard's host

PORTS_LEAST = 6  # of a range: two of the coordinator, three of a shard, one of a worker

NAME_MAX = 80


def job_name_from(text: str, default: str) -> str:
    """Return a job's name from a text, such as a file's name; `default` if it has no letter or digit."""
    plain = (
        unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    )  # an accent is left out, not its letter
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("._-")[:NAME_MAX].strip("._-") or default


def received_bytes(push_bytes: int) -> int:
    """Return the length of the receive buffer for a push of `push_bytes`."""
    return max(QUEUE_GRAIN_BYTES, -(-push_bytes // QUEUE_GRAIN_BYTES) * QUEUE_GRAIN_BYTES)


def _parsed_policy(value: Any) -> Any:
    if isinstance(value, Policy):
        return value
    try:
        return Policy.parse(str(value))
    except ConfigurationError as error:
        raise ValueError(error.message.partition("allowed: ")[2]) from None


def _matching(pattern: str, allowed: str) -> BeforeValidator:
    """Return a check of a text by a pattern, which errors describe as `allowed`."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            raise ValueError(allowed)
        return value

    return BeforeValidator(check)


def _checked_port(value: Any) -> Any:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str) or not (found := port_of(str(value))):
            raise ValueError
        if isinstance(found, PortRange) and found.last - found.first + 1 < PORTS_LEAST:
            raise ValueError
    except (ConfigurationError, ValueError):
        raise ValueError(f'1 to 65535, or a range of at least {PORTS_LEAST} ports as "7000-7099"') from None
    return value


def _checked_host(value: str) -> str:
    try:
        return checked_host(value)
    except ConfigurationError as error:
        raise ValueError(error.message.partition("allowed: ")[2]) from None


def _checked_launcher(value: Any) -> Any:
    on_ray = isinstance(value, str) and value.startswith("ray:") and is_ray_address(value.removeprefix("ray:"))
    if isinstance(value, str) and not on_ray and not re.fullmatch("local|external|kubernetes|ray|ssh:.+", value):
        raise ValueError("local, ssh:HOSTFILE, ray, ray:HOST:PORT, ray:auto, ray:local, external or kubernetes")
    return value


_Name = Annotated[
    str,
    _matching(
        rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_MAX - 1}}}",
        "1 to 80 letters, digits, '.', '_' or '-', of which the first is a letter or a digit",
    ),
]
_Device = Annotated[
    str, _matching("auto|cpu|cuda|cuda:(0|[1-9][0-9]?)", "auto, cpu, cuda, or cuda:N with 0 <= N < 100")
]
_ShardDevice = Annotated[str, _matching("cpu|cuda|cuda:(0|[1-9][0-9]?)", "cpu, cuda, or cuda:N with 0 <= N < 100")]
_Launcher = Annotated[str, BeforeValidator(_checked_launcher)]


class JobOptions(FrozenModel):
    """`[job]`: what is trained, and for how long."""

    name: _Name = Field(description="The job's name in paths, logs and metrics.")
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="Seed of initial values, data order and all other randomness."
    )
    epochs: int = Field(ge=1, le=10**9, description="Number of epochs.")
    first_epoch: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="Number of the first epoch, which sets the order of its examples; unset: 0.",
    )
    updates_before: int | None = Field(
        default=None,
        ge=0,
        le=10**15,
        description="Updates in the optimizer's state at the start, from which schedules go on. Set by scripts.",
    )
    passes_before: int | None = Field(
        default=None,
        ge=0,
        le=10**9,
        description="Passes over the examples before the start. Set by scripts.",
    )
    batch_size: int = Field(ge=1, le=2**31 - 1, description="Examples of one update; in sync:N of each of its N steps.")
    steps_per_epoch: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Batches of an epoch; the next one continues the pass. Unset: one pass over the examples.",
    )
    drop_last: bool | None = Field(
        default=None, description="True: leave out the last batch of a pass if it is shorter; unset: false."
    )
    shuffle: bool | None = Field(
        default=None, description="False: keep the examples' order; unset: true, each pass has another order."
    )
    max_attempts: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Attempts at a step before it counts as bad.",
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        default="stop", description="Stop the job at a bad step, or skip and count the step."
    )


class ConsistencyOptions(FrozenModel):
    """`[consistency]`: when steps may run ahead of each other."""

    policy: Annotated[Policy, PlainValidator(_parsed_policy), PlainSerializer(str)] = Field(
        default=Policy("auto"),
        description="auto: workers share each batch, as on one machine; auto:P: in P parts. async: no worker waits. "
        "ssp:K: at most K steps ahead of the slowest. sync:N: rounds of N steps.",
    )
    reduce: Literal["mean", "sum"] = Field(default="mean", description="How sync:N combines the gradients of a round.")


class EvaluationOptions(FrozenModel):
    """`[evaluation]`: when the held-out split is measured, and what ends the job early."""

    every_epochs: float = Field(
        default=1.0, ge=0, le=10**9, description="Epochs between two evaluations; 0: only at the end."
    )
    target_accuracy: float | None = Field(
        default=None, gt=0, le=1, description="An evaluation with at least this accuracy ends the job."
    )
    target_loss: float | None = Field(default=None, description="An evaluation with at most this loss ends the job.")
    target_mean_squared_error: float | None = Field(
        default=None,
        ge=0,
        description="An evaluation with at most this mean squared error, in the label's unit, ends the job.",
    )


class CheckpointOptions(FrozenModel):
    """`[checkpoint]`: where and how often the shards' state is saved."""

    url: str = Field(
        default="",
        max_length=1000,
        description="Folder or URL (s3://BUCKET/PATH, gs://, az://); empty: `checkpoints` in the run directory.",
    )
    every_s: float = Field(
        default=30.0,
        ge=0,
        le=86400,
        description="Seconds between checkpoints of a shard; 0: none by time. Lower it to repeat less work after a "
        "kill.",
    )
    every_steps: int = Field(
        default=0,
        ge=0,
        le=10**12,
        description="Applied steps between checkpoints of a shard, in sync:N up to whole rounds; 0: none by steps.",
    )
    keep: int = Field(default=3, ge=1, le=10**6, description="Newest checkpoints of a shard to keep.")
    keep_every: int = Field(default=0, ge=0, le=10**9, description="Also keep every Nth checkpoint for good; 0: none.")


class MinimumSize(FrozenModel):
    """Cut into at most one range per shard, none smaller than `min_bytes`."""

    kind: Literal["minimum-size"] = Field(default="minimum-size", description="Names this partitioner.")
    min_bytes: int = Field(default=262144, ge=1, le=2**40, description="Smallest range, in bytes.")

    def build(self, shards: int) -> Partitioner:
        """Return the partitioner for this number of shards."""
        return minimum_size(self.min_bytes, shards)


class FixedShards(FrozenModel):
    """Cut every variable into one range per shard."""

    kind: Literal["fixed-shards"] = Field(description="Names this partitioner.")

    def build(self, shards: int) -> Partitioner:
        """Return the partitioner for this number of shards."""
        return fixed_shards(shards)


class MaximumSize(FrozenModel):
    """Cut into the fewest ranges of which none is larger than `max_bytes`."""

    kind: Literal["maximum-size"] = Field(description="Names this partitioner.")
    max_bytes: int = Field(ge=1, le=2**40, description="Largest range, in bytes.")

    def build(self, shards: int) -> Partitioner:
        """Return the partitioner; the number of shards does not matter to it."""
        return maximum_size(self.max_bytes)


class Whole(FrozenModel):
    """Leave every variable in one piece."""

    kind: Literal["whole"] = Field(description="Names this partitioner.")

    def build(self, shards: int) -> Partitioner:
        """Return the partitioner; the number of shards does not matter to it."""
        return whole


PartitionerOptions = Annotated[MinimumSize | FixedShards | MaximumSize | Whole, Field(discriminator="kind")]


class ClusterOptions(FrozenModel):
    """`[cluster]`: the processes and their resources; nothing here changes the arithmetic."""

    shards: int = Field(default=2, ge=1, le=1024, description="Number of shards.")
    workers: int = Field(default=2, ge=0, le=4096, description="Workers to start; 0: all join from outside.")
    device: _Device = Field(
        default="auto",
        description="Where workers compute: cpu; cuda:N, one GPU; cuda, the GPUs in turn; auto, cuda if possible.",
    )
    shard_device: _ShardDevice = Field(
        default="cpu",
        description="Where shards keep and update variables: cpu; cuda:N, one GPU; cuda, the GPUs in turn.",
    )
    launcher: _Launcher = Field(
        default="local",
        max_length=1000,
        description="What starts the processes (--on): this machine, the hosts of a file by ssh, Ray, another "
        "system, or Kubernetes.",
    )
    pipeline_depth: int = Field(
        default=0,
        ge=0,
        le=8,
        description="Steps that a worker has under way besides the current one. 1 hides transfers, but gradients "
        "are a step older: that can cost accuracy in async and ssp.",
    )
    lease_batch: int = Field(default=16, ge=1, le=1024, description="Most steps that one call leases.")
    lease_ttl_s: float = Field(
        default=10.0, ge=0.1, le=3600, description="Seconds without renewal after which a lease ends."
    )
    step_timeout_s: float = Field(
        default=300.0,
        ge=0.1,
        le=86400,
        description="Seconds at one step after which the worker counts as hung and the step as failed.",
    )
    grace_s: float = Field(
        default=10.0,
        ge=0.5,
        le=3600,
        description="Seconds to finish and save for a process that is asked to end.",
    )
    silence_s: float = Field(
        default=30.0,
        ge=1,
        le=86400,
        description="Seconds without a sign of life after which a process is restarted; a worker not before its "
        "leases end.",
    )
    start_s: float = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="Seconds until a process's first sign of life, else it is restarted. Raise it for large data or "
        "checkpoints.",
    )
    retry_budget_s: float = Field(
        default=60.0,
        ge=1,
        le=86400,
        description="Seconds to wait for an absent shard or coordinator.",
    )
    speculate_after: float = Field(
        default=4.0,
        ge=0,
        le=10**6,
        description="Median step times after which a second worker may get a held step; 0: never.",
    )
    worker_threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Compute threads of a worker; 0: OMP_NUM_THREADS, else an even share of the cores, or 1 in sync:N.",
    )
    shard_threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads of a shard for a large push; 0: an even share of the cores, at least 1.",
    )
    transport: TransportKind = Field(
        default="auto",
        description="How tensors travel: shared memory on one host, plain TCP, gRPC, or the first that is possible.",
    )
    partitioner: PartitionerOptions = Field(
        default_factory=MinimumSize, description="How variables are cut into row ranges."
    )
    host: Annotated[str, AfterValidator(_checked_host)] = Field(
        default="127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address or host name to listen on; auto: the address of the machine's name. Off loopback it "
        "needs --tls-dir or insecure.",
    )
    interface: str = Field(
        default="",
        max_length=64,
        description="Instead of host: the network interface to listen on, such as eth1, or its network, such as "
        "10.1.0.0/16.",
    )
    port: Annotated[int | str, BeforeValidator(_checked_port)] | None = Field(
        default=None,
        description="Port of the coordinator; the next one is its status page's, then each shard has two. A range, "
        'such as "7000-7099": the coordinator has the first two, the others any free ones. Unset: any '
        "free ports.",
    )
    insecure: bool = Field(default=False, description="True: listen off loopback without TLS, open to any client.")
    authority: Path | None = Field(
        default=None,
        description="Folder of the authority that issued --tls-dir: it signs certificates for keys made on Ray's "
        "nodes and on hosts by ssh. Unset: each machine has a folder at the path of --tls-dir.",
    )
    allow_mixed: bool = Field(
        default=False,
        description="True: machines whose arithmetic differs may share the job; runs then differ in bits.",
    )
    max_restarts: int = Field(
        default=20,
        ge=0,
        le=10**6,
        description="Exits of a worker in a row, without a completed step, that end the job.",
    )
    restart_backoff_s: float = Field(
        default=0.2,
        ge=0,
        le=5,
        description="Seconds before a process that ended twice in a row is restarted; doubles up to 5.",
    )
    queue_pushes: int = Field(
        default=64,
        ge=1,
        le=65536,
        description="Requests that may wait at a shard; more are answered RetryLater.",
    )
    queue_bytes: int = Field(
        default=0,
        ge=0,
        le=2**40,
        description="Most memory of pushes in flight to a shard; more are sent again later. 0: enough for the job's "
        "workers, at least 256 MiB.",
    )

    @property
    def listens_on(self) -> str:
        """The value of `--host` for every process, which each machine looks up for itself."""
        return f"{OF_INTERFACE}{self.interface}" if self.interface else self.host

    @property
    def ports(self) -> Port:
        """The port or the range of `port`; 0: any that are free."""
        return port_of(str(self.port or 0))

    @property
    def any_port(self) -> Port:
        """The ports for a process without a fixed one; 0: any that is free."""
        ports = self.ports
        return 0 if isinstance(ports, int) else PortRange(ports.first + 2, ports.last)

    @property
    def is_launched(self) -> bool:
        """Whether `parashard run` starts the processes, and the coordinator tells it which."""
        return self.launcher.partition(":")[0] in ("local", "ssh", "ray")

    def ports_of_coordinator(self) -> tuple[int, int]:
        """Return the coordinator's ports for gRPC and HTTP; 0: any that is free."""
        ports = self.ports
        first = ports if isinstance(ports, int) else ports.first
        return (first, first + 1) if first else (0, 0)

    def ports_of_shard(self, index: int) -> tuple[Port, Port]:
        """Return a shard's ports for gRPC and for streams; 0: any that is free."""
        ports = self.ports
        if isinstance(ports, int) and ports:
            return ports + 2 + 2 * index, ports + 3 + 2 * index
        return self.any_port, self.any_port

    def push_memory_bytes(self, push_bytes: int, depth: int) -> int:
        """Return the bound on the memory of pushes in flight to a shard whose largest push has `push_bytes`."""
        # By default a slot of shared memory for each of a worker's `depth` + 1 concurrent steps, so that a pull need
        # not wait for a push, and one more push over another transport.
        here = self.transport == "shm" or (self.transport == "auto" and self.launcher == "local")
        workers = max(1, self.workers if here else min(self.workers, QUEUE_WORKERS_MAX))
        slots = workers * (depth + 1) if here or (self.transport == "auto" and self.is_launched) else workers
        return self.queue_bytes or max(QUEUE_BYTES_LEAST, (slots + 1) * received_bytes(push_bytes))
