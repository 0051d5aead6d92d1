"""A module's tensors in a step: on the host, or on a GPU without waiting for it.

Both classes convert pulled arrays to tensors and return the arrays to push, with bit-identical state. On a GPU nothing
here waits for the device, and the number of operations does not grow with the number of variables: PyTorch moves many
tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.models.framework import FROZEN, in_one_run, pushed_floats, pushed_for, rows, value_of
from parashard.models.torch.arrays import array_of, gradient_of, tensor_of, torch
from parashard.plan.flat import FlatArrays, FlatLayout, GradientRun
from parashard.plan.state import AVERAGE, COUNTER, COUNTER_BYTES, SUM, average_factor
from parashard.plan.variables import Float32s

Tensors = Mapping[str, torch.Tensor]
Kinds = Mapping[str, str]
_NO_LAYOUT = FlatLayout({}, 0)
_DEFAULT_STREAMS = {0, 1, 2}
"""Handles of CUDA's default streams, of a process and of a thread: each waits for the other."""


class HostTensors:
    """Tensors on the host: views of pulled arrays, and copies of those without a gradient."""

    def __init__(self, own: Tensors, kinds: Kinds) -> None:
        self._own, self._kinds = own, kinds  # the module's tensors, for shapes and dtypes; from `kinds_of`

    def pulled(self, variables: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return tensors with the pulled values, converted to the module's types."""
        pulled = {}
        for name, own in self._own.items():
            tensor = tensor_of(value_of(variables[name], self._kinds[name]))
            if tensor.shape != own.shape:
                tensor = tensor.reshape(own.shape)
            pulled[name] = tensor if tensor.dtype == own.dtype else tensor.to(own.dtype)
        return pulled

    def copies(self, fixed: Tensors) -> dict[str, torch.Tensor]:
        """Return copies of pulled tensors without a gradient, which a step may write."""
        self._fixed = fixed
        return {name: tensor.clone() for name, tensor in fixed.items()}

    def loss(self, loss: torch.Tensor) -> float:
        """Return the loss as a float."""
        return float(loss.detach())

    def pushed(self, gradients: Mapping[str, torch.Tensor | None], after: Tensors, scale: float) -> dict[str, Any]:
        """Return the arrays to push: gradients divided by a scale, and those of the state, `after` the step."""
        found: dict[str, Any] = {
            name: None if gradient is None else rows(gradient_of(gradient, np, scale))
            for name, gradient in gradients.items()
        }
        for name, before in self._fixed.items():
            if self._kinds[name] != FROZEN:
                found[name] = pushed_for(self._kinds[name], array_of(before), array_of(after[name]))
        return found


class DeviceTensors:
    """Tensors on a GPU: pulled arrays lie in one contiguous run, and so do gradients."""

    # PyTorch must compute on CuPy's current stream, which orders the writes of pulled values. Each step's run of
    # gradients is from PyTorch's allocator, which reuses its memory for a later step once the last array of it is
    # dropped: code that copies it on another stream must keep an array until the copy is done.

    def __init__(self, own: Tensors, kinds: Kinds, xp: Any) -> None:
        self._own, self._kinds, self.xp = own, kinds, xp
        self._types = {tensor.dtype for name, tensor in own.items() if kinds[name] != COUNTER} - {torch.float32}
        self._counters = [name for name in own if kinds[name] == COUNTER]
        self._are_single = all(not own[name].ndim and own[name].dtype == torch.int64 for name in self._counters)
        self._averages = [name for name in own if kinds[name].startswith(AVERAGE)]
        self._floats = [*self._averages, *(name for name in own if kinds[name] == SUM)]
        self._layout = _NO_LAYOUT
        self._index = _Index(_NO_LAYOUT, torch.empty(0), torch.empty(0))
        self._copies: dict[str, torch.Tensor] = {}
        self._alike: list[list[str]] = []  # their names, grouped by type
        self._fixed: Tensors = {}  # sources of the last step's copies
        self._constants: dict[str, torch.Tensor] = {}  # on the device, made once
        self._due = {name for name, kind in kinds.items() if kind != FROZEN}
        self._kept = _Kept(torch.empty(0), {})
        self._order: _Order | None = None  # of the last step's pieces

    def pulled(self, variables: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return tensors with the pulled values, converted to the module's types.

        Tensors are cached with the arrays whose memory they share. Trained ones are returned as their `data`, which has
        new hooks and a new version counter in each step.
        """
        flat = in_one_run(variables, self._own, self.xp)
        if self not in flat.kept:
            flat.kept[self] = _Kept(tensor_of(flat.run), self._views(flat))
        self._kept, self._layout = flat.kept[self], flat.layout
        if self._index.layout is not flat.layout:
            self._index = _Index(flat.layout, self._index_of(self._floats), self._index_of(self._counters))
        if self._kept.run.is_cuda:
            check_streams(
                torch.cuda.current_stream(self._kept.run.device).cuda_stream, self.xp.cuda.get_current_stream().ptr
            )
        pulled = self._kept.coming or self._as_data()
        self._kept.coming = None
        for dtype in self._types:
            converted = self._kept.run.to(dtype)
            for name, own in self._own.items():
                if own.dtype == dtype and self._kinds[name] != COUNTER:
                    pulled[name] = converted[flat.layout.places[name][0]].view(own.shape).data
        return pulled | self._counted()

    def _as_data(self) -> dict[str, torch.Tensor]:
        return {name: tensor if self._kinds[name] else tensor.data for name, tensor in self._kept.tensors.items()}

    def _views(self, flat: FlatArrays) -> dict[str, torch.Tensor]:
        names = (name for name in self._own if self._kinds[name] != COUNTER)
        return {name: tensor_of(flat[name]).reshape(self._own[name].shape) for name in names}

    def _index_of(self, names: Sequence[str]) -> torch.Tensor:
        """Return the indices in a run of these variables' elements, concatenated."""
        places = (self._layout.places[name][0] for name in names)
        index = np.concatenate([np.arange(0), *(np.arange(place.start, place.stop) for place in places)])
        return torch.from_numpy(index).to(self._kept.run.device)

    def _counted(self) -> dict[str, torch.Tensor]:
        """Return counters as whole numbers: the sums of `counter_values`, modulo 2^64."""
        if not self._counters:
            return {}
        worth = self._constant("worth", lambda: [1 << 8 * place for place in range(COUNTER_BYTES)])
        places = self._kept.run.index_select(0, self._index.counters).view(-1, COUNTER_BYTES)
        numbers = (places.to(torch.int64) * worth).sum(-1)
        if self._are_single:
            return dict(zip(self._counters, numbers.unbind(), strict=True))
        return {
            name: piece.view(self._own[name].shape).to(self._own[name].dtype)
            for name, piece in self._split(numbers, self._counters).items()
        }

    def copies(self, fixed: Tensors) -> dict[str, torch.Tensor]:
        """Return copies of pulled tensors without a gradient, which a step may write; their memory is reused.

        Each has its own memory: with `torch.compile` a module that writes several tensors of one memory is slow.
        """
        if self._copies.keys() != fixed.keys():
            self._copies = {name: torch.empty_like(tensor) for name, tensor in fixed.items()}
            self._alike = [
                [name for name in fixed if fixed[name].dtype == dtype]
                for dtype in dict.fromkeys(tensor.dtype for tensor in fixed.values())
            ]
        for names in self._alike:
            torch._foreach_copy_([self._copies[name] for name in names], [fixed[name] for name in names])
        self._fixed = fixed
        return {name: copy.data for name, copy in self._copies.items()}

    def loss(self, loss: torch.Tensor) -> Array:
        """Return the loss as an array on the device, of shape ()."""
        return self.xp.from_dlpack(loss.detach().float())

    def pushed(self, gradients: Mapping[str, torch.Tensor | None], after: Tensors, scale: float) -> GradientRun:
        """Return the arrays to push: gradients divided by a scale, and those of the state, `after` the step."""
        pieces = {name: g.to_dense() if g.is_sparse else g for name, g in gradients.items() if g is not None}
        with torch.no_grad():
            if pieces and (scale != 1 or any(g.dtype != torch.float32 for g in pieces.values())):
                whole = _concatenated(pieces.values()).float()
                pieces = self._split(whole if scale == 1 else whole / scale, list(pieces))
            run, order = self._in_run(pieces)
            self._write_state(run, after)
        self._kept.coming = self._as_data()  # while the GPU computes
        return GradientRun(self._layout, self.xp.from_dlpack(run), order.found, self._due)

    def _write_state(self, run: torch.Tensor, after: Tensors) -> None:
        """Write the arrays to push for the state into a run, bit-identical to those of `pushed_for`."""
        if self._floats:
            factors = self._constant("factors", self._factors)
            floats = pushed_floats(self._floats_of(self._fixed), self._floats_of(after), factors)
            run.index_copy_(0, self._index.floats, floats)
        if self._counters:
            added = self._counts_of(after) - self._counts_of(self._fixed)
            run.index_copy_(0, self._index.counters, added.view(torch.uint8).float())

    def _floats_of(self, tensors: Tensors) -> torch.Tensor:
        return _concatenated(tensors[name] for name in self._floats).float()

    def _counts_of(self, tensors: Tensors) -> torch.Tensor:
        return _concatenated(tensors[name] for name in self._counters).to(torch.int64)

    def _factors(self) -> Float32s:
        """Return the factor of each element of an average: for one divisor PyTorch would multiply by its inverse."""
        sizes = [self._own[name].numel() for name in self._averages]
        return np.repeat(np.array([average_factor(self._kinds[name]) for name in self._averages], np.float32), sizes)

    def _split(self, whole: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Split a concatenation into one tensor per variable, each with the variable's number of elements."""
        return dict(zip(names, whole.split([self._own[name].numel() for name in names]), strict=True))

    def _in_run(self, pieces: Tensors) -> tuple[torch.Tensor, _Order]:
        """Return a new run of these variables, with zeros for all others, and its parts in order."""
        if self._order is None or self._order.layout is not self._layout or self._order.zeros.keys() != pieces.keys():
            self._order = self._order_of(pieces)
        parts = [self._order.first]
        for name, zeros in self._order.zeros.items():
            parts.append(pieces[name])
            if zeros is not None:
                parts.append(zeros)
        return _concatenated(parts), self._order

    def _order_of(self, pieces: Tensors) -> _Order:
        """Return these variables in the order of a run, with the zeros that follow each."""
        places = {name: place for name, (place, _) in self._layout.places.items() if name in pieces}
        starts = [place.start for place in places.values()] + [self._layout.elements]
        gaps = [start - place.stop for place, start in zip(places.values(), starts[1:], strict=True)]
        zeros = torch.zeros(max([*gaps, starts[0]]), device=self._kept.run.device)
        following = (zeros[:gap] if gap else None for gap in gaps)
        found = frozenset([*places, *self._floats, *self._counters])
        return _Order(self._layout, zeros[: starts[0]], dict(zip(places, following, strict=True)), found)

    def _constant(self, name: str, make: Callable[[], Any]) -> torch.Tensor:
        """Return a tensor on the device, copied there once."""
        if name not in self._constants:
            self._constants[name] = torch.as_tensor(make(), device=self._kept.run.device)
        return self._constants[name]


def check_streams(of_torch: int, of_cupy: int) -> None:
    """Refuse a CUDA stream other than the one that weights are written on: nothing would order the two."""
    if of_torch != of_cupy and not {of_torch, of_cupy} <= _DEFAULT_STREAMS:
        raise ConfigurationError(
            "PyTorch's current CUDA stream is not CuPy's, so that a step could read weights while they are written: "
            "train outside of torch.cuda.stream(...) and cupy.cuda.Stream(...); what the model itself does on other "
            "streams may stay"
        )


@dataclass(slots=True)
class _Kept:
    """Tensors of a run that is pulled into again."""

    run: torch.Tensor
    tensors: dict[str, torch.Tensor]
    coming: dict[str, torch.Tensor] | None = None  # those of the next step, made ahead


class _Order(NamedTuple):
    """The parts of a run: leading zeros, and each variable with the zeros that follow it, if any."""

    layout: FlatLayout
    first: torch.Tensor
    zeros: dict[str, torch.Tensor | None]
    found: frozenset[str]  # with the state, which is written later


class _Index(NamedTuple):
    """Indices of the state's elements in a run of a layout."""

    layout: FlatLayout
    floats: torch.Tensor
    counters: torch.Tensor


def _concatenated(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated elements of tensors, in new memory, by one call of PyTorch for all shapes."""
    given = list(tensors)
    if len(given) < 2:  # PyTorch would return a view of one tensor
        return given[0].reshape(-1).clone() if given else torch.empty(0)
    if all(tensor.ndim == 1 for tensor in given):
        return torch.cat(given)
    return torch._utils._flatten_dense_tensors(given)
