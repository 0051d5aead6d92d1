"""The contract of a layer: a pure function of its input and its weights, with a pullback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.plan.embedding import COMBINERS, EmbeddingTable
from parashard.plan.variables import Initializer, Variable, glorot_uniform, he_normal

Shape = tuple[int, ...]
Shapes = Shape | dict[str, Shape]
"""The shape of one array, or shapes by name for a dict of arrays, which only a `LooksUpLayer` takes."""

Pullback = Callable[[Array, bool], tuple[Array | None, dict[str, Array]]]
"""Maps the gradient by a layer's output, which it may overwrite, and whether the gradient by its input is needed to
the gradient by its input (or None) and the gradients by its variables, in new arrays."""


@dataclass(frozen=True)
class Pass:
    """One pass of a batch through a layer.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    key : (seed, step, layer) or None
        Seeds all randomness; `layer` counts the layers of the same name. None: an evaluation, in which nothing is
        random.
    """

    xp: Any
    key: tuple[int, int, int] | None = None


class Layer(ABC):
    """A function of examples, with variables or without.

    A layer does not hold weights; they are arguments. Make a subclass a frozen dataclass whose `repr` shows everything
    that determines its result: the model's digest is computed from it.
    """

    name: ClassVar[str] = "layer"
    """Prefix of its variables' names; NAME_1 for the second layer of this name in a network."""
    of_indices: ClassVar[bool] = False
    """True: its input is whole numbers, so it can only be the first layer."""

    def output_shape(self, shape: Any) -> Shape:
        """Return the shape of an example's output, from that of its input.

        Raises
        ------
        ConfigurationError
            If the layer does not accept this shape.
        """
        own: Shape = shape
        return own

    def variables(self, shape: Shape) -> dict[str, Variable]:
        """Return the declared variables for inputs of a shape, by their names within the layer."""
        return {}

    @abstractmethod
    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the output of a batch, and its pullback.

        Parameters
        ----------
        weights : mapping of str to array
            The variables' values, by their names within the layer; read-only.
        x : array, shape (examples, *shape)
            In the weights' dtype, float32 or float64; read-only, and unchanged until the pullback.
        """


class LooksUpLayer(Layer):
    """A layer that looks up rows of embedding tables, passed like weights, by table; only as the first layer."""

    @abstractmethod
    def own_tables(self) -> tuple[EmbeddingTable, ...]:
        """Return the tables."""

    @abstractmethod
    def keys(self, inputs: Any) -> dict[str, Array]:
        """Return the ids of a batch, by table."""

    @abstractmethod
    def placed(self, inputs: Any, places: Mapping[str, Array]) -> Any:
        """Return the inputs for `apply`, with ids replaced by the places of their rows, in the order of `keys`."""


Start = str | Initializer
"""Initialisation of a weight: "glorot_uniform", "he_normal" or an `Initializer`."""
_STARTS = ("glorot_uniform", "he_normal")


def start_of(given: Start, fan_in: int, fan_out: int) -> Initializer:
    """Return the initializer of a weight with `fan_in` inputs and `fan_out` outputs."""
    if isinstance(given, Initializer):
        return given
    return he_normal(fan_in) if given == "he_normal" else glorot_uniform(fan_in, fan_out)


def need_start(layer: str, given: object) -> None:
    """Raise ConfigurationError unless `given` is a `Start`."""
    if not isinstance(given, Initializer) and given not in _STARTS:
        raise ConfigurationError(f"{layer}: initializer is {', '.join(_STARTS)} or an Initializer, found {given!r}")


def need_combiner(layer: str, given: object, tables: Iterable[EmbeddingTable]) -> None:
    """Raise ConfigurationError unless `given` is a combiner, or None and no table has a combiner."""
    if given is not None and given not in COMBINERS:
        raise ConfigurationError(f"{layer}: combiner is {' or '.join(COMBINERS)}, found {given!r}")
    for table in tables:
        if table.combiner is not None and given is None:
            raise ConfigurationError(
                f"table {table.name!r} has combiner={table.combiner!r}, and {layer} gives every row: give it the "
                "combiner, or leave the table's out"
            )
