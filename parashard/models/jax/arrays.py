"""Arrays of JAX: conversions from pulled arrays and to values and gradients, and checks of functions and trees."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.job.embeddings import checked_tables
from parashard.layers.row_sums import sum_by_place
from parashard.models.framework import checked_kind, kept_generators
from parashard.models.row_places import check_keys
from parashard.plan.embedding import EmbeddingTable
from parashard.process.extras import install

try:
    import jax
    from jax.extend.core import Literal, jaxpr_as_fun
except ImportError:
    raise ConfigurationError(f"ps.jax needs JAX: {install('jax')}") from None

__all__ = ["jax"]  # other modules import it from here

_ADDRESS = re.compile(r"0x[0-9a-f]+")

_INT32 = np.iinfo(np.int32)


def tensor_of(array: Any) -> Any:
    """Return a JAX array: a copy of a NumPy array, whose memory is reused, or a CuPy array without a copy."""
    return jax.numpy.array(array) if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def borrowed(array: Any) -> Any:
    """Return an array for one call of a compiled function: a NumPy array itself, read in place by XLA if aligned."""
    return array if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def check_width(tree: Any) -> None:
    """Refuse whole numbers of more than 32 bits unless JAX has x64 enabled: it would truncate them silently."""
    if jax.config.jax_enable_x64:
        return
    for array in jax.tree_util.tree_leaves(tree):
        if array.dtype == np.int64 and array.size:
            for found in (int(array.min()), int(array.max())):
                if not _INT32.min <= found <= _INT32.max:
                    raise WrongModel(
                        f"the data have the whole number {found}, and JAX has 32 bits of it: start the script with "
                        "JAX_ENABLE_X64=1, or number the values anew, such as by np.unique(x, return_inverse=True)[1]"
                    )


def array_of(leaf: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy array of a leaf's values, floating ones as float32."""
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    return np.array(leaf.astype(jax.numpy.float32) if floating else leaf)


def output_of(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an output as a NumPy array of its type, bfloat16 as float32."""
    return np.array(leaf.astype(jax.numpy.float32) if leaf.dtype == jax.numpy.bfloat16 else leaf)


def result_of(leaf: Any, scale: float = 1.0) -> Array:
    """Return a loss or a gradient as float32, divided by the scale of the loss."""
    # A JAX array, which may still be being computed: `np.asarray` waits for it. Before its inputs are overwritten, wait
    # by `jax.block_until_ready`.
    if leaf.dtype != np.float32:
        leaf = leaf.astype(np.float32)
    return leaf if scale == 1 else leaf / scale


def is_zero(traced: Any) -> bool:
    """Tell whether a function traced by `jax.make_jaxpr` returns zeros for all arguments."""
    given = set(traced.jaxpr.invars)
    for equation in traced.jaxpr.eqns:
        if not given.isdisjoint(_variables(equation.invars)):
            given.update(equation.outvars)
    if not given.isdisjoint(_variables(traced.jaxpr.outvars)):
        return False
    arguments = [np.zeros(aval.shape, aval.dtype) for aval in traced.in_avals]
    return not any(np.any(value) for value in jaxpr_as_fun(traced)(*arguments))


def seeded_apart(trace: Callable[[], Any]) -> list[Any]:
    """Return a function's results under two seeds of Python and NumPy, whose generators are restored."""
    found = []
    with kept_generators(gpus=False):
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            found.append(trace())
    return found


def differ(one: Any, other: Any) -> bool:
    """Tell whether two functions traced by `jax.make_jaxpr` differ in their operations or constants."""
    if _ADDRESS.sub("", str(one.jaxpr)) != _ADDRESS.sub("", str(other.jaxpr)):
        return True
    return any(a is not b and _bytes(a) != _bytes(b) for a, b in zip(one.consts, other.consts, strict=True))


def _bytes(constant: Any) -> bytes:
    is_key = jax.numpy.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_word(key) for key in path) or "parameters": leaf for path, leaf in found}


def kinds_of(leaves: Mapping[str, Any], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each leaf: "" with a gradient, "frozen", or a kind of state."""
    kinds = dict.fromkeys(leaves, "")
    for pattern, kind in patterns.items():
        names = [name for name in leaves if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigurationError(f"state: {pattern!r} matches none of the leaves: {', '.join(leaves)}")
        kinds |= {name: checked_kind(name, kind, array_of(leaves[name]).dtype) for name in names}
    for name, leaf in leaves.items():
        if not kinds[name] and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            raise ConfigurationError(
                f"parameter {name!r} is {leaf.dtype}; allowed: real floating point, or whole numbers that state= "
                "names as a counter"
            )
    return kinds


def check(made: Any) -> None:
    """Refuse anything but a tree of arrays, such as an object that is not registered as a tree."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex):
            continue
        kind = type(leaf).__name__
        if dataclasses.is_dataclass(leaf):
            raise ConfigurationError(
                f"init returned a {kind}, which JAX takes for one value: decorate the class with "
                "@jax.tree_util.register_dataclass"
            )
        raise ConfigurationError(
            f"parameter {'/'.join(map(_word, path))!r} is a {kind}; allowed: arrays. What is no array goes into the "
            "functions: flax.nnx.split and equinox.partition part a module"
        )


def _word(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def tables_and_keys(tables: object, keys: object) -> dict[str, EmbeddingTable]:
    """Return a model's tables by name; refuse tables without `keys`, `keys` without tables, and combiners."""
    found = checked_tables(tables)
    if keys is not None and not callable(keys):
        raise ConfigurationError(f"keys is a function of the inputs, found {type(keys).__name__}")
    check_keys(found, keys, "jax", "there are none: ps.jax.Model(..., tables=[...])")
    combining = [name for name, table in found.items() if table.combiner is not None]
    if combining:
        raise ConfigurationError(
            f"table {combining[0]!r} has combiner={found[combining[0]].combiner!r}, which has no effect: a function of "
            "JAX is given the row of each id, and says itself what becomes of several"
        )
    return found


def gathered(variables: Mapping[str, Array], batch: Batch) -> dict[str, Any]:
    """Return the row of each id, shape (*ids, dimension), by table."""
    return {name: borrowed(variables[name].take(places, axis=0)) for name, places in batch.places.items()}


def like_gathered(tables: Mapping[str, EmbeddingTable], batch: Batch) -> dict[str, Any]:
    """Return zeros in the shapes of `gathered`."""
    return {
        name: np.zeros((*places.shape, tables[name].row_elements), np.float32) for name, places in batch.places.items()
    }


def summed(gradients: Mapping[str, Any], variables: Mapping[str, Array], batch: Batch, xp: Any) -> dict[str, Array]:
    """Return the gradient of the rows: sums of the ids' gradients, added in the order of the ids."""
    found = {}
    for name, places in batch.places.items():
        rows, dimension = variables[name].shape
        of_ids = xp.asarray(gradients[name]).reshape(-1, dimension)
        found[name] = sum_by_place(of_ids, places.reshape(-1), rows, xp)
    return found
