"""parashard: a parameter server for training on machines that come and go.

    import parashard as ps

    model = ps.torch.Model(Net, loss=torch.nn.functional.cross_entropy, metrics=["accuracy"])
    trainer = ps.Trainer(model, ps.Adam(1e-3), strategy=ps.ParameterServerStrategy(shards=2, workers=4))
    history = trainer.fit((x, y), epochs=5, batch_size=128, validation_data=(xv, yv))

Names are imported on first use: the services import this package too, and use none of them.
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
"""Public names by module; a module that is public itself is listed with its own name."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

for _stream in range(3):
    try:
        _os.fstat(_stream)
    except OSError:  # closed, as under cron: the next opened file would become a child's standard stream
        _os.set_inheritable(_os.open(_os.devnull, _os.O_RDWR), True)


class _Started:
    """State of this process when it imported this package, before the program could change it."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Read the state; again in a forked process, which becomes another one."""
        self.folder = _os.getcwd()  # working directory at the start; workers run the script from there
        self.main_file: str | None = getattr(_sys.modules.get("__main__"), "__file__", None)
        self.main_text: bytes | None = None  # the script's text as this process runs it; the file may be edited later
        with _suppress(OSError, TypeError, ValueError), open(self.main_file, "rb") as file:  # type: ignore[arg-type]  # None: there is none
            self.main_text = file.read()
        # 1, or the run directory that the script resumes. Like the next two, removed from the environment so that the
        # script's child processes do not inherit it.
        self.resume = _os.environ.pop("PARASHARD_RESUME", "")
        self.resume_flags = _os.environ.pop("PARASHARD_RESUME_FLAGS", "")  # flags of `parashard resume`, in JSON
        self.worker_arguments = _os.environ.pop("PARASHARD_WORKER_ARGUMENTS", None)  # set only in a worker process


_started = _Started()

# At its first operation JAX reserves 75 % of each GPU's memory, even in a process that only starts others. It reads
# this variable then, not on import. Workers inherit it, since other libraries' arrays need GPU memory too.
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
    import parashard.api.script as _script  # noqa: F401  # reports why a script ends before the worker's call
