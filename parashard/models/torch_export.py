"""Modules for export: tables as `torch.nn.Embedding`, with a vocabulary of their keys.

Its invariant: with the places of ids, a module gives what the one with the tables gives for the ids. Knows no format of
files. Called by users.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError
from parashard.models.base import HeldTable
from parashard.models.torch_arrays import torch
from parashard.models.torch_embeddings import Embedding, EmbeddingBag, HeldRows, look_ups_in
from parashard.plan.embedding import unmixed


@dataclass(frozen=True)
class Vocabulary:
    """The keys of a table's rows.

    Parameters
    ----------
    keys : ndarray of int64, shape (rows,)
        Ascending: place i is that of the row of keys[i].
    """

    keys: npt.NDArray[np.int64]

    def places(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the places of ids, in their shape; those of others than the keys are len(keys), where zeros are."""
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
        What `Trainer.model` returned.

    Returns
    -------
    module : torch.nn.Module
        Takes places where `net` takes ids; it can be traced, exported to ONNX, compiled and saved.
    vocabularies : dict of str to Vocabulary
        By table: `vocabularies["users"].places(ids)` are the places of ids.

    Raises
    ------
    ConfigurationError
        If the module holds no rows.

    Notes
    -----
    An id without a row has zeros, where `net` draws its first values; so has a layer's `padding_key`. In an
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
            tables[layer.table.name] = _dense(layer._rows.held(layer.table.name), layer._rows.dtype)
        replaced[layer] = _layer(layer, tables[layer.table.name][1])
    for within in list(made.modules()):
        for name, child in within._modules.items():
            if child in replaced:
                within._modules[name] = replaced[child]
    return replaced.get(made, made), {name: vocabulary for name, (vocabulary, _) in tables.items()}


def _dense(held: HeldTable, dtype: torch.dtype) -> tuple[Vocabulary, Any]:
    """Return the keys of a table, and its rows in their order with zeros after them."""
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
    made.weight = weight  # one, if several layers share the table
    return made
