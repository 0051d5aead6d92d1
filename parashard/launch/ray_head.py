"""Connect to a Ray cluster, query its head (GCS), and decide when the head is lost.

Ray's private functions are called here and nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from parashard.errors import ConfigurationError
from parashard.process.addresses import is_loopback, is_ray_address, split_address
from parashard.process.extras import install

DIAL_S = 5.0
"""Longest wait for a head to accept a connection."""
HEAD_CALL_S = 5.0
"""Longest wait for its answer; after it no process of the run is started for the time being."""
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting: Ray ends a driver whose head does not answer for this many seconds, by default 60."""


def imported() -> Any:
    """Return Ray; ConfigurationError if it cannot be imported."""
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(f'cluster.launcher = "ray" needs Ray ({error}): {install("ray")}') from None


def connect(ray: Any, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> bool:
    """Connect this process to a cluster of Ray, unless the program has; return whether this did.

    If it did, everything that Ray runs for this process has the runtime environment.

    Raises ConfigurationError if there is none, or if this process is on none of its nodes.
    """
    wanted = os.environ.get("RAY_ADDRESS", "") if address is None or address == "auto" else address
    if ray.util.client.ray.is_connected() if ray.is_initialized() else wanted.startswith("ray://"):
        raise ConfigurationError(
            "Ray's client (ray://) connects from outside of the cluster, and the coordinator runs here, where workers "
            "must reach it; start this on a node of the cluster, or by `ray job submit`"
        )
    if ray.is_initialized():
        _check_connected(ray, address)
        return False
    if wanted and not is_ray_address(wanted):
        raise ConfigurationError(f"RAY_ADDRESS is HOST:PORT, auto or local, found {wanted!r}")
    _dial(wanted)
    try:
        environment = {"runtime_env": dict(runtime_env)} if runtime_env else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **environment)
        silence()
    except (ConnectionError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"Ray at {address or 'its own address'}: {last_line(error)}") from None
    return True


def _check_connected(ray: Any, address: str | None) -> None:
    """Refuse the address of another cluster than the one that the program is connected to."""
    if address is None or address == "auto":
        return
    at = str(ray.get_runtime_context().gcs_address)
    (host, _, port), (at_host, _, at_port) = address.rpartition(":"), at.rpartition(":")
    hosts = {host}
    with suppress(OSError, UnicodeError):
        hosts |= {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    if port != at_port or not (at_host in hosts or any(map(is_loopback, hosts))):
        raise ConfigurationError(
            f"the program is connected to Ray at {at}, found the address {address!r}; allowed: {at}, or none"
        )


def _dial(address: str) -> None:
    """Raise ConfigurationError if nothing listens at HOST:PORT: Ray would look for it for minutes."""
    if ":" not in address:  # auto, local or none
        return
    try:
        socket.create_connection(split_address(address), DIAL_S).close()
    except (OSError, UnicodeError) as error:  # no host has such a name
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"Ray at {address}: {why}; `ray start --head` prints the address of a cluster"
        ) from None


def silence() -> None:
    """Stop Ray from printing in this process, such as the last lines of the log of a raylet that ended.

    The function is private to Ray, which prints that despite `log_to_driver=False`.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    worker.print_to_stdstream = lambda *_, **__: None


def _head() -> Any:
    """Return Ray's own client of its head, which is private to Ray.

    Other calls, such as `ray.nodes` and `ray._private.state`, have no deadline, and some end this process once another
    head answers.
    """
    return importlib.import_module("ray.experimental.internal_kv").internal_kv_get_gcs_client()


def node_addresses() -> dict[str, str]:
    """Return the addresses of all nodes by their ids."""
    nodes = _head().get_all_node_info(timeout=HEAD_CALL_S)
    return {node.hex(): about.node_manager_address for node, about in nodes.items()}


def draining_nodes() -> dict[str, float]:
    """Return the draining nodes, each with its deadline in `time.monotonic` seconds (infinity: none)."""
    nodes: Mapping[str, int] = _head().get_draining_nodes(timeout=HEAD_CALL_S)
    since_s = time.monotonic() - time.time()
    return {node: at_ms / 1000.0 + since_s if at_ms else math.inf for node, at_ms in nodes.items()}


def head_patience_s(environ: Mapping[str, str]) -> float:
    """Return how long Ray's head may be silent: half of Ray's own limit, which leaves time to save."""
    try:
        return float(environ[RECONNECT]) / 2
    except (KeyError, ValueError):
        return 30.0


def why_lost(answered_s: float, now_s: float, patience_s: float) -> str:
    """Return why a run cannot go on if Ray's head last answered at `answered_s`, or ""."""
    silent_s = now_s - answered_s
    return (
        f"the head of the Ray cluster (its GCS) has not answered for {silent_s:.0f} s" if silent_s > patience_s else ""
    )


def last_line(error: BaseException) -> str:
    """Return the last line of a Ray error, which has the cause after up to twenty others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
