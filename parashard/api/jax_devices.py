"""JAX's devices for `TPUStrategy`: how many there are, and devices of the CPU where there is nothing else.

Knows no model. Called by `parashard.api.strategies`, before anything is computed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from parashard.errors import ConfigurationError
from parashard.process.extras import install


def devices_ready(asked: int | None) -> int:
    """Return how many of JAX's devices a round's steps are spread over.

    Without an accelerator that many devices of the CPU are asked for, which can only be done before JAX's backend
    starts.

    Raises
    ------
    ConfigurationError
        If JAX is not installed, or does not have so many devices.
    """
    try:
        import jax
    except ImportError:
        raise ConfigurationError(f"ps.TPUStrategy needs JAX: {install('jax')}") from None
    if not hasattr(jax, "shard_map"):
        raise ConfigurationError(f"ps.TPUStrategy needs JAX 0.7 or newer, found {jax.__version__}")
    if asked is not None:
        with suppress(RuntimeError):  # the backend has started: it may have enough
            jax.config.update("jax_num_cpu_devices", asked)  # of the CPU's backend alone; a TPU's are as they are
    return len(devices(asked))


def devices(asked: int | None) -> list[Any]:
    """Return the first devices of JAX; None: all."""
    import jax

    found = jax.devices()
    if asked is not None and len(found) < asked:
        raise ConfigurationError(
            f"ps.TPUStrategy(devices={asked}): JAX has {len(found)} ({found[0].platform}), and its backend has "
            "started, which settles their number; make the strategy before anything is computed with JAX, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={asked} before Python starts"
        )
    return list(found[:asked])
