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
"""Of one array, or of a dict of them, which only a first layer that looks rows up takes."""

Pullback = Callable[[Array, bool], tuple[Array | None, dict[str, Array]]]
"""From the gradient by a layer's output, which it may overwrite, and whether the gradient by its input is needed, to
that gradient (else None) and the gradients by its variables, in new arrays."""


@dataclass(frozen=True)
class Pass:
    """One pass of a batch through a layer.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    key : (seed, step, layer) or None
        What all that is random must be a function of; `layer` counts the layers of the same name. None: an evaluation,
        in which nothing is random.
    """

    xp: Any
    key: tuple[int, int, int] | None = None


class Layer(ABC):
    """A function of examples, with variables or without.

    A layer holds no weights: they are handed in. A subclass is best a frozen dataclass, whose `repr` has all that
    decides what it computes: the model's digest is made of it.
    """

    name: ClassVar[str] = "layer"
    """The first part of its variables' names: that of the second such layer of a network is NAME_1."""
    of_indices: ClassVar[bool] = False
    """True: its input is whole numbers, so that it can only be the first layer."""

    def output_shape(self, shape: Any) -> Shape:
        """Return the shape of an example's output, from that of its input.

        Raises
        ------
        ConfigurationError
            If the layer takes no such input.
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
            The variables' values, by their names within the layer; not to be changed.
        x : array, shape (examples, *shape)
            In the weights' dtype, float32 or float64; not to be changed, and not changed before the pullback.
        """


class LooksUpLayer(Layer):
    """A layer of rows of embedding tables, which are handed in as weights are, by table. Only a first layer is one."""

    @abstractmethod
    def own_tables(self) -> tuple[EmbeddingTable, ...]:
        """Return the tables."""

    @abstractmethod
    def keys(self, inputs: Any) -> dict[str, Array]:
        """Return the ids of a batch, by table."""

    @abstractmethod
    def placed(self, inputs: Any, places: Mapping[str, Array]) -> Any:
        """Return what `apply` takes: inputs that have places of rows, in the order of `keys`, instead of ids."""


Start = str | Initializer
"""How a weight begins: "glorot_uniform", "he_normal" or an `Initializer`."""
_STARTS = ("glorot_uniform", "he_normal")


def start_of(given: Start, fan_in: int, fan_out: int) -> Initializer:
    """Return the initializer of a weight with so many inputs and outputs."""
    if isinstance(given, Initializer):
        return given
    return he_normal(fan_in) if given == "he_normal" else glorot_uniform(fan_in, fan_out)


def need_start(layer: str, given: object) -> None:
    """Raise ConfigurationError unless `given` is a `Start`."""
    if not isinstance(given, Initializer) and given not in _STARTS:
        raise ConfigurationError(f"{layer}: initializer is {', '.join(_STARTS)} or an Initializer, found {given!r}")


def need_combiner(layer: str, given: object, tables: Iterable[EmbeddingTable]) -> None:
    """Raise ConfigurationError unless `given` says how rows become one, or is None and the tables do not say it."""
    if given is not None and given not in COMBINERS:
        raise ConfigurationError(f"{layer}: combiner is {' or '.join(COMBINERS)}, found {given!r}")
    for table in tables:
        if table.combiner is not None and given is None:
            raise ConfigurationError(
                f"table {table.name!r} has combiner={table.combiner!r}, and {layer} gives every row: give it the "
                "combiner, or leave the table's out"
            )
