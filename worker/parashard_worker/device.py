"""Device: computes gradients on the CPU or one CUDA GPU; models get the array namespace `xp`.

On a GPU weights, a batch and gradients are each transferred in one copy (`parashard_worker.gpu_copies`), and the step
loop waits once per step: for the loss, and whether the gradients are finite. Knows no model and no shard.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl

from parashard.client.pulled import aligned
from parashard.data.base import Array, Batch
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError, Unavailable
from parashard.plan.flat import FlatArrays
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s, Variable
from parashard.process import cuda
from parashard.process.logs import log
from parashard_worker.gpu_copies import ArraysIn, Gradients, GradientsOut, StepResults, Traffic, WeightsIn
from parashard_worker.gpu_norms import PLAIN, Scaling

NO_VARIABLES: Mapping[str, Variable] = MappingProxyType({})
Meanwhile = Callable[[], Batch | None]
"""Called while a step's results are computed; returns the batch that probably comes next, or None."""


def nothing_meanwhile() -> None:
    """Do nothing."""


class Received(NamedTuple):
    """A step's results on the host."""

    loss: float
    gradients: Gradients  # valid until the caller drops them
    finite: bool | None = None  # whether all gradients are finite; if True, they are scaled. None: neither was done


class Cpu:
    """NumPy on the host."""

    host_memory = staticmethod(aligned)
    arrived = None  # pulled values are in the memory where they are used
    traffic = None  # nothing is copied to another memory

    def __init__(self) -> None:
        self.xp: Any = np
        self.name = "cpu"

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Return the variables as arrays of `xp`."""
        return variables

    def batch_from_host(self, batch: Batch) -> Batch:
        """Return the batch with inputs and targets as arrays of `xp`."""
        return batch

    def to_host(
        self,
        loss: Array | float,
        gradients: Mapping[str, Array],
        variables: Mapping[str, Variable] = NO_VARIABLES,
        scaling: Scaling = PLAIN,
        plan: Plan | None = None,
        meanwhile: Meanwhile = nothing_meanwhile,
    ) -> Received:
        """Return a loss and gradients of `xp` as a number and NumPy arrays of float32, without scaling."""
        return Received(float(loss), {name: np.asarray(gradient, np.float32) for name, gradient in gradients.items()})

    def fingerprint(self) -> str:
        """Return the names of processor, NumPy, BLAS with its kernel and threads, and loaded frameworks."""
        pools = [
            f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')} x{pool['num_threads']}"
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas" and ("jax" in sys.modules or "scipy.libs" not in pool["filepath"])
        ]  # Numba loads SciPy's BLAS, which only JAX calls
        return "; ".join([f"{_processor()}", f"numpy {np.__version__}", *sorted(set(pools)), *_frameworks()])


class Gpu:
    """CuPy on one CUDA device; raise ConfigurationError if CuPy or the device is missing.

    One thread computes on it; `arrived` and waits for gradients may be called in other threads.
    """

    def __init__(self, index: int) -> None:
        self._device = cuda.device(index)
        self._cupy = self.xp = cuda.namespace()
        self.traffic = Traffic()
        self._weights = WeightsIn(self._cupy, self.traffic)
        self._batches = ArraysIn(self._cupy, self.host_memory, self.traffic)
        self._rows = ArraysIn(self._cupy, self.host_memory, self.traffic)
        self._gradients: GradientsOut | None = None  # for the variables of the last step
        self._ahead: Batch | None = None  # on the GPU, the batch that probably comes next
        self.name = cuda.device_name(index)

    def host_memory(self, elements: int) -> Float32s:
        """Return uninitialized page-locked memory, or ordinary memory, with slower copies, if CUDA refuses."""
        try:
            self._device.use()  # the current device belongs to the thread
            return cuda.page_locked((elements,), np.float32)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning("not-page-locked", bytes=4 * elements, error=str(error))
            return aligned(elements)

    def arrived(self, variables: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        """Begin to copy pulled variables, in any thread; return an object that `variables_from_host` recognizes."""
        # If both sets on the GPU are in use, or the copy fails, they are copied by `variables_from_host`.
        if not isinstance(variables, FlatArrays) or self.has(variables):
            return variables
        try:
            self._device.use()
            return self._weights.arrived(variables)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning("weights-not-copied", error=str(error))  # the step will fail if the GPU does
            return variables

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Return variables, and rows of tables with them, on the GPU, valid until the next call."""
        # Pulled variables without rows are returned as one of two `FlatArrays`, which are the same objects each time.
        # Variables on the GPU are returned unchanged. Variables that are not in one run are copied into new memory,
        # which stays valid.
        self._device.use()
        if not isinstance(variables, FlatArrays):
            arrays: Mapping[str, Array] = self._rows.ready(dict(variables), new=True)
            return arrays
        flat = variables if self.has(variables) else self._weights.ready(variables)
        if len(variables) == len(flat.layout.places):
            return flat
        rows = {name: values for name, values in variables.items() if name not in flat.layout.places}
        return flat.with_rows(self._rows.ready(rows))

    def has(self, variables: Mapping[str, Array]) -> bool:
        """Tell whether variables are on the GPU already."""
        return isinstance(variables, FlatArrays) and isinstance(variables.run, self._cupy.ndarray)

    def batch_from_host(self, batch: Batch) -> Batch:
        """Return a batch with its arrays on the GPU, valid until the next call."""
        self._device.use()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._batches.release_previous()  # also if `batch` is another one: it is copied into the previous buffer
            if ahead.on_host is batch:
                return ahead
        return self._copied(batch)

    def _copy_ahead(self, batch: Batch) -> None:
        """Begin to copy the batch that probably comes next, during the computation of the present one."""
        self._ahead = None
        try:
            if rows_of(batch.inputs):
                self._ahead = self._copied(batch)
        except Exception as error:  # noqa: BLE001  # its own step will raise it again
            log.info("batch-not-copied-ahead", error=repr(error))

    def _copied(self, batch: Batch) -> Batch:
        given = batch.inputs, batch.targets, batch.places, *([] if batch.weights is None else [batch.weights])
        inputs, targets, places, *weights = self._batches.ready(given)
        there = replace(batch, inputs=inputs, targets=targets, weights=weights[0] if weights else None, places=places)
        return replace(there, on_host=batch)

    def gathered(
        self,
        loss: Array | float,
        gradients: Mapping[str, Array],
        variables: Mapping[str, Variable],
        scaling: Scaling,
        plan: Plan | None = None,
        meanwhile: Meanwhile = nothing_meanwhile,
    ) -> StepResults:
        """Gather gradients of variables on the GPU, as `GradientsOut.gathered` does: the step's one synchronisation."""
        self._device.use()

        def until_it_is_there() -> None:
            following = meanwhile()
            if following is not None:
                self._copy_ahead(following)

        if self._gradients is None or self._gradients.variables is not variables:
            self._gradients = GradientsOut(self._cupy, self._device, variables, self.host_memory, self.traffic, plan)
        try:
            return self._gradients.gathered(loss, gradients, scaling, until_it_is_there)
        finally:
            self._weights.release_present()

    def to_host(
        self,
        loss: Array | float,
        gradients: Mapping[str, Array],
        variables: Mapping[str, Variable] = NO_VARIABLES,
        scaling: Scaling = PLAIN,
        plan: Plan | None = None,
        meanwhile: Meanwhile = nothing_meanwhile,
    ) -> Received:
        """Return a loss, whether all gradients are finite, and the scaled gradients as a pending copy to the host."""
        # With gradients of rows of tables, which `variables` does not have, all gradients are copied synchronously, and
        # neither checked nor scaled. If one is not finite, they are copied synchronously, too. `plan`: of `variables`.
        self._device.use()
        if not gradients:
            self.traffic.count_wait(self._cupy.cuda.get_current_stream().synchronize)  # weights' memory is reused next
            self._weights.release_present()
            return Received(float(loss), {})
        of_rows = {name: gradients[name] for name in gradients if name not in variables}
        found = self.gathered(loss, gradients, variables, PLAIN if of_rows else scaling, plan, meanwhile)
        assert self._gradients is not None
        if of_rows:
            rows = {name: self._cupy.asarray(g, np.float32).get() for name, g in of_rows.items()}
            self.traffic.add(out_bytes=sum(gradient.nbytes for gradient in rows.values()))
            return Received(found.loss, {**self._gradients.fetched(found), **rows})
        if not found.finite:
            return Received(found.loss, self._gradients.fetched(found), False)
        return Received(found.loss, self._gradients.begin_copy_to_host(found), True)

    def fingerprint(self) -> str:
        """Return the names of GPU, CuPy, CUDA runtime, which includes cuBLAS, and loaded frameworks."""
        runtime = self._cupy.cuda.runtime.runtimeGetVersion()
        names = [self.name.partition(" ")[2], f"cupy {self._cupy.__version__}", f"cuda {runtime}", *_frameworks()]
        return "; ".join(names)


Device = Cpu | Gpu
"""Array transfers and the namespace `xp`; `fingerprint` names everything that determines the bits of a gradient."""


def open_device(asked: str, worker: str = "") -> Device:
    """Return the device that a job file or a flag names, for a worker such as "worker-3"."""
    # "cuda" selects a GPU by the worker's number, to spread the workers of a machine; "auto" does the same if a GPU is
    # usable, else selects the CPU. Raises ConfigurationError if a requested GPU does not exist, or the name is unknown;
    # Unavailable if a requested GPU or its driver fails.
    if asked == "cpu":
        return Cpu()
    if asked == "auto":
        try:
            return Gpu(cuda.spread(worker, cuda.device_count()))
        except (ConfigurationError, Unavailable):
            return Cpu()
    index = cuda.index_of(asked, worker)
    if index is None:
        raise ConfigurationError(f"device {asked!r} is unknown; allowed: auto, cpu, cuda, cuda:N")
    return Gpu(index)


def on_host(arrays: Mapping[str, Array]) -> dict[str, Float32s]:
    """Return arrays in host memory, copied if they are on a GPU."""
    return {name: array if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}


def _frameworks() -> list[str]:
    """Return the loaded frameworks with their versions; PyTorch with its thread count, which changes its sums."""
    loaded = [(name, sys.modules[name]) for name in ("jax", "jaxlib", "keras", "torch") if name in sys.modules]
    found = [f"{name} {getattr(module, '__version__', '')}" for name, module in loaded]
    torch = sys.modules.get("torch")
    return found if torch is None else [*found[:-1], f"{found[-1]} x{torch.get_num_threads()}"]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return f"{platform.machine()} {models[0] if models else os.uname().release}"
