"""Embedding and EmbeddingBag: rows of embedding tables in a PyTorch module, in the place of `torch.nn`'s."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from parashard.data.base import Array
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.base import HeldTable
from parashard.models.row_places import (
    NO_KEYS,
    check_fit_begins,
    check_keys,
    check_layer,
    places_among,
    rows_held,
    summed_by_table,
    without_padding,
)
from parashard.models.torch.arrays import gradient_of, tensor_of, torch
from parashard.plan.embedding import COMBINERS, EmbeddingTable, Keys, unmixed


class _LookUps(torch.nn.Module):  # type: ignore[misc]  # the type checker has no PyTorch
    """Base of both modules: a table, and the rows to look up in while they are set."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make a module that `torch.compile` leaves alone."""
        _leave_uncompiled()
        made: Self = super().__new__(cls)
        return made

    def __init__(self, table: EmbeddingTable, padding_key: int | None = None) -> None:
        super().__init__()
        check_layer(f"ps.torch.{type(self).__name__}", table, padding_key)
        self.table = table
        self.padding_key = padding_key
        self._rows: TorchRows | HeldRows | None = None

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self.table.row_elements

    def extra_repr(self) -> str:
        """Return the module's settings for `print`."""
        padding = "" if self.padding_key is None else f", padding_key={self.padding_key}"
        return f"{self.table.name!r}, {self.dimension}{padding}"

    def _looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        name = self.table.name
        if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex:
            found = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise WrongModel(f"ids of table {name!r} are a tensor of whole numbers, found {found}")
        if self._rows is None:
            raise WrongModel(
                f"the rows of table {name!r} are on the shards: trainer.predict looks them up, and trainer.model() "
                "returns the module with all of them"
            )
        if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export() or _is_exporting():
            raise ConfigurationError(
                f"a trace would keep the rows of table {name!r} that it has looked up, and no others: trace what "
                "ps.torch.exportable(net) returns"
            )
        if not ids.numel():
            return torch.empty(0, self.dimension, dtype=self._rows.dtype, device=ids.device)
        return self._rows.look_up(name, ids)


class Embedding(_LookUps):
    """A row of a table for each id, as `torch.nn.Embedding`: shape (...) becomes (..., dimension).

    Parameters
    ----------
    table : Table
        Table of the rows; several modules may share it.
    padding_key : int, optional
        An id that has no row: it becomes zeros, and has no gradient.

    Notes
    -----
    Ids are whole numbers of up to 64 bits. `keys=` of `ps.torch.Model` must name all of them; any other id is refused.
    Rows have the dtype of the module's parameters, if that is the same for all; the shards update them in float32.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids."""
        return with_padding(self._looked_up, ids, self.padding_key, self.dimension)


class EmbeddingBag(_LookUps):
    """The sum or mean of the rows of each bag of ids, as `torch.nn.EmbeddingBag`: shape (bags, dimension).

    Parameters
    ----------
    table : Table
        Table of the rows; several modules may share it.
    mode : {"mean", "sum"}, optional
        Combines the rows of a bag; an empty bag gives zeros. By default the table's `combiner`, or "mean" if that is
        unset.
    padding_key : int, optional
        An id that has no row and does not count.

    Notes
    -----
    As for `Embedding`. The mode "max" is refused.
    """

    def __init__(self, table: EmbeddingTable, mode: str | None = None, padding_key: int | None = None) -> None:
        super().__init__(table, padding_key)
        self.takes_combiner = mode is None
        mode = mode if mode is not None else table.combiner or "mean"
        if mode not in COMBINERS:
            raise ConfigurationError(f"ps.torch.EmbeddingBag: mode is {' or '.join(COMBINERS)}, found {mode!r}")
        self.mode = mode

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums or means.

        Parameters
        ----------
        ids : tensor of whole numbers, shape (bags, ids) or (ids,)
        offsets : tensor of int64, shape (bags,), optional
            Where each bag begins in ids of one axis.
        per_sample_weights : tensor, the shape of ids, optional
            Factor of each row; with mode "sum" only.
        """
        found = self._looked_up(ids.reshape(-1)) if self.padding_key is None else self._with_zeros(ids.reshape(-1))
        places, padding = torch.arange(ids.numel(), device=found.device), None
        if self.padding_key is not None:
            padding = ids.numel()
            places = places.masked_fill((ids.reshape(-1) == self.padding_key).to(found.device), padding)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(found.dtype)
        return torch.nn.functional.embedding_bag(
            places.reshape(ids.shape),
            found,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            padding_idx=padding,
        )

    def _with_zeros(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids (zeros for the padding key), followed by a row of zeros."""
        there = (ids != self.padding_key).nonzero().reshape(-1)
        found = self._looked_up(ids[there])
        return found.new_zeros(len(ids) + 1, self.dimension).index_copy(0, there, found)


@cache
def _leave_uncompiled() -> None:
    """Exclude look-ups from `torch.compile`. Called late, because torch._dynamo takes a second to import."""
    for kind in (Embedding, EmbeddingBag):
        kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[method-assign]


def look_ups_in(module: torch.nn.Module) -> list[_LookUps]:
    """Return a module's look-up layers."""
    return [within for within in module.modules() if isinstance(within, _LookUps)]


def check_module(module: torch.nn.Module, keys: object) -> None:
    """Refuse look-ups without `keys`, `keys` without look-ups, and a table's combiner that no layer uses."""
    layers = look_ups_in(module)
    check_fit_begins(any(layer._rows is not None for layer in layers))
    lacking = "the module has neither ps.torch.Embedding nor ps.torch.EmbeddingBag"
    check_keys((layer.table.name for layer in layers), keys, "torch", lacking)
    for table in {layer.table for layer in layers if layer.table.combiner is not None}:
        if not any(isinstance(one, EmbeddingBag) and one.takes_combiner for one in layers if one.table == table):
            raise ConfigurationError(
                f"table {table.name!r} has combiner={table.combiner!r}, and nothing takes it: it is the mode of a "
                "ps.torch.EmbeddingBag that is given none"
            )


def named_ids(named: Any, modules: Sequence[_LookUps]) -> Any:
    """Return ids by table as arrays, without the padding key that all look-ups of the table share."""
    if not isinstance(named, Mapping):
        return named  # refused by the caller
    arrays = {
        name: ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        for name, ids in named.items()
    }
    return without_padding(arrays, modules)


def with_padding(
    look_up: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, padding_key: int | None, dimension: int
) -> torch.Tensor:
    """Return the rows of ids, shape (*ids, dimension): zeros for the padding key, rows of `look_up` for the others."""
    padding = None if padding_key is None else ids == padding_key
    if padding is None or not padding.any():
        return look_up(ids).reshape(*ids.shape, dimension)
    there = (~padding).reshape(-1).nonzero().reshape(-1)
    found = look_up(ids.reshape(-1)[there])
    whole = found.new_zeros(ids.numel(), dimension).index_copy(0, there, found)
    return whole.reshape(*ids.shape, dimension)


@contextmanager
def use_rows(modules: Sequence[_LookUps], rows: TorchRows | HeldRows) -> Iterator[None]:
    """Set the rows that modules look up in, within the `with` block."""
    try:
        for module in modules:
            module._rows = rows
        yield
    finally:
        for module in modules:
            module._rows = None


class TorchRows:
    """The pulled rows of a step, and a record of its look-ups."""

    def __init__(
        self,
        values: Mapping[str, Array],  # only read
        keys: Mapping[str, Keys],  # of these rows; mixed, ascending
        dtype: torch.dtype | None = None,  # of the rows that look-ups return; None: float32
        *,
        trained: bool = False,  # whether gradients are needed
    ) -> None:
        self._values = {name: tensor_of(values[name]) for name in keys}
        self._keys = keys
        self.dtype = dtype or torch.float32
        self._trained = trained
        self._looked_up: list[tuple[str, torch.Tensor, np.ndarray[Any, Any]]] = []

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows of ids, which are among the keys."""
        places = places_among(_flat(ids), self._keys.get(table, NO_KEYS), table)
        values = self._values[table]
        rows = values[torch.from_numpy(places).to(values.device)]
        if not self._trained:
            return rows.to(self.dtype)
        rows.requires_grad_()
        self._looked_up.append((table, rows, places))
        return rows.to(self.dtype) if self.dtype != rows.dtype else rows.clone()  # callers may write in place

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Tensors to differentiate by: the rows of each look-up, in order."""
        return [rows for _, rows, _ in self._looked_up]

    def gradients(self, by_leaves: Sequence[torch.Tensor | None], xp: Any, scale: float) -> dict[str, Array | None]:
        """Return the gradient of each table's rows, as `summed_by_table` does, divided by a scale."""
        look_ups = (
            (table, gradient_of(gradient, xp, scale), xp.asarray(places))
            for (table, _, places), gradient in zip(self._looked_up, by_leaves, strict=True)
            if gradient is not None
        )
        return summed_by_table(look_ups, self._keys, xp)


class HeldRows:
    """All rows of some tables, in memory, for the look-ups of a module that `Trainer.model` returned."""

    def __init__(self, tables: Mapping[str, HeldTable], dtype: torch.dtype | None) -> None:
        self.tables = tables
        self.dtype = dtype or torch.float32

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids; an id without a row gets its initial values."""
        held = self.tables[table]
        return torch.from_numpy(rows_held(held, _flat(ids))).to(ids.device, self.dtype)


def _is_exporting() -> bool:
    """Return whether `torch.export` is tracing; False if this version of PyTorch cannot tell."""
    tells = getattr(torch.compiler, "is_exporting", None)
    return tells is not None and bool(tells())


def _flat(ids: torch.Tensor) -> np.ndarray[Any, Any]:
    return ids.detach().cpu().numpy().reshape(-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Vocabulary:
    """The keys of a table's rows.

    Parameters
    ----------
    keys : ndarray of int64, shape (rows,)
        Ascending: row i is that of keys[i].
    """

    keys: npt.NDArray[np.int64]

    def places(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the row indices of ids, in their shape; len(keys), the row of zeros, for ids without a row."""
        found = np.asarray(ids, np.int64)
        at = np.searchsorted(self.keys, found)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == found[known]
        return np.where(known, at, len(self.keys))


def exportable(net: Any) -> tuple[Any, dict[str, Vocabulary]]:
    """Return a copy of a module with `torch.nn.Embedding` and `EmbeddingBag` in place of tables, and the vocabularies.

    Parameters
    ----------
    net : torch.nn.Module
        A module that `Trainer.model` returned.

    Returns
    -------
    module : torch.nn.Module
        Takes row indices where `net` takes ids; it can be traced, exported to ONNX, compiled and saved.
    vocabularies : dict of str to Vocabulary
        By table: `vocabularies["users"].places(ids)` are the row indices of ids.

    Raises
    ------
    ConfigurationError
        If the module holds no rows.

    Notes
    -----
    An id without a row gives zeros, where `net` draws initial values, and so does a layer's `padding_key`. In an
    `EmbeddingBag` with a `padding_key` neither counts in a mean.
    """
    if not isinstance(net, torch.nn.Module) or not look_ups_in(net):
        raise ConfigurationError("ps.torch.exportable is for a module with ps.torch.Embedding or ps.torch.EmbeddingBag")
    made = copy.deepcopy(net)
    tables: dict[str, tuple[Vocabulary, Any]] = {}
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    for layer in look_ups_in(made):
        if not isinstance(layer._rows, HeldRows):
            raise ConfigurationError(
                f"the module has no rows of table {layer.table.name!r}: give ps.torch.exportable what trainer.model() "
                "returns"
            )
        if layer.table.name not in tables:
            tables[layer.table.name] = _dense(layer._rows.tables[layer.table.name], layer._rows.dtype)
        replaced[layer] = _layer(layer, tables[layer.table.name][1])
    for within in list(made.modules()):
        for name, child in within._modules.items():
            if child in replaced:
                within._modules[name] = replaced[child]
    return replaced.get(made, made), {name: vocabulary for name, (vocabulary, _) in tables.items()}


def _dense(held: HeldTable, dtype: torch.dtype) -> tuple[Vocabulary, Any]:
    """Return a table's keys, and its rows in their order, followed by a row of zeros."""
    keys = unmixed(held.keys).view(np.int64)
    order = np.argsort(keys)
    rows = np.concatenate([held.rows[order], np.zeros((1, held.rows.shape[1]), np.float32)])
    return Vocabulary(keys[order]), torch.nn.Parameter(torch.from_numpy(rows).to(dtype))


def _layer(layer: Embedding | EmbeddingBag, weight: Any) -> torch.nn.Module:
    sizes: dict[str, Any] = {"num_embeddings": len(weight), "embedding_dim": weight.shape[1], "_weight": weight}
    if layer.padding_key is not None:
        sizes["padding_idx"] = len(weight) - 1
    made = (
        torch.nn.Embedding(**sizes) if isinstance(layer, Embedding) else torch.nn.EmbeddingBag(mode=layer.mode, **sizes)
    )
    made.weight = weight  # shared by all layers of the table
    return made
