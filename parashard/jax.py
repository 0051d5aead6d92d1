"""JAX models: `parashard.jax.Model` makes functions of a pytree of parameters trainable by a `Trainer`.

Owns the names of a pytree's leaves, and the way of weights to JAX and of gradients back. Pulled arrays are used again:
what computes a step has read them when it returns, and what a user keeps is a copy in JAX's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError
from parashard.models.framework import ACCURACY, Metric, WrongModel, metrics_by_name, rows, step_seed
from parashard.plan.variables import Float32s

try:
    import jax
except ImportError:
    raise ConfigurationError("ps.jax needs JAX: pip install 'parashard[jax]'") from None

Init = Callable[[Any], Any]
Loss = Callable[[Any, Any, Any, Any], Any]
Apply = Callable[[Any, Any], Any]


def accuracy(outputs: Any, targets: Any) -> Any:
    """Return the fraction of examples whose greatest output is the target's; one output a class on the last axis."""
    return (outputs.argmax(-1) == targets).mean()


class Model:
    """Functions of a pytree of parameters.

    Parameters
    ----------
    init : callable (key) -> pytree
        Makes the parameters, with a key of the trainer's seed; leaves are real floating-point arrays.
    loss : callable (parameters, inputs, targets, key) -> scalar
        The mean over a batch; differentiated and compiled. The key is of the seed and the step; in an evaluation it is
        None, where nothing should be random.
    apply : callable (parameters, inputs) -> outputs, optional
        What `Trainer.predict` returns and metrics are of.
    metrics : sequence of str or callable (outputs, targets) -> number
        What evaluations tell besides the loss: "accuracy", or functions that are means over a batch. They need `apply`.

    Notes
    -----
    Variables are the leaves, named by their path, such as "dense/weight" or "layers/0"; they travel as float32,
    a scalar as one row.
    """

    def __init__(self, init: Init, loss: Loss, *, apply: Apply | None = None, metrics: Sequence[Metric] = ()) -> None:
        for name, given in (("init", init), ("loss", loss), ("apply", apply)):
            if not callable(given) and (name != "apply" or given is not None):
                raise ConfigurationError(f"{name} is a function, found {type(given).__name__}")
        if metrics and apply is None:
            raise ConfigurationError("metrics are of outputs: they need apply=, a function of parameters and inputs")
        self._init = init
        self._loss = loss
        self._apply = jax.jit(apply) if apply is not None else None
        self._metrics = metrics_by_name(metrics, {ACCURACY: accuracy})
        self._seed = 0
        self._parameters: Any = None
        self._gradients = jax.jit(jax.value_and_grad(loss))
        self._judged = jax.jit(lambda parameters, inputs, targets: loss(parameters, inputs, targets, None))

    def seed(self, seed: int) -> None:
        """Begin with what `init` makes of this seed."""
        if self._parameters is None or seed != self._seed:
            self._seed = seed
            self._parameters = self._made()

    def fixed_sha256(self) -> str:
        """Return nothing: all that a model has is in its leaves and its code."""
        return ""

    def frozen(self) -> list[str]:
        """Return nothing: every leaf is trained."""
        return []

    def initial_variables(self) -> Mapping[str, Float32s]:
        """Return the leaves as float32."""
        return {name: rows(np.array(leaf, np.float32)) for name, leaf in _leaves(self._ready()).items()}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` says."""
        inputs, targets = _argument(batch.inputs), _argument(batch.targets)
        try:
            loss, gradients = self._gradients(self._arguments(variables), inputs, targets, self._key(batch))
        except TypeError as error:
            if "scalar-output" in str(error):
                raise WrongModel("the loss must be a scalar, the mean over a batch") from error
            raise
        jax.block_until_ready(gradients)  # before the pulled arrays are used again
        return float(loss), {name: rows(_gradient(leaf, xp)) for name, leaf in _leaves(gradients).items()}

    def summed_over(
        self, mesh: Any
    ) -> Callable[[Mapping[str, Float32s], Sequence[Batch]], tuple[Sequence[float], dict[str, Float32s]]]:
        """Return what computes batches of equal size at once, one on each device of a mesh of one axis.

        It returns their losses, and the sums of their gradients, which the devices add up.
        """
        (axis,) = mesh.axis_names
        split, whole = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()

        def one(parameters: Any, inputs: Any, targets: Any, keys: Any) -> Any:
            loss, gradients = jax.value_and_grad(self._loss)(parameters, inputs[0], targets[0], keys[0])
            return loss[None], jax.lax.psum(gradients, axis)

        steps = jax.jit(
            jax.shard_map(
                one, mesh=mesh, in_specs=(whole, split, split, split), out_specs=(split, whole), check_vma=False
            )
        )
        spread = jax.sharding.NamedSharding(mesh, split)

        def summed(
            variables: Mapping[str, Float32s], batches: Sequence[Batch]
        ) -> tuple[Sequence[float], dict[str, Float32s]]:
            inputs, targets = (
                jax.device_put(np.stack([getattr(batch, name) for batch in batches]), spread)
                for name in ("inputs", "targets")
            )
            keys = jax.numpy.stack([self._key(batch) for batch in batches])
            parameters = jax.device_put(self._arguments(variables), jax.sharding.NamedSharding(mesh, whole))
            losses, gradients = steps(parameters, inputs, targets, jax.device_put(keys, spread))
            jax.block_until_ready(gradients)  # before the pulled arrays are used again
            return np.array(losses).tolist(), {name: rows(_gradient(g, np)) for name, g in _leaves(gradients).items()}

        return summed

    def _key(self, batch: Batch) -> Any:
        return jax.random.key(step_seed("jax", self._seed, batch.step))

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return the loss and the metrics, means over the batch."""
        parameters, inputs, targets = self._arguments(variables), _argument(batch.inputs), _argument(batch.targets)
        values = {"loss": self._judged(parameters, inputs, targets)}
        if self._metrics and self._apply is not None:
            outputs = self._apply(parameters, inputs)
            values |= {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {name: float(value) for name, value in values.items()}

    def predict(self, values: Mapping[str, Float32s], inputs: Any) -> Any:
        """Return the outputs as a NumPy array."""
        if self._apply is None:
            raise ConfigurationError("predict needs the model's apply=, a function of parameters and inputs")
        return np.array(self._apply(self._tree(values), _array(inputs)))

    def own(self, values: Mapping[str, Float32s]) -> Any:
        """Return the pytree with these weights."""
        return self._tree(values)

    def _arguments(self, variables: Mapping[str, Array]) -> Any:
        """Return the pytree of pulled arrays for one call of a compiled function, which may borrow their memory."""
        own = self._ready()
        leaves = [
            _argument(variables[name]).reshape(leaf.shape).astype(leaf.dtype, copy=False)
            for name, leaf in _leaves(own).items()
        ]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(own), leaves)

    def _tree(self, variables: Mapping[str, Array]) -> Any:
        """Return the pytree of pulled arrays, in the shapes and types that `init` gave."""
        own = self._ready()
        leaves = [_array(variables[name]).reshape(leaf.shape).astype(leaf.dtype) for name, leaf in _leaves(own).items()]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(own), leaves)

    def _ready(self) -> Any:
        if self._parameters is None:
            self._parameters = self._made()
        return self._parameters

    def _made(self) -> Any:
        made = jax.tree_util.tree_map(jax.numpy.asarray, self._init(jax.random.key(self._seed)))
        leaves = _leaves(made)
        if len(leaves) < len(jax.tree_util.tree_leaves(made)):
            raise ConfigurationError(f"two parameters have the same path; the paths are {', '.join(leaves)}")
        if not leaves:
            raise ConfigurationError("init returned no arrays")
        for name, leaf in leaves.items():
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
                raise ConfigurationError(f"parameter {name!r} is {leaf.dtype}; allowed: real floating point")
        return made


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_word(key) for key in path) or "parameters": leaf for path, leaf in found}


def _word(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _array(array: Any) -> Any:
    """Return an array of JAX: a copy of NumPy's, which is used again; CuPy's as it is."""
    return jax.numpy.array(array) if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def _argument(array: Any) -> Any:
    """Return an array for one call of a compiled function: NumPy's as it is, which XLA copies or borrows."""
    return array if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def _gradient(leaf: Any, xp: Any) -> Array:
    if leaf.dtype != np.float32:
        leaf = leaf.astype(np.float32)
    return np.asarray(leaf) if xp is np else xp.from_dlpack(leaf)
