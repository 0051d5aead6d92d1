"""Optimizers by the names and defaults that frameworks have; the arithmetic is the shards'.

Each is the `[optimizer]` table of a job file: its further keys (schedule, clip_norm, staleness_damping, ...) are keyword
arguments here. Equations: `parashard_server.state.kernels.reference`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Optimizer:
    """An update rule and its settings.

    Parameters
    ----------
    learning_rate : float
        > 0.
    **settings
        Keys of the job file's `[optimizer]` table.
    """

    kind: ClassVar[str]

    def __init__(self, learning_rate: float, **settings: Any) -> None:
        self.settings = {"kind": self.kind, "learning_rate": learning_rate, **settings}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items() if name != "kind")
        return f"{type(self).__name__}({given})"


class SGD(Optimizer):
    """w -= learning_rate * g; with momentum m > 0: v = m v + g, w -= learning_rate * v (or Nesterov's form)."""

    kind = "sgd"

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, *, nesterov: bool = False, **settings: Any
    ) -> None:
        super().__init__(learning_rate, **settings)
        if momentum:
            self.settings |= {"kind": "nesterov" if nesterov else "momentum", "momentum": momentum}


class Adagrad(Optimizer):
    """Duchi et al. (JMLR 2011)."""

    kind = "adagrad"

    def __init__(self, learning_rate: float = 0.01, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)


class RMSprop(Optimizer):
    """Hinton (2012)."""

    kind = "rmsprop"

    def __init__(self, learning_rate: float = 0.001, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)


class Adam(Optimizer):
    """Kingma and Ba (ICLR 2015); `weight_decay` is an L2 penalty."""

    kind = "adam"

    def __init__(self, learning_rate: float = 0.001, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)


class AdamW(Optimizer):
    """Loshchilov and Hutter (ICLR 2019): Adam with decoupled weight decay."""

    kind = "adamw"

    def __init__(self, learning_rate: float = 0.001, weight_decay: float = 0.01, **settings: Any) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **settings)


class FTRL(Optimizer):
    """McMahan et al. (KDD 2013)."""

    kind = "ftrl"

    def __init__(self, learning_rate: float = 0.01, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)


class LAMB(Optimizer):
    """You et al. (ICLR 2020)."""

    kind = "lamb"

    def __init__(self, learning_rate: float = 0.001, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)
