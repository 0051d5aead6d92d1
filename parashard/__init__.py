"""parashard: a parameter server for training on machines that come and go.

    import parashard as ps

    model = ps.torch.Model(Net, loss=torch.nn.functional.cross_entropy, metrics=["accuracy"])
    trainer = ps.Trainer(model, ps.Adam(1e-3), strategy=ps.ParameterServerStrategy(shards=2, workers=4))
    history = trainer.fit((x, y), epochs=5, batch_size=128, validation_data=(xv, yv))

A name is imported when it is first used: the services, which import this package too, use none of them.
"""

import os as _os
import sys as _sys
from contextlib import suppress as _suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parashard import callbacks as callbacks
    from parashard import jax as jax
    from parashard import keras as keras
    from parashard import layers as layers
    from parashard import metrics as metrics
    from parashard import torch as torch
    from parashard.api.examples.cached import cached as cached
    from parashard.api.examples.cached import parquet as parquet
    from parashard.api.examples.source import open_data as open_data
    from parashard.api.fits import History as History
    from parashard.api.programs.calls import function as function
    from parashard.api.programs.cluster import Cluster as Cluster
    from parashard.api.programs.cluster import connect as connect
    from parashard.api.programs.coordinator import Coordinator as Coordinator
    from parashard.api.programs.coordinator import FunctionFailed as FunctionFailed
    from parashard.api.programs.coordinator import RemoteValue as RemoteValue
    from parashard.api.script import is_worker as is_worker
    from parashard.api.sidecar import SidecarEvaluator as SidecarEvaluator
    from parashard.api.strategies import CentralStorageStrategy as CentralStorageStrategy
    from parashard.api.strategies import MirroredStrategy as MirroredStrategy
    from parashard.api.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from parashard.api.strategies import OneDeviceStrategy as OneDeviceStrategy
    from parashard.api.strategies import ParameterServerStrategy as ParameterServerStrategy
    from parashard.api.strategies import TPUStrategy as TPUStrategy
    from parashard.api.subscription import Subscription as Subscription
    from parashard.api.subscription import subscribe as subscribe
    from parashard.api.trainer import Trainer as Trainer
    from parashard.errors import BadData as BadData
    from parashard.errors import ConfigurationError as ConfigurationError
    from parashard.errors import JobFailed as JobFailed
    from parashard.job.embeddings import Table as Table
    from parashard.launch.ray_settings import Ray as Ray
    from parashard.models.sequential import Sequential as Sequential
    from parashard.plan.optimizers import FTRL as FTRL
    from parashard.plan.optimizers import LAMB as LAMB
    from parashard.plan.optimizers import SGD as SGD
    from parashard.plan.optimizers import Adagrad as Adagrad
    from parashard.plan.optimizers import Adam as Adam
    from parashard.plan.optimizers import AdamW as AdamW
    from parashard.plan.optimizers import Momentum as Momentum
    from parashard.plan.optimizers import Nesterov as Nesterov
    from parashard.plan.optimizers import RMSProp as RMSProp
    from parashard.plan.optimizers import RowwiseAdagrad as RowwiseAdagrad

__version__ = "0.1.0"

_NAMES = {
    "parashard.api.examples.cached": "cached parquet",
    "parashard.api.programs.calls": "function",
    "parashard.api.programs.cluster": "Cluster connect",
    "parashard.api.programs.coordinator": "Coordinator FunctionFailed RemoteValue",
    "parashard.api.fits": "History",
    "parashard.api.script": "is_worker",
    "parashard.api.sidecar": "SidecarEvaluator",
    "parashard.api.examples.source": "open_data",
    "parashard.api.strategies": "CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy "
    "OneDeviceStrategy ParameterServerStrategy TPUStrategy",
    "parashard.api.subscription": "subscribe Subscription",
    "parashard.api.trainer": "Trainer",
    "parashard.callbacks": "callbacks",
    "parashard.errors": "BadData ConfigurationError JobFailed",
    "parashard.jax": "jax",
    "parashard.job.embeddings": "Table",
    "parashard.keras": "keras",
    "parashard.launch.ray_settings": "Ray",
    "parashard.layers": "layers",
    "parashard.metrics": "metrics",
    "parashard.models.sequential": "Sequential",
    "parashard.plan.optimizers": "Adagrad Adam AdamW FTRL LAMB Momentum Nesterov RMSProp RowwiseAdagrad SGD",
    "parashard.torch": "torch",
}
"""By module the public names that it has, or that it is."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

for _stream in range(3):
    try:
        _os.fstat(_stream)
    except OSError:  # closed, as under cron: a pipe or a lock would get its number, and be a child's standard stream
        _os.set_inheritable(_os.open(_os.devnull, _os.O_RDWR), True)


class _Started:
    """What this process was when it imported this package, before the program could change it."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Look again: this process was forked, and becomes another one."""
        self.folder = _os.getcwd()  # where the program was started: a script that is run again is started there, too
        self.main_file: str | None = getattr(_sys.modules.get("__main__"), "__file__", None)
        self.main_text: bytes | None = None  # the script's text as this process runs it: it may be edited while it runs
        with _suppress(OSError, TypeError, ValueError), open(self.main_file, "rb") as file:  # type: ignore[arg-type]  # None: there is none
            self.main_text = file.read()
        # 1, or the run directory that the script goes on with. Taken out of the environment, as are the next two, so
        # that no process of the script's inherits them.
        self.resume = _os.environ.pop("PARASHARD_RESUME", "")
        self.resume_flags = _os.environ.pop("PARASHARD_RESUME_FLAGS", "")  # flags of `parashard resume`, in JSON
        self.worker_arguments = _os.environ.pop("PARASHARD_WORKER_ARGUMENTS", None)  # what makes this process a worker


_started = _Started()

# JAX takes 75 % of each GPU at its first operation, also in a process that only starts others. It reads this variable
# then, not when it is imported. Workers inherit it: arrays that are not JAX's need room beside it.
_os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module 'parashard' has no attribute {name!r}")
    module = importlib.import_module(_PLACES[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


if _started.worker_arguments is not None:
    import parashard.api.script as _script  # noqa: F401  # from here on it tells why the script ends before its call
