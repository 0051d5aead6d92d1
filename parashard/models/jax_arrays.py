"""Arrays of JAX: pulled arrays as JAX's, and values and gradients of JAX's as arrays.

Owns the import of JAX. Knows no tree's meaning. Called by `parashard.jax` and `parashard.models.keras_backends`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.models.framework import WrongModel
from parashard.process.extras import install

try:
    import jax
    from jax.extend.core import Literal, jaxpr_as_fun
except ImportError:
    raise ConfigurationError(f"ps.jax needs JAX: {install('jax')}") from None

__all__ = [
    "all_borrowed",
    "array_of",
    "borrowed",
    "check_width",
    "differ",
    "is_zero",
    "jax",
    "output_of",
    "result_of",
    "seeded_apart",
    "tensor_of",
]

_ADDRESS = re.compile(r"0x[0-9a-f]+")

_INT32 = np.iinfo(np.int32)


def tensor_of(array: Any) -> Any:
    """Return an array of JAX: a copy of NumPy's, which is used again; CuPy's as it is."""
    return jax.numpy.array(array) if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def borrowed(array: Any) -> Any:
    """Return an array for one call of a compiled function: NumPy's as it is, which XLA reads in place if aligned."""
    return array if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def all_borrowed(tree: Any) -> Any:
    """Return a tree of arrays as `borrowed` does each."""
    return jax.tree_util.tree_map(borrowed, tree)


def check_width(tree: Any) -> None:
    """Refuse whole numbers of more than 32 bits where JAX has none: it would keep the lower ones without a word."""
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


def result_of(leaf: Any, xp: Any, scale: float = 1.0) -> Array:
    """Return a loss or a gradient as float32, divided by the scale of the loss: an array of CuPy, where `xp` is that.

    For NumPy it is JAX's own array, which may still be being computed: `np.asarray` waits for it. Where what it is
    computed of is written again before, wait by `jax.block_until_ready`.
    """
    if leaf.dtype != np.float32:
        leaf = leaf.astype(np.float32)
    leaf = leaf if scale == 1 else leaf / scale
    return leaf if xp is np else xp.from_dlpack(leaf)


def is_zero(traced: Any) -> bool:
    """Tell whether a function that `jax.make_jaxpr` has traced returns zeros whatever it is given."""
    given = set(traced.jaxpr.invars)
    for equation in traced.jaxpr.eqns:
        if not given.isdisjoint(_variables(equation.invars)):
            given.update(equation.outvars)
    if not given.isdisjoint(_variables(traced.jaxpr.outvars)):
        return False
    arguments = [np.zeros(aval.shape, aval.dtype) for aval in traced.in_avals]
    return not any(np.any(value) for value in jaxpr_as_fun(traced)(*arguments))


def seeded_apart(trace: Callable[[], Any]) -> list[Any]:
    """Return what a function returns under two seeds of Python and NumPy, whose generators are left as they were."""
    pythons, numpys = random.getstate(), np.random.get_state()
    found = []
    try:
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            found.append(trace())
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
    return found


def differ(one: Any, other: Any) -> bool:
    """Tell whether two functions that `jax.make_jaxpr` has traced compute with other constants, or otherwise."""
    if _ADDRESS.sub("", str(one.jaxpr)) != _ADDRESS.sub("", str(other.jaxpr)):
        return True
    return any(a is not b and _bytes(a) != _bytes(b) for a, b in zip(one.consts, other.consts, strict=True))


def _bytes(constant: Any) -> bytes:
    is_key = jax.numpy.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
