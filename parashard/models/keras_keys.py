"""Which ids a batch of a Keras model looks up: those that a function names, or the inputs that feed its look-ups.

A functional model's graph tells which input each layer is called on; where that is the whole of an input, its ids are
known without a function. Knows no row. Called by `parashard.keras`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array
from parashard.data.tree import Tree, leaves
from parashard.errors import ConfigurationError
from parashard.models.framework import WrongModel
from parashard.models.keras_embeddings import Embedding
from parashard.models.keras_variables import keras
from parashard.models.row_places import without_padding

Named = Callable[[Tree], Mapping[str, Any]]


class _Fed(NamedTuple):
    """A table, and the input of a functional model that a layer looks up in it."""

    table: str
    path: tuple[Any, ...]  # within the model's inputs
    name: str


def look_ups_in(model: Any) -> list[Embedding]:
    """Return the layers within a model that look rows up."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]


class KeysOf:
    """The ids that batches of a model look up.

    Parameters
    ----------
    model : keras.Model
        Built.
    function : callable (inputs) -> mapping of str to array, optional
        What the user says.

    Raises
    ------
    ConfigurationError
        If nothing tells them, or a function does where no layer looks up.
    """

    def __init__(self, model: Any, function: Named | None) -> None:
        self.layers = look_ups_in(model)
        self._function = function
        self._fed: list[_Fed] = []
        if any(layer.holds_rows for layer in self.layers):
            raise ConfigurationError(
                "the model holds rows of tables, with which no fit begins: the trainer that gave it goes on from them"
            )
        tables = sorted({layer.table.name for layer in self.layers})
        if function is not None and not tables:
            raise ConfigurationError(
                "keys= names rows of tables, and the model has no ps.keras.Embedding: leave it out, or give it one"
            )
        if function is None and tables:
            fed = _fed_by_inputs(model, self.layers)
            if fed is None:
                named = ", ".join(f"{name!r}: ..." for name in tables)
                raise ConfigurationError(
                    f"the model looks up rows of {', '.join(map(repr, tables))}, and nothing says which a batch needs, "
                    "as it would if each look-up of a functional model were of one of its inputs: "
                    f"ps.keras.Model(..., keys=lambda inputs: {{{named}}})"
                )
            self._fed = fed

    def of(self, inputs: Tree) -> dict[str, Array]:
        """Return ids by table, without those that stand for none; of inputs as NumPy has them.

        Raises
        ------
        WrongModel
            If the inputs are not the model's.
        """
        if self._function is None:
            parts: dict[str, list[Any]] = {}
            for fed in self._fed:
                parts.setdefault(fed.table, []).append(_input_of(inputs, fed).reshape(-1))
            named: Any = {table: np.concatenate(ids) for table, ids in parts.items()}
        else:
            named = self._function(inputs)
            if not isinstance(named, Mapping):
                return named  # type: ignore[no-any-return]  # refused by the caller
        return without_padding({name: np.asarray(ids) for name, ids in named.items()}, self.layers)


def _fed_by_inputs(model: Any, layers: Sequence[Any]) -> list[_Fed] | None:
    """Return which inputs of a functional model its look-ups are of; None: that is not certain."""
    called: Any = type(model).call
    functional = model if called is keras.src.models.Functional.call else getattr(model, "_functional", None)
    if functional is None or called not in (keras.src.models.Functional.call, keras.Sequential.call):
        return None
    inputs = {id(tensor): (path, tensor.name) for path, tensor in _paths(functional._inputs_struct)}
    nodes = {id(node) for at_depth in functional._nodes_by_depth.values() for node in at_depth}
    found = []
    for layer in layers:
        own = [node for node in layer._inbound_nodes if id(node) in nodes]
        if not own or any(id(node.input_tensors[0]) not in inputs for node in own):
            return None
        found += [_Fed(layer.table.name, *inputs[id(node.input_tensors[0])]) for node in own]
    return found


def _paths(tree: Tree, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict):
        return [found for key, below in tree.items() for found in _paths(below, (*path, key))]
    if isinstance(tree, tuple | list):
        return [found for place, below in enumerate(tree) for found in _paths(below, (*path, place))]
    return [(path, tree)]


def _input_of(inputs: Tree, fed: _Fed) -> Any:
    """Return the input that a functional model takes for one of its own: at its place, or by its name."""
    below = inputs
    for step in fed.path:
        found = isinstance(below, dict) and step in below
        found = found or (isinstance(below, tuple | list) and isinstance(step, int) and step < len(below))
        below = below[step] if found else None
    if isinstance(inputs, dict) and below is None:
        below = inputs.get(fed.name)
    elif not isinstance(inputs, dict | tuple | list) and len(fed.path) < 2:
        below = inputs
    if not hasattr(below, "dtype"):
        given = ", ".join(name or "one array" for name, _ in leaves(inputs))
        raise WrongModel(f"the model looks up its input {fed.name!r}, and the data has: {given}; name it, or say keys=")
    return below
