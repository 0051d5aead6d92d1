"""JAX models: `parashard.jax.Model` makes functions of a pytree of parameters trainable by a `Trainer`.

Memory of pulled arrays is reused once the gradients of a step have been read; arrays that a user may keep are copies
in JAX's own memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError, WrongModel
from parashard.job.embeddings import Table
from parashard.models.base import Initial
from parashard.models.evaluation import Given, MetricPart, metric_states, metrics_by_name
from parashard.models.framework import (
    FROZEN,
    LOSS_SCALE,
    PARAMETER,
    Computed,
    Pairing,
    call_factory,
    class_outside,
    in_one_run,
    initial_of,
    pushed_for,
    refuse_other_framework,
    rows,
    step_seed,
    takes_weights,
    unscaled,
    value_of,
)
from parashard.models.jax.arrays import (
    array_of,
    borrowed,
    check,
    check_width,
    differ,
    gathered,
    is_zero,
    jax,
    kinds_of,
    leaves_of,
    like_gathered,
    output_of,
    result_of,
    seeded_apart,
    summed,
    tables_and_keys,
    tensor_of,
)
from parashard.models.jax.steps import FlatStep
from parashard.models.looking_up import placed
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.protocol.messages import NO_KEYS

Init = Callable[[Any], Any]
Loss = Callable[..., Any]
Apply = Callable[..., Any]
Summed = Callable[
    [Mapping[str, Float32s], Sequence[Batch]],
    tuple[Sequence[float], dict[str, Float32s], list[dict[str, Float32s]]],
]
"""From weights and batches to their losses, the sum of their gradients, and each batch's push for its state."""


class Model:
    """Functions of a pytree of parameters.

    Parameters
    ----------
    init : callable (key) -> pytree
        Makes the parameters, from a key derived from the trainer's seed; leaves are real floating-point arrays.
    loss : callable (parameters, inputs, targets, key) -> scalar
        The mean over a batch; differentiated and compiled. The key is derived from the seed and the step; in an
        evaluation, where nothing should be random, it is None. If examples have weights, a function with a parameter
        `sample_weight` receives them, and returns sum(weight * loss) / examples.
    apply : callable (parameters, inputs) -> outputs, optional
        Computes the outputs, for `Trainer.predict` and metrics.
    metrics : sequence of str, Metric or callable (outputs, targets) -> numbers
        Reported by evaluations besides the loss: names such as "accuracy", metrics of `parashard.metrics`, or functions
        that return one number per example, or one number, the mean over a batch. They need `apply`.
    state : mapping of str to str
        Leaves that are not trained, by path or pattern such as "batch_stats/*", and how they change: "average:M" for a
        running average r' = r + M (b - r), "counter" for whole numbers, "sum" in `sync:N`, "frozen" for not at all.
        Unless all are frozen, `loss` returns the scalar and a pytree of new values of state leaves, by the same paths;
        leaves that it omits do not change.
    tables : sequence of Table
        Embedding tables whose rows the functions use: `loss` and `apply` then take a parameter `rows`, a dict by table
        of the rows of the ids that `keys` returned, shape (*ids, dimension), float32.
    keys : callable (inputs) -> mapping of str to array of whole numbers, optional
        With `tables`: returns the ids that a batch looks up, by table, in any shape. It must depend on the inputs alone
        (NumPy arrays) and may be called in another thread: rows are pulled before the loss is computed.

    Notes
    -----
    Variables are the leaves, named by their path, such as "dense/weight" or "layers/0". They are transferred as
    float32, a scalar as one row. If parameters are float16, the loss is scaled as in `parashard.torch.Model`.
    """

    def __init__(
        self,
        init: Init,
        loss: Loss | None = None,
        *,
        apply: Apply | None = None,
        metrics: Sequence[Given] = (),
        state: Mapping[str, str] | None = None,
        tables: Sequence[Table] = (),
        keys: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        refuse_other_framework(init, "jax")
        for name, given in (("init", init), ("apply", apply)):
            if not callable(given) and (name != "apply" or given is not None):
                raise ConfigurationError(f"{name} is a function, found {type(given).__name__}")
        if not callable(loss):
            raise ConfigurationError(
                f"loss is a function of parameters, inputs, targets and key, found {type(loss).__name__}"
            )
        if metrics and apply is None:
            raise ConfigurationError("metrics are of outputs: they need apply=, a function of parameters and inputs")
        self._tables = tables_and_keys(tables, keys)
        self.tables = tuple(self._tables.values())
        self.keys_function = keys
        self._init = init
        self._loss = loss
        self._pairing = Pairing()
        self._classes: int | None = None  # number of classes of the outputs; 0: not classes; None: not known yet
        self._has_warned = False
        self._apply = jax.jit(apply) if apply is not None else None
        self._metrics = metrics_by_name(metrics)
        self._seed = 0
        self._patterns = dict(state or {})
        self._kinds: dict[str, str] = {}
        self._parameters: Any = None
        self._leaves: dict[str, Any] = {}  # initial leaves by path; empty until made
        self._forms: dict[str, tuple[tuple[int, ...], Any]] = {}  # their shapes and types
        self._scale = 1.0
        self._flat: FlatStep | None = None  # compiled for the layout of the last step on a GPU
        self._gradients, self._scaled = (
            jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))
            for function in (self._loss_and_state, self._scaled_loss_and_state)
        )
        self._evaluate = jax.jit(self._evaluation_loss)
        self.weighted = takes_weights(loss)

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the ids that a batch looks up, by table."""
        assert self.keys_function is not None, "only a model with tables is asked"
        return self.keys_function(batch.inputs)

    def seed(self, seed: int) -> None:
        """Initialise the parameters from this seed."""
        if self._parameters is None or seed != self._seed:
            self._seed = seed
            self._parameters = self._made()

    def for_thread(self) -> Model:
        """Return itself: compiled functions keep no state between calls."""
        return self

    def config_sha256(self) -> str:
        """Return "": a model has nothing but its leaves and its code."""
        return ""

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the leaves with their initial values, as float32."""
        self._ready()
        return {name: initial_of(name, array_of(leaf), self._kinds[name]) for name, leaf in self._leaves.items()}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` specifies."""
        self._check_pairing(variables, batch)
        self._check_classes(variables, batch)
        if xp is not np:
            return unscaled(lambda scale: self._computed_flat(variables, batch, xp, scale), self._scale, xp)
        trained, state = self._split_trained(self._arguments(variables))
        given = gathered(variables, batch)
        data, weights = self._batch(batch), _weights(batch)

        def computed(scale: float) -> Computed:
            if scale == 1:
                (loss, after), (gradients, of_ids) = self._gradients(trained, given, state, *data, **weights)
            else:
                (_, (loss, after)), (gradients, of_ids) = self._scaled(trained, given, state, scale, *data, **weights)
            found = {name: rows(result_of(leaf, scale)) for name, leaf in gradients.items()}
            found |= summed({name: result_of(leaf, scale) for name, leaf in of_ids.items()}, variables, batch, xp)
            return result_of(loss), found | self._pushed(state, after)

        return unscaled(computed, self._scale, xp)

    def _computed_flat(self, variables: Mapping[str, Array], batch: Batch, xp: Any, scale: float) -> Computed:
        """Return loss and gradients of a step on a GPU, with gradients and state updates in one contiguous array."""
        self._ready()
        given = in_one_run(variables, self._forms, xp)
        if self._flat is None or self._flat.layout != given.layout:
            self._flat = FlatStep(
                given.layout, self._forms, self._kinds, self._loss_and_state, self._scaled_loss_and_state
            )
        looked_up, scaled = gathered(variables, batch), None if scale == 1 else scale
        loss, found, of_ids = self._flat(given.run, looked_up, scaled, self._batch(batch), _weights(batch), xp)
        of_rows = {name: xp.from_dlpack(leaf) for name, leaf in of_ids.items()}
        return loss, found.with_rows(summed(of_rows, variables, batch, xp)) if of_rows else found

    def _check_pairing(self, variables: Mapping[str, Array], batch: Batch) -> None:
        """Refuse a loss that compares each output with every target; needs `apply` for the outputs."""
        if self._apply is None or batch.weights is not None or not self._pairing.is_open:
            return
        tree, further = self._tree(variables), _named(gathered(variables, batch))
        inputs, targets = self._data((batch.inputs, batch.targets))
        if self._pairing.is_doubtful(jax.eval_shape(self._apply, tree, inputs, **further), targets):
            outputs = np.asarray(self._apply(tree, inputs, **further))
            loss = float(self._evaluate(tree, inputs, targets, **further))
            self._pairing.check(
                outputs,
                np.asarray(targets),
                loss,
                lambda: float(self._evaluate(tree, inputs, targets[::-1], **further)),
            )

    def _check_classes(self, variables: Mapping[str, Array], batch: Batch) -> None:
        """Warn of integer targets outside the outputs' classes, since JAX does not; needs `apply` for the outputs."""
        targets = batch.targets if batch.on_host is None else batch.on_host.targets
        if self._apply is None or getattr(targets, "dtype", np.dtype(bool)).kind not in "iu" or self._has_warned:
            return
        if self._classes is None:
            inputs, further = self._data(batch.inputs), _named(gathered(variables, batch))
            shape = getattr(jax.eval_shape(self._apply, self._tree(variables), inputs, **further), "shape", ())
            *places, classes = shape or (0,)
            self._classes = classes if tuple(places) == targets.shape and classes > 1 else 0
        outside = class_outside(targets, self._classes) if self._classes else None
        if outside is not None:
            self._has_warned = True
            warnings.warn(
                f"the targets have the number {outside}, and the outputs have classes 0 to {self._classes - 1}: where "
                "targets are classes, number them from 0 on, or leave such examples out in the loss; JAX computes a "
                "wrong loss without an error",
                stacklevel=2,
            )

    def check(self, batch: Batch) -> None:
        """Trace a step and an evaluation of such a batch without computing them; raise WrongModel if one fails."""
        arguments = self._batch(batch)
        weights = _weights(batch)
        own = self._ready()
        rows = like_gathered(self._tables, batch)
        trained, state = self._split_trained(self._leaves)
        jax.eval_shape(self._gradients, trained, rows, state, *arguments, **weights)
        gradients = jax.grad(self._loss_and_state, argnums=(0, 1), has_aux=True)

        def traced() -> Any:
            trace = jax.make_jaxpr(lambda *given, **named: gradients(*given, **named)[0])
            return trace(trained, rows, state, *arguments, **weights)

        first, second = seeded_apart(traced)
        if is_zero(first):
            raise WrongModel("the loss depends on no parameter: it is computed without them, or from stop_gradient")
        if differ(first, second):
            raise WrongModel(
                "the loss draws from NumPy's or Python's generator while JAX traces it, and each step would compute "
                "with the same numbers: draw from the key"
            )
        try:
            jax.eval_shape(self._evaluate, own, *arguments[:2], **_named(rows), **weights)
        except Exception as error:
            raise WrongModel(
                f"the loss cannot be computed without a key, which is None in an evaluation, where nothing should be "
                f"random: {named_with_line(error)}"
            ) from error
        if self._apply is not None:
            jax.eval_shape(self._apply, own, arguments[0], **_named(rows))
        elif not self._tables and not weights:
            self._warn_of_pairing(own, *arguments[:2], rows_of(batch.inputs))

    def _warn_of_pairing(self, parameters: Any, inputs: Any, targets: Any, examples: int) -> None:
        """Warn of a loss that does not depend on the order of targets, at perturbed parameters (zeros may hide it)."""
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> Any:
            floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            return (leaf + 0.1 * draw.standard_normal(leaf.shape)).astype(leaf.dtype) if floating else leaf

        def loss(places: Any) -> float:
            return float(self._evaluate(elsewhere, inputs, jax.tree_util.tree_map(lambda leaf: leaf[places], targets)))

        elsewhere, order = jax.tree_util.tree_map(moved, parameters), np.arange(examples)
        as_it_is, of_one = loss(order), loss(np.zeros_like(order))
        mixed = loss(order[::-1]), loss(np.roll(order, 1))
        if np.allclose(mixed, as_it_is, rtol=1e-6) and not np.isclose(of_one, as_it_is, rtol=1e-4):
            warnings.warn(
                "the loss is the same whichever target belongs to which example: outputs of shape (n, 1) and targets "
                "of shape (n,) are compared each with every one; give them one shape",
                stacklevel=2,
            )

    def summed_over(self, mesh: Any) -> Summed:
        """Return a function that computes equal-sized batches at once, one on each device of a one-axis mesh."""
        self._ready()
        if self._scale != 1:
            raise ConfigurationError(
                "parameters of float16 need a loss that is scaled step by step, and here the devices' steps are one; "
                "allowed: float32 and bfloat16"
            )
        (axis,) = mesh.axis_names
        split, whole = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()
        first = jax.tree_util.Partial(jax.tree_util.tree_map, lambda array: array[0])

        def one(trained: Any, state: Any, data: Any, weights: Any) -> Any:
            step = jax.value_and_grad(self._loss_and_state, has_aux=True)
            (loss, after), gradients = step(trained, {}, state, *first(data), **first(weights))
            return loss[None], jax.lax.psum(gradients, axis), jax.tree_util.tree_map(lambda leaf: leaf[None], after)

        specs = {"in_specs": (whole, whole, split, split), "out_specs": (split, whole, split), "check_vma": False}
        steps = jax.jit(jax.shard_map(one, mesh=mesh, **specs))
        spread, same = (jax.sharding.NamedSharding(mesh, spec) for spec in (split, whole))

        def summed(
            variables: Mapping[str, Float32s], batches: Sequence[Batch]
        ) -> tuple[Sequence[float], dict[str, Float32s], list[dict[str, Float32s]]]:
            trained, state = self._split_trained(self._arguments(variables))
            data = [(*self._batch(batch), _weights(batch)) for batch in batches]
            *stacked, weights = jax.tree_util.tree_map(lambda *leaves: jax.numpy.stack(leaves), *data)
            placed = jax.device_put(tuple(stacked), spread), jax.device_put(weights, spread)
            losses, gradients, after = steps(*jax.device_put((trained, state), same), *placed)
            jax.block_until_ready(gradients)  # before memory of the pulled arrays is reused
            found = {name: rows(np.asarray(result_of(leaf))) for name, leaf in gradients.items()}
            each = [{name: leaf[place] for name, leaf in after.items()} for place in range(len(batches))]
            return np.array(losses).tolist(), found, [self._pushed(state, one_after) for one_after in each]

        return summed

    def _pushed(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Array]:
        """Return a step's pushes for state, by variable."""
        return {
            name: pushed_for(self._kinds[name], array_of(leaf), array_of(after.get(name, leaf)))
            for name, leaf in before.items()
            if self._kinds[name] != FROZEN
        }

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss (the mean over the batch) and the metrics' states."""
        parameters = self._tree_of(self._arguments(variables))
        inputs, targets = self._data((batch.inputs, batch.targets))
        rows = _named(gathered(variables, batch))
        loss = self._evaluate(parameters, inputs, targets, **rows, **_weights(batch))
        values: dict[str, MetricPart] = {"loss": float(loss)}
        if self._metrics and self._apply is not None:
            outputs = self._apply(parameters, inputs, **rows)
            values |= metric_states(self._metrics, outputs, targets, rows_of(batch.inputs), _on_host)
        return values

    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Any:
        """Return the outputs as NumPy arrays, structured as `apply` returns them.

        `values` includes the rows of `keys`.
        """
        if self._apply is None:
            raise ConfigurationError("predict needs the model's apply=, a function of parameters and inputs")
        batch = Batch(-1, -1, np.arange(rows_of(inputs)), inputs, None)
        there = placed(self, batch, keys, keys) if keys else batch
        outputs = self._apply(self._tree(values), self._data(inputs), **_named(gathered(values, there)))
        return jax.tree_util.tree_map(output_of, outputs)

    def to_user_object(self, values: Mapping[str, Float32s]) -> Any:
        """Return the pytree with these weights, without rows of tables."""
        return self._tree(values)

    def _loss_and_state(
        self, trained: Any, rows: Any, state: Any, inputs: Any, targets: Any, seed: Any, **weights: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the loss, and the new values of state by path; traced, including the step's key."""
        tree, key = self._tree_of({**trained, **state}), jax.random.key(seed)
        found = self._loss(tree, inputs, targets, key, **_named(rows), **weights)
        if not self._kinds_changing():
            return _scalar(found), {}
        if not isinstance(found, tuple) or len(found) != 2:
            raise WrongModel("with state=, the loss returns two things: the scalar, and the new values of the state")
        after = leaves_of(found[1])
        for name, leaf in after.items():
            if self._kinds.get(name, "") in ("", FROZEN):
                raise WrongModel(f"the loss returned a new value of {name!r}, which state= does not say how to change")
            if leaf.shape != state[name].shape:
                raise WrongModel(f"the new value of {name!r} has shape {leaf.shape}; it is {state[name].shape}")
        return _scalar(found[0]), after

    def _scaled_loss_and_state(
        self, trained: Any, rows: Any, state: Any, scale: Any, inputs: Any, targets: Any, key: Any, **weights: Any
    ) -> tuple[Any, tuple[Any, dict[str, Any]]]:
        """Return the loss times the scale in float32, and the result of `_loss_and_state`; traced."""
        loss, after = self._loss_and_state(trained, rows, state, inputs, targets, key, **weights)
        return jax.numpy.asarray(loss, np.float32) * scale, (loss, after)

    def _split_trained(self, leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return trained leaves, and the others."""
        trained = {name: leaf for name, leaf in leaves.items() if not self._kinds[name]}
        return trained, {name: leaf for name, leaf in leaves.items() if name not in trained}

    def _batch(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return inputs, targets and the seed of a step."""
        seed = np.int64(step_seed("jax", self._seed, batch.step, batch.part))
        on_host = batch.on_host or batch
        return *self._data((batch.inputs, batch.targets), (on_host.inputs, on_host.targets)), seed

    def _data(self, tree: Any, on_host: Any = None) -> Any:
        """Return data for one call; integers must fit JAX's width unless there are tables, whose ids NumPy reads."""
        if not self._tables:
            check_width(tree if on_host is None else on_host)
        return jax.tree_util.tree_map(borrowed, tree)

    def _evaluation_loss(self, parameters: Any, inputs: Any, targets: Any, **further: Any) -> Any:
        found = self._loss(parameters, inputs, targets, None, **further)
        return found[0] if self._kinds_changing() else found

    def _kinds_changing(self) -> bool:
        return any(kind not in ("", FROZEN) for kind in self._kinds.values())

    def _arguments(self, variables: Mapping[str, Array]) -> dict[str, Any]:
        """Return leaves for one call of a compiled function; they may share memory with the pulled arrays."""
        self._ready()
        return {
            name: borrowed(value_of(variables[name], self._kinds[name])).reshape(shape).astype(dtype, copy=False)
            for name, (shape, dtype) in self._forms.items()
        }

    def _tree(self, variables: Mapping[str, Array]) -> Any:
        """Return pulled arrays as a pytree of `init`'s shapes and types."""
        self._ready()
        return self._tree_of(
            {
                name: tensor_of(value_of(variables[name], self._kinds[name])).reshape(shape).astype(dtype)
                for name, (shape, dtype) in self._forms.items()
            }
        )

    def _tree_of(self, leaves: Mapping[str, Any]) -> Any:
        structure = jax.tree_util.tree_structure(self._ready())
        return jax.tree_util.tree_unflatten(structure, [leaves[name] for name in self._forms])

    def _ready(self) -> Any:
        if self._parameters is None:
            self._parameters = self._made()
        return self._parameters

    def _made(self) -> Any:
        made = call_factory(lambda: self._init(jax.random.key(self._seed)), "init(key)")
        check(made)
        made = jax.tree_util.tree_map(jax.numpy.asarray, made)
        leaves = leaves_of(made)
        if len(leaves) < len(jax.tree_util.tree_leaves(made)):
            raise ConfigurationError(f"two parameters have the same path; the paths are {', '.join(leaves)}")
        if not leaves:
            raise ConfigurationError("init returned no arrays")
        self._kinds = kinds_of(leaves, self._patterns)
        half = any(leaf.dtype == np.float16 for name, leaf in leaves.items() if not self._kinds[name])
        self._scale = LOSS_SCALE if half else 1.0
        self._leaves = leaves
        self._forms = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        return made


def _scalar(loss: Any) -> Any:
    if getattr(loss, "shape", ()) != () or isinstance(loss, tuple | list | dict):
        found = f"shape {loss.shape}" if hasattr(loss, "shape") else type(loss).__name__
        raise WrongModel(f"the loss must be a scalar, the mean over a batch; found {found}")
    return loss


def _weights(batch: Batch) -> dict[str, Any]:
    return {} if batch.weights is None else {PARAMETER: borrowed(batch.weights)}


def _named(rows: dict[str, Any]) -> dict[str, Any]:
    """Return rows as a keyword argument of the user's function; none if the model has no tables."""
    return {"rows": rows} if rows else {}


def _on_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value
