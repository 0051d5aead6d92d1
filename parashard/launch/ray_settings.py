"""Settings of a run on Ray: its cluster, and the resources of its processes. Imports no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from parashard.errors import ConfigurationError
from parashard.frozen_model import as_json
from parashard.job.sections import ClusterOptions
from parashard.process.addresses import is_ray_address

OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Names of these resources in an actor's options; others are in its `resources`."""


@dataclass(frozen=True)
class Ray:
    """Where Ray runs the shards and workers of a job, for `ps.ParameterServerStrategy(cluster=...)`.

    Parameters
    ----------
    address : str, optional
        As `ray.init` takes it. None: the cluster that the program is connected to, else what `ray.init()` finds or
        starts.
    worker_resources, shard_resources : mapping of str to float, optional
        Resources of each process: "CPU", "GPU", "memory" in bytes, or a resource of your own. None: as many CPUs as
        `worker_threads` or `shard_threads` says, at least one, and a GPU where `device` or `shard_device` is cuda.
    worker_labels : mapping of str to str, optional
        Labels that a worker's node must have, as Ray's `label_selector`.
    runtime_env : mapping, optional
        Ray's runtime environment of shards and workers, such as {"working_dir": "."}. A program that calls `ray.init`
        itself passes it there.
    """

    address: str | None = None
    worker_resources: Mapping[str, float] | None = None
    shard_resources: Mapping[str, float] | None = None
    worker_labels: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse values of another type; Ray checks the content of `runtime_env`."""
        _check("address", self.address, str, "text")
        if self.address is not None and not is_ray_address(self.address):
            raise ConfigurationError(f"ps.Ray: address is HOST:PORT, auto, local or None, found {self.address!r}")
        for name in ("worker_resources", "shard_resources"):
            for key, number in self._items(name, "a dict of numbers"):
                is_number = isinstance(number, Real) and not isinstance(number, bool)
                if not is_number or not 0 <= number < math.inf:
                    raise ConfigurationError(f"ps.Ray: {name}[{key!r}] is a number of 0 or more, found {number!r}")
                if key != "memory" and number > 1 and number % 1:
                    raise ConfigurationError(f"ps.Ray: {name}[{key!r}] above 1 is a whole number, found {number!r}")
        for key, label in self._items("worker_labels", "a dict of texts"):
            if not isinstance(label, str):
                raise ConfigurationError(f"ps.Ray: worker_labels[{key!r}] is text, found {label!r}")
        _check("runtime_env", self.runtime_env, Mapping, "a dict")

    def _items(self, name: str, allowed: str) -> Iterable[tuple[str, Any]]:
        """Return keys and values of an argument; refuse other types than a dict, and keys that are not names."""
        for key, value in (_check(name, getattr(self, name), Mapping, allowed) or {}).items():
            if not isinstance(key, str) or not key:
                raise ConfigurationError(f"ps.Ray: a key of {name} is a name, found {key!r}")
            yield key, value

    @property
    def launcher(self) -> str:
        """Its `cluster.launcher`."""
        return "ray" if self.address is None else f"ray:{self.address}"

    def of_worker(self, cluster: ClusterOptions) -> dict[str, float]:
        """Return the resources of a worker."""
        return _resources(self.worker_resources, cluster.worker_threads, cluster.device)

    def of_shard(self, cluster: ClusterOptions) -> dict[str, float]:
        """Return the resources of a shard, which are its bundle."""
        return _resources(self.shard_resources, cluster.shard_threads, cluster.shard_device)


def _check(name: str, value: Any, kind: type, allowed: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"ps.Ray: {name} is {allowed}, found {value!r}")
    return value


def _resources(given: Mapping[str, float] | None, threads: int, device: str) -> dict[str, float]:
    if given:  # Ray refuses NumPy's numbers
        return {name: as_json(number) for name, number in given.items()}
    return {"CPU": max(1, threads), **({"GPU": 1} if device.startswith("cuda") else {})}


def as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as options of an actor, with no CPU unless one is asked for."""
    named = {OPTIONS[key]: value for key, value in resources.items() if key in OPTIONS}
    return {"num_cpus": 0, **named, "resources": {key: value for key, value in resources.items() if key not in OPTIONS}}


def in_words(needs: Mapping[str, object]) -> str:
    """Return resources as text, such as CPU 1, GPU 1."""
    return ", ".join(f"{key} {value}" for key, value in needs.items())
