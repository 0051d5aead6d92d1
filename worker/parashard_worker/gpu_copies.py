"""GPU copies: weights, batches and gradients between the host and one GPU, each kind in a single contiguous copy.

Buffers are allocated once, two of each kind on the GPU, so that a pull, a step's kernels and a push overlap. Weights
are copied on one stream, batches on another, gradients on a third; kernels run on the caller's stream. The streams are
non-blocking: they do not synchronise with the null stream, and events establish every order that matters. Events are
created once, too: recording one again does not affect waits on its earlier recording. Knows no step and no model.
Created by `parashard_worker.device`.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.encodings.gpu import TransferLayout, leaves_shorter
from parashard.encodings.gpu_feedback import HeldResidues
from parashard.errors import BadData, ParashardError
from parashard.plan.flat import ALIGNMENT_BYTES, FlatArrays, FlatLayout, GradientRun
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s, Variable, norm_of
from parashard.process.cuda_code import elementwise
from parashard_worker.gpu_norms import PLAIN, Norms, Scaling

HostMemory = Callable[[int], Float32s]
"""Allocates a vector of this many float32 in memory with fast copies from and to the GPU."""
LEAVING_MAX = 32  # steps whose gradients are being copied or pushed; a session has at most 9
_STATE, _GRADIENT = 1, 2  # kinds of elements of a run
LOOK = "if (kind && !isfinite(value)) told[1] = 1.0;"
WEIGH = "if (kind == 2) value = exact_product(value, weight);"
ROOM = 1.25  # buffer size relative to the first batch: batches may differ in length


class NotCopied(ParashardError):
    """The GPU failed while a step's gradients were copied to the host."""


def _nobody() -> None:
    """Return None, as a dead weak reference does."""


class Traffic:
    """Bytes copied to and from a GPU, and seconds spent waiting for steps' results. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.in_bytes = self.out_bytes = 0  # weights and batches; gradients
        self.waited_s = 0.0

    def add(self, *, in_bytes: int = 0, out_bytes: int = 0, waited_s: float = 0.0) -> None:
        """Count a copy or a wait."""
        with self._lock:
            self.in_bytes += in_bytes
            self.out_bytes += out_bytes
            self.waited_s += waited_s

    def count_wait(self, wait: Callable[[], None]) -> None:
        """Wait for a step's results, and count how long that takes."""
        began_s = time.perf_counter()
        wait()
        self.add(waited_s=time.perf_counter() - began_s)


class _Weights:
    """One set of the variables on the GPU."""

    def __init__(self, cupy: Any, layout: FlatLayout) -> None:
        self.variables = layout.over(cupy.empty(layout.elements, np.float32))
        self.copied = cupy.cuda.Event(disable_timing=True)
        self.left = cupy.cuda.Event(disable_timing=True)
        self.left.record(cupy.cuda.get_current_stream())  # kernels may still read this memory's previous content
        self.source: Any = None  # the host's memory must outlive its copy
        self.claim: Callable[[], Float32s | None] = _nobody  # weak reference to the run copied here for a later step


class WeightsIn:
    """Two sets of the variables on the GPU, filled in turn, each by one copy of a host run.

    A host run may be overwritten once its step is computed: its copy is complete by then.
    """

    def __init__(self, cupy: Any, traffic: Traffic) -> None:
        self._cupy, self._traffic = cupy, traffic
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()
        self._sets: list[_Weights] = []  # in order of use, the latest last
        self._present: _Weights | None = None  # the set that the model is computing with

    def arrived(self, values: FlatArrays) -> FlatArrays:
        """Begin to copy pulled values if a set is free; return them in a form that `ready` recognizes; any thread."""
        with self._lock:
            free = next((one for one in self._sets if one is not self._present and one.claim() is None), None)
            if free is None or free.variables.layout != values.layout:
                return values
            self._begin(free, values.run)
            mine = values.run.view()  # identifies this pull: a later pull may reuse the memory
            free.claim = weakref.ref(mine)
            return FlatArrays(values.layout, mine, values)

    def ready(self, values: FlatArrays) -> FlatArrays:
        """Return values on the GPU; the calling thread's stream may read them until `release_present`."""
        stream = self._cupy.cuda.get_current_stream()
        self.release_present()
        with self._lock:
            if not self._sets or self._sets[0].variables.layout != values.layout:
                self._sets = [_Weights(self._cupy, values.layout) for _ in range(2)]
            found = next((one for one in self._sets if one.claim() is values.run), None)
            if found is None:
                found = next((one for one in self._sets if one.claim() is None), self._sets[0])
                self._begin(found, values.run)
            found.claim = _nobody
            self._sets.remove(found)
            self._sets.append(found)
            self._present = found
        stream.wait_event(found.copied)
        return found.variables

    def release_present(self) -> None:
        """End the use of the present set: later work on the calling thread's stream does not read it."""
        with self._lock:
            if self._present is not None:
                self._present.left.record(self._cupy.cuda.get_current_stream())
                self._present = None

    def _begin(self, into: _Weights, run: Float32s) -> None:
        if not into.copied.done:  # a copy for a step that was given back, whose `source` is released below
            into.copied.synchronize()
        self._stream.wait_event(into.left)
        into.variables.run.set(run, stream=self._stream)
        self._traffic.add(in_bytes=run.nbytes)
        into.source = run
        into.copied.record(self._stream)


class _Side:
    """Host and GPU memory for one batch."""

    def __init__(self, cupy: Any) -> None:
        self.host: Any = np.empty(0, np.uint8)
        self.device: Any = None
        self.copied = cupy.cuda.Event(disable_timing=True)
        self.left = cupy.cuda.Event(disable_timing=True)


class ArraysIn:
    """Arrays of any types, packed in host memory and copied to the GPU in one copy.

    Two buffers alternate: the next but one call reuses the memory.
    """

    def __init__(self, cupy: Any, host_memory: HostMemory, traffic: Traffic) -> None:
        self._cupy, self._traffic = cupy, traffic
        self._host_memory = host_memory
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._sides = deque(_Side(cupy) for _ in range(2))

    def ready(self, tree: Tree, *, new: bool = False) -> Tree:
        """Copy a tree of arrays to the GPU, for the calling thread's stream; `new`: into memory that is not reused."""
        stream, begins, end = self._cupy.cuda.get_current_stream(), [], 0
        for _, values in leaves(tree):
            if values.dtype.hasobject:
                raise BadData("a batch has an array of Python objects, which a GPU cannot hold; allowed: numbers")
            begins.append(end)
            size_bytes = math.prod(values.shape) * values.dtype.itemsize
            end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        last, side = self._sides
        self._sides.reverse()
        last.left.record(stream)
        if not side.copied.done:
            side.copied.synchronize()  # the host's memory is written next
        if side.device is None or len(side.host) < end:
            room = -(-max(1, int(ROOM * end)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            host, device = self._host_memory(room // 4).view(np.uint8), self._cupy.empty(room, np.uint8)
            side.host, side.device = host, device  # both or, if an allocation fails, neither
            side.left.record(stream)  # kernels may still read this memory's previous content
        device = side.device
        if new:
            device = self._cupy.empty(max(1, end), np.uint8)
            side.left.record(stream)  # likewise
        placed: Iterator[int] = iter(begins)
        there = map_leaves(lambda values: self._placed(values, side.host, device, next(placed)), tree)
        self._stream.wait_event(side.left)
        if end:
            device[:end].set(side.host[:end], stream=self._stream)
            self._traffic.add(in_bytes=end)
        side.copied.record(self._stream)
        stream.wait_event(side.copied)
        return there

    def release_previous(self) -> None:
        """Free the buffer of the arrays before the last ones: later work reads only the last."""
        self._sides[1].left.record(self._cupy.cuda.get_current_stream())

    def _placed(self, values: Any, host: Any, device: Any, begin: int) -> Array:
        """Write an array into the host buffer, and return its place on the GPU."""
        np.copyto(np.ndarray(values.shape, values.dtype, host, begin), values)
        return self._cupy.ndarray(values.shape, values.dtype, device.data + begin)


class _Leaving:
    """Host memory for a step's gradients."""

    def __init__(self, cupy: Any, memory: Any, arrays: Mapping[str, Any], taken: HeldResidues | None = None) -> None:
        self.memory, self.arrays, self.taken = memory, arrays, taken
        self.copied = cupy.cuda.Event(disable_timing=True)
        self.owner: Callable[[], PendingGradients | None] = _nobody


class PendingGradients:
    """A step's gradients while they are copied to the host; their host memory is reused once this object is dropped.

    Attributes
    ----------
    norm : float, optional
        Norm of all gradients together, if `Scaling.tells_norm`.
    """

    def __init__(self, memory: _Leaving, found: StepResults, out: GradientsOut) -> None:
        self.norm = found.norm
        self._memory, self._found, self._out = memory, found, out

    def wait(self) -> dict[str, Any]:
        """Wait for the copy, in any thread; return the arrays to push: views that must not outlive this object.

        A variable in bfloat16 or float16 is returned as its codes, of uint16, and one in int8 as `EncodedParts`.
        """
        self._out.wait_for(self._memory.copied)
        return {name: self._memory.arrays[name] for name in self._found.gradients}

    def values(self) -> Mapping[str, Float32s]:
        """Return the gradients in float32, by a wait or, if codes are sent, a copy; before the next step starts."""
        return self._out.fetched(self._found) if self._out.leaves_codes else self.wait()


Gradients = dict[str, Float32s] | PendingGradients
"""A step's gradients, by variable and table, or a pending copy of them to the host."""


def wait_for_gradients(gradients: Mapping[str, Float32s] | PendingGradients) -> Mapping[str, Float32s]:
    """Wait until the host has the gradients, and return them; raise NotCopied if the copy fails."""
    return gradients.values() if isinstance(gradients, PendingGradients) else gradients


class _Gathered:
    """One flat array of gradients on the GPU."""

    def __init__(self, cupy: Any, layout: FlatLayout, words: int) -> None:
        self.arrays = layout.over(cupy.zeros(layout.elements, np.float32))
        self.leaving = cupy.empty(words, np.uint16) if words else self.arrays.run  # copied to the host
        self.sent = cupy.cuda.Event(disable_timing=True)
        self.zero = set(layout.places)  # names whose part of the run is zero

    def take(self, gradients: Mapping[str, Array], cupy: Any) -> None:
        """Copy gradients into the array; variables without one become zero."""
        if isinstance(gradients, GradientRun) and gradients.layout == self.arrays.layout:
            self.arrays.run[...] = gradients.run
            self.zero.clear()
            return
        run = gradients.run if isinstance(gradients, FlatArrays) and isinstance(gradients.run, cupy.ndarray) else None
        whole = run is not None and gradients.layout == self.arrays.layout  # type: ignore[attr-defined]
        if whole:
            self.arrays.run[...] = run
            self.zero.clear()
        for name, mine in self.arrays.items():
            given = gradients.get(name)
            if given is not None:
                self.zero.discard(name)
                if not whole or not _is_place(given, run, self.arrays.layout.places[name][0]):
                    mine[...] = cupy.asarray(given)
            elif name not in self.zero:
                mine.fill(0)
                self.zero.add(name)


def _is_place(given: Any, run: Any, place: slice) -> bool:
    """Tell whether an array is the slice of `run` at `place`."""
    return bool(getattr(getattr(given, "data", None), "ptr", None) == run.data.ptr + 4 * place.start)


class StepResults(NamedTuple):
    """A step's results as `GradientsOut.gathered` returns them."""

    loss: float
    finite: bool
    gradients: FlatArrays
    """On the GPU, clipped and weighted, valid until the second next step; absent gradients are zero in its run."""
    norm: float | None = None
    """Norm of all gradients, if `Scaling.tells_norm`."""


def weigh_kernel(cupy: Any) -> Callable[..., None]:
    """Return a kernel that multiplies gradients, not state, by a weight, in place, bit-identical to the host."""
    return elementwise(cupy, "weigh", "uint8 kind, float32 weight", "float32 value", WEIGH)


class GradientsOut:
    """Gathers gradients in one flat array on the GPU, checks, clips and weights them, and copies them to the host.

    Gradients that are pushed in another encoding than float32 are copied so.

    Parameters
    ----------
    cupy : module
    device : cupy.cuda.Device
    variables : mapping of str to Variable
        Of the plan; state without a gradient is neither clipped nor weighted.
    host_memory : callable (elements) -> ndarray of float32
    traffic : Traffic
        Counts copies and waits.
    plan : Plan, optional
        int8 and top-k are encoded by its partitions; None: such variables are copied in float32.
    """

    def __init__(
        self,
        cupy: Any,
        device: Any,
        variables: Mapping[str, Variable],
        host_memory: HostMemory,
        traffic: Traffic,
        plan: Plan | None = None,
    ) -> None:
        self._cupy, self._device, self._traffic = cupy, device, traffic
        self.variables = variables
        self._layout = layout = FlatLayout.of(variables)
        self._host_memory = host_memory
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.leaves_codes = leaves_shorter(variables.values())
        self._words = TransferLayout(cupy, layout, variables, plan, self._launching) if self.leaves_codes else None
        words = self._words.words if self._words is not None else 0
        self._flats = deque(_Gathered(cupy, layout, words) for _ in range(2))
        self._leaving: list[_Leaving] = []
        self._told = cupy.empty(2, np.float64)  # [loss, 1.0 if a gradient is not finite]
        self._told_loss = self._told[:1].reshape(())
        self._host_told = host_memory(4).view(np.float64)
        self._norms: Norms | None = None  # created on first use
        self._computed = cupy.cuda.Event(disable_timing=True)
        self._look = elementwise(cupy, "not_finite", "uint8 kind, float32 value", "raw float64 told", LOOK)
        self._weigh = weigh_kernel(cupy)
        kinds = np.zeros(layout.elements, np.uint8)
        for name, (place, _) in layout.places.items():
            kinds[place] = _STATE if variables[name].state else _GRADIENT
        self._kinds = cupy.asarray(kinds)  # 0: padding between variables

    def gathered(
        self,
        loss: Array | float,
        gradients: Mapping[str, Array],
        scaling: Scaling = PLAIN,
        meanwhile: Callable[[], None] = _nobody,
    ) -> StepResults:
        """Gather and scale the gradients of the layout's variables, and wait until the step's results are computed.

        `meanwhile` is called after all work is submitted, before the wait. A second wait is needed only if variables
        were clipped and the norm of all is needed after that.
        """
        cupy, told, stream = self._cupy, self._told, self._cupy.cuda.get_current_stream()
        flat = self._flats[0]
        self._flats.rotate(1)
        stream.wait_event(flat.sent)
        flat.take(gradients, cupy)
        run = flat.arrays.run
        told.fill(0)
        on_host = isinstance(loss, float | int | np.generic | np.ndarray)
        if not on_host:
            self._told_loss[...] = cupy.asarray(loss)
        if scaling.weight != 1.0 and not scaling.clips:
            self._weigh(self._kinds, np.float32(scaling.weight), run)
        self._look(self._kinds, run, told)  # last: a weight above 1 may make a number infinite
        if scaling.clips or scaling.tells_norm:
            self._ask_norms(run, stream)
        told.get(stream=stream, out=self._host_told, blocking=False)
        self._computed.record(stream)
        names = gradients.found if isinstance(gradients, GradientRun) else gradients
        here = FlatArrays(self._layout, run, {name: flat.arrays[name] for name in names if name in flat.arrays})
        meanwhile()  # work that it submits to the stream comes after the event
        self._traffic.count_wait(self._computed.synchronize)
        number, finite = float(loss if on_host else self._host_told[0]), not bool(self._host_told[1])
        if finite and scaling.clips:
            self._clip(run, scaling, stream)
            self._computed.record(stream)
        norm = self._norm() if finite and scaling.tells_norm else None
        return StepResults(number, finite, here, norm)

    def begin_copy_to_host(self, found: StepResults) -> PendingGradients:
        """Begin the copy of gradients to the host."""
        flat = self._flats[-1]
        assert found.gradients.run is flat.arrays.run, "one step after the other"
        memory = next(
            (one for one in self._leaving if one.owner() is None and not (one.taken and one.taken.open)), None
        )
        if memory is None:
            assert len(self._leaving) < LEAVING_MAX, "gradients that were pushed are kept"
            memory = self._new_leaving()
            self._leaving.append(memory)
        pending = PendingGradients(memory, found, self)
        memory.owner = weakref.ref(pending)
        if self._words is not None:  # first, so that residues are given back even if a line below fails
            self._words.settle_when_dropped(pending, memory.taken)
        self._stream.wait_event(self._computed)
        if self._words is not None:
            self._words.write(flat.arrays.run, flat.leaving, found.gradients, memory.taken)
        # An earlier copy that was not waited for may still be writing there; this one follows it on the stream.
        flat.leaving.get(stream=self._stream, out=memory.memory, blocking=False)
        self._traffic.add(out_bytes=flat.leaving.nbytes)
        memory.copied.record(self._stream)
        flat.sent.record(self._stream)
        return pending

    def fetched(self, found: StepResults) -> dict[str, Float32s]:
        """Copy gradients to host memory synchronously."""
        self._device.use()
        on_host = self._layout.over(found.gradients.run.get())
        self._traffic.add(out_bytes=on_host.run.nbytes)
        return {name: on_host[name] for name in found.gradients}

    def wait_for(self, copied: Any) -> None:
        """Wait for a copy, in any thread."""
        try:
            self._device.use()  # the current device belongs to the thread
            copied.synchronize()  # releases the GIL
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise NotCopied(f"the GPU failed while gradients were copied to the host: {error}") from error

    def _new_leaving(self) -> _Leaving:
        if self._words is None:
            arrays = self._layout.over(self._host_memory(self._layout.elements))
            return _Leaving(self._cupy, arrays.run, arrays)
        words = self._host_memory(-(-self._words.words // 2)).view(np.uint16)[: self._words.words]
        taken = self._words.new_residues()
        return _Leaving(self._cupy, words, self._words.over(words, taken), taken)

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Launch kernels on the stream of outgoing gradients, in any thread."""
        self._device.use()
        with self._stream:
            yield

    def _wait(self, stream: Any) -> None:
        self._computed.record(stream)
        self._traffic.count_wait(self._computed.synchronize)

    def _ask_norms(self, run: Any, stream: Any) -> None:
        if self._norms is None:
            names = [name for name, variable in self.variables.items() if not variable.state and not variable.frozen]
            self._norms = Norms(self._cupy, self._layout, names, self._host_memory)
        self._norms.ask(run, stream)

    def _norm(self) -> float:
        """Return the norm of all gradients together; its parts must be on the host."""
        assert self._norms is not None
        return norm_of(self._norms.squares().values())

    def _clip(self, run: Any, scaling: Scaling, stream: Any) -> None:
        """Clip each variable's gradient, then all together, and apply the weight, as `clip_and_weight` does."""
        assert self._norms is not None
        weight, bound, each, clipped = scaling.weight, scaling.clip_norm, scaling.variable_clip_norm, False
        if each is not None:
            for name, squared in self._norms.squares().items():
                norm = norm_of([squared])
                if norm > each:
                    place = self._layout.places[name][0]
                    self._weigh(self._kinds[place], np.float32(each / norm), run[place])
                    clipped = True
        if bound is not None:
            if clipped:
                self._ask_norms(run, stream)
                self._wait(stream)
            norm = self._norm()
            if norm > bound:
                weight *= bound / norm
        if weight != 1.0:
            self._weigh(self._kinds, np.float32(weight), run)
        if scaling.tells_norm:
            self._ask_norms(run, stream)
            self._wait(stream)
