"""What of a Keras model is compiled: its loss, its metrics and its outputs, as functions of tensors.

The model's own variables are neither read nor written: each function computes in a `keras.StatelessScope` with the
tensors in their place. Knows no backend and no step. Called by `parashard.keras`.
"""

from __future__ import annotations

from typing import Any

from parashard.models.framework import WrongModel
from parashard.models.keras_variables import Found, is_seed, keras, shared_seed
from parashard.models.state import FROZEN


class Functions:
    """The functions of the model that was taken last.

    Attributes
    ----------
    found : Found
        What of the model is a variable; tensors of what is trained, and of what is not, come in its order.
    tells_metrics : bool
        Whether a training step computes the compiled metrics, too.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self.tells_metrics = False
        self.found = Found({}, {}, [])

    def take(self, model: Any, found: Found) -> None:
        """Be those of this model from now on."""
        self._model, self.found = model, found

    def loss(
        self, trained: list[Any], fixed: list[Any], inputs: Any, targets: Any, weights: Any
    ) -> tuple[Any, tuple[dict[str, Any], list[Any]]]:
        """Return the loss of a training step, the new values of state by name, and the metrics' variables."""
        model = self._model
        with keras.StatelessScope(self._mapping(trained, fixed), collect_losses=True) as scope:
            held = [variable for variable in self.found.in_order() if not is_seed(variable)]
            before = [scope.get_current_value(variable) for variable in held]
            outputs = model(inputs, training=True)
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=True)
            after = {}
            for variable, value in zip(held, before, strict=True):
                kind, now = self.found.kinds.get(variable.path, FROZEN), scope.get_current_value(variable)
                if kind not in ("", FROZEN):
                    after[variable.path] = now
                elif now is not value and not kind:
                    raise WrongModel(
                        f"{variable.path!r} is trained, and a layer writes it while a step is computed: the shards "
                        "move it, and that write would be lost; leave the layer out, such as SpectralNormalization"
                    )
                elif now is not value:
                    raise WrongModel(
                        f"{variable.path!r} is written while a step is computed, and has no gradient to push; say how "
                        f"it changes: state={{{variable.path!r}: 'average:0.1'}} for a running average, 'counter' for "
                        "whole numbers, 'sum'"
                    )
            known = {id(variable) for variable in (*self.found.in_order(), *model.metrics_variables, *shared_seed())}
            if scope.state_mapping.keys() - known:
                raise WrongModel(
                    f"a variable that is no weight of {model.name!r}, such as the state of a stateful RNN, is written "
                    "while a step is computed, and that write would be lost: make it by add_weight of its layer, and "
                    "say by state= how it changes"
                )
            sums = []
            if self.tells_metrics:
                told = keras.tree.map_structure(keras.ops.stop_gradient, outputs)
                model.compute_metrics(inputs, targets, told, sample_weight=weights)
                sums = [variable.value for variable in model.metrics_variables]
        shape = getattr(loss, "shape", None)
        if shape is None or tuple(shape) != ():
            found = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
            raise WrongModel(f"the loss must be one number, the mean over a batch; found {found}")
        return loss, (after, sums)

    def metrics(
        self, trained: list[Any], fixed: list[Any], inputs: Any, targets: Any, weights: Any
    ) -> tuple[Any, list[Any]]:
        """Return the loss of a batch, and the metrics' variables after it: in the scope they begin at zero."""
        model = self._model
        with keras.StatelessScope(self._mapping(trained, fixed), collect_losses=True):
            outputs = model(inputs, training=False)
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=False)
            model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
            return loss, [variable.value for variable in model.metrics_variables]

    def output(self, trained: list[Any], fixed: list[Any], inputs: Any) -> Any:
        with keras.StatelessScope(self._mapping(trained, fixed)):
            return self._model(inputs, training=False)

    def _mapping(self, trained: list[Any], fixed: list[Any]) -> list[tuple[Any, Any]]:
        return [
            (variable, keras.ops.reshape(value, variable.shape))
            for variable, value in zip(self.found.in_order(), [*trained, *fixed], strict=True)
        ]
