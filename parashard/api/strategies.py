"""Strategies: the processes and devices that compute a trainer's steps, and the consistency between them."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from typing import Any, Self

from parashard.errors import ConfigurationError, Unavailable
from parashard.job.sections import ClusterOptions
from parashard.launch.ray_settings import Ray
from parashard.process import cuda
from parashard.process.arguments import checked_whole
from parashard.process.extras import install
from parashard.security.given_credentials import tls_folder

REPLICAS_MAX = 4096
PROCESSES, THREADS = "processes", "threads"


class Strategy:
    """Base of all strategies.

    Attributes
    ----------
    consistency : str
        auto, async, ssp:K or sync:N, as in a job file.
    cluster : dict of str to object
        Keys of a job file's `[cluster]` table.
    """

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse unknown arguments with an error that lists the known ones."""
        signature = inspect.signature(cls.__init__)
        own = [p for p in signature.parameters.values() if p.name != "self"]
        known = [p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        places = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in own)
        takes_keys = any(p.kind is p.VAR_KEYWORD for p in own)
        further = [name for name in ClusterOptions.model_fields if name not in known] if takes_keys else []
        unknown = sorted(settings.keys() - {*known, *further})
        if unknown or len(arguments) > places:
            has = f"{unknown[0]}=" if unknown else f"{len(arguments)} arguments"
            hint = (
                "; worker_threads= and shard_threads= are of processes" if "threads" in unknown and takes_keys else ""
            )
            raise ConfigurationError(f"ps.{cls.__name__} has no {has}{hint}; allowed: {', '.join(known + further)}")
        return super().__new__(cls)

    def __init__(self, consistency: str, cluster: dict[str, Any]) -> None:
        self.consistency = consistency
        self.cluster = cluster

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Do nothing; provided so that TensorFlow scripts with `with strategy.scope():` run.

        In TensorFlow the scope decides where variables are created. Here a model is built anywhere, and the trainer
        takes the strategy as an argument.
        """
        yield


class ClusterStrategy(Strategy):
    """Training on shards and workers."""

    ray: Ray | None = None
    """The Ray cluster that places the processes, if the launcher is Ray."""

    def __init__(
        self,
        consistency: str,
        cluster: dict[str, Any],
        workers_as: str | None,
        tls_dir: str | os.PathLike[str] | None,
    ) -> None:
        if workers_as not in (None, PROCESSES, THREADS):
            raise ConfigurationError(f"workers_as is {PROCESSES!r} or {THREADS!r}, found {workers_as!r}")
        super().__init__(consistency, cluster)
        self.workers_as = workers_as
        self.tls_dir = tls_folder(tls_dir)

    def changed(self, consistency: str, **cluster: Any) -> Self:
        """Return a copy with another consistency and changed keys."""
        other = copy.copy(self)
        other.consistency, other.cluster = consistency, {**self.cluster, **cluster}
        return other


class ParameterServerStrategy(ClusterStrategy):
    """Training on shards, which hold the variables, and workers, which pull them and push gradients.

    Parameters
    ----------
    shards, workers : int, optional
        Number to start; default: 2 of each, or the environment's (`PARASHARD_CLUSTER__WORKERS`). workers=0: all
        workers join from other machines, and the run waits for them.
    consistency : str
        auto: the workers share each batch, so that updates are those of one machine. async: no worker waits. ssp:K: no
        step runs more than K ahead of the slowest. sync:N: rounds of N steps.
    workers_as : {"processes", "threads"}, optional
        "processes": each worker runs the script again. "threads": workers are threads of the process that calls `fit`.
        None: processes, or threads if there is no script, as in a notebook. Shards are always processes.
    tls_dir : path, optional
        Folder with `ca.pem`, `cert.pem` and `key.pem`, for all four roles: all connections use mutual TLS, and a worker
        that joins needs its own certificate. Default: `PARASHARD_TLS_DIR`, else no TLS.
    cluster : ps.Ray, optional
        A Ray cluster to run the processes on. None: decided by `launcher=`, by default this machine.
    **keys
        Further keys of a job file's `[cluster]` table, such as transport="tcp"; the environment may set omitted ones.
    """

    def __init__(
        self,
        shards: int | None = None,
        workers: int | None = None,
        consistency: str = "auto",
        *,
        workers_as: str | None = None,
        tls_dir: str | os.PathLike[str] | None = None,
        cluster: Ray | None = None,
        **keys: Any,
    ) -> None:
        counts = {key: count for key, count in (("shards", shards), ("workers", workers)) if count is not None}
        if cluster is not None and not isinstance(cluster, Ray):
            raise ConfigurationError(
                f"ParameterServerStrategy: cluster is ps.Ray(...), or None for this machine, found {cluster!r}"
            )
        if cluster is not None and "launcher" in keys:
            raise ConfigurationError(
                f"ParameterServerStrategy: cluster= and launcher={keys['launcher']!r} both say where processes run; "
                "allowed: one of them"
            )
        placed = {} if cluster is None else {"launcher": cluster.launcher}
        super().__init__(consistency, {**counts, **keys, **placed}, workers_as, tls_dir)
        self.ray = cluster


class MultiWorkerMirroredStrategy(ClusterStrategy):
    """Synchronous training over processes: a round has one step for each worker.

    There is one shard per worker, which holds one part of the variables: pushes are a reduce-scatter, pulls an
    all-gather. If a worker dies, another one computes its step.

    Parameters
    ----------
    workers : int
        Number of workers, and of shards.
    workers_as, tls_dir, **cluster
        As in `ParameterServerStrategy`.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        workers_as: str | None = None,
        tls_dir: str | os.PathLike[str] | None = None,
        **cluster: Any,
    ) -> None:
        workers = checked_whole("workers", workers, 1, REPLICAS_MAX)
        super().__init__(f"sync:{workers}", {"shards": workers, "workers": workers, **cluster}, workers_as, tls_dir)


class InProcessStrategy(Strategy):
    """Training in the process that calls `fit`, without starting other processes."""

    def __init__(self, replicas: int, device: str, variables_on: str, threads: int) -> None:
        threads = checked_whole(f"ps.{type(self).__name__}: threads (0: as many as the process has)", threads, 0)
        super().__init__(
            f"sync:{replicas}",
            {
                "shards": 1,
                "workers": 1,
                "device": device,
                "shard_device": variables_on,
                "shard_threads": threads,
                "partitioner": {"kind": "whole"},
            },
        )
        self.replicas = replicas
        self.threads = threads


class OneDeviceStrategy(InProcessStrategy):
    """Training on one device of this process, one step after the other, as `sync:1`.

    Parameters
    ----------
    device : str
        cpu or cuda:N; auto: the first GPU if there is one, else cpu.
    threads : int
        Compute threads; 0: leave the process' setting.
    """

    def __init__(self, device: str = "auto", threads: int = 0) -> None:
        device = _present(device)
        super().__init__(1, device, device, threads)


class MirroredStrategy(InProcessStrategy):
    """Training on N replicas in this process, each with its own step in every round, as `sync:N`.

    Parameters
    ----------
    devices : int or sequence of str
        Number of replicas (on the CPU), or the device of each, which must be the same for all. Replicas compute one
        after the other; the variables are on the same device.
    threads : int
        Compute threads; 0: leave the process' setting.
    """

    def __init__(self, devices: int | Sequence[str] = 2, threads: int = 0) -> None:
        replicas, device = _replicas(devices)
        super().__init__(replicas, device, device, threads)


class CentralStorageStrategy(MirroredStrategy):
    """The same as `MirroredStrategy`: replicas share one device with the variables.

    TensorFlow's strategy of this name keeps variables in host memory if there are several GPUs; here there is one
    device.
    """


class TPUStrategy(InProcessStrategy):
    """Training of a `ps.jax.Model` on JAX's devices, which compute a round's steps in parallel and sum gradients.

    XLA chooses the order of the sum, so weights differ from `sync:N` in their last bits. The variables are in host
    memory and are copied to the devices in every round.

    Parameters
    ----------
    devices : int, optional
        Number of JAX devices; None: all. Without a TPU or GPU, JAX is configured to have this many CPU devices, which
        is possible only before it computes anything.
    """

    def __init__(self, devices: int | None = None) -> None:
        if devices is not None:
            devices = checked_whole("devices", devices, 1, REPLICAS_MAX)
        super().__init__(devices_ready(devices), "cpu", "cpu", 0)


def _replicas(devices: int | Sequence[str]) -> tuple[int, str]:
    """Return the number of replicas, and the device that they share."""
    if isinstance(devices, Integral):
        return checked_whole("devices", devices, 1, REPLICAS_MAX), "cpu"
    if not isinstance(devices, str | Sequence):
        raise ConfigurationError(f"devices is a number or a list of names such as cuda:0, found {devices!r}")
    named = [devices] if isinstance(devices, str) else list(devices)
    if not named:
        raise ConfigurationError(
            "devices is empty; allowed: a number, or a name such as cpu or cuda:0 for each replica"
        )
    found = {_present(name) for name in named}
    if len(found) > 1:
        raise ConfigurationError(
            f"devices are {', '.join(sorted(found))}: the replicas of one process share a device; "
            f"ps.MultiWorkerMirroredStrategy(workers={len(named)}) has a process for each"
        )
    return len(named), found.pop()


def _present(device: str) -> str:
    """Resolve a device name; raise if this machine does not have the device."""
    if device == "auto":
        try:
            return "cuda:0" if cuda.device_count() else "cpu"
        except (ConfigurationError, Unavailable):
            return "cpu"
    if device == "cuda":
        device = "cuda:0"
    if not isinstance(device, str) or (device != "cpu" and not device.startswith("cuda:")):
        raise ConfigurationError(f"device {device!r} is unknown; allowed: auto, cpu, cuda:N")
    cuda.check(device)
    return device


def devices_ready(asked: int | None) -> int:
    """Return the number of JAX devices to use, configuring that many CPU devices if JAX's backend has not started."""
    try:
        import jax
    except ImportError:
        raise ConfigurationError(f"ps.TPUStrategy needs JAX: {install('jax')}") from None
    if not hasattr(jax, "shard_map"):
        raise ConfigurationError(f"ps.TPUStrategy needs JAX 0.7 or newer, found {jax.__version__}")
    if asked is not None:
        with suppress(RuntimeError):  # the backend has started: it may have enough devices
            jax.config.update("jax_num_cpu_devices", asked)  # affects only the CPU backend
    return len(devices(asked))


def devices(asked: int | None) -> list[Any]:
    """Return JAX's first `asked` devices, None for all; raise if it has fewer."""
    import jax

    found = jax.devices()
    if asked is not None and len(found) < asked:
        raise ConfigurationError(
            f"ps.TPUStrategy(devices={asked}): JAX has {len(found)} ({found[0].platform}), and its backend has "
            "started, which settles their number; make the strategy before anything is computed with JAX, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={asked} before Python starts"
        )
    return list(found[:asked])
