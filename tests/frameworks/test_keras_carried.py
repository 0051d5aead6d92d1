"""What Keras lets a user do to a model: each row of docs/carried.md trains as in Keras alone, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard.errors import WrongModel
from support.keras_cases import X, alone, batch, compiled, first_values, keras, kinds, layers, model

ops = keras.ops
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def functional(inputs: Any, outputs: Any) -> Any:
    made = keras.Model(inputs, outputs)
    made.compile(loss=LOSS)
    return made


def shared() -> Any:
    given, dense = keras.Input((4,)), layers.Dense(4)
    return functional(given, layers.Dense(3)(dense(dense(given))))


def nested() -> Any:
    given = keras.Input((4,))
    return functional(given, layers.Dense(3)(keras.Sequential([keras.Input((4,)), layers.Dense(4)])(given)))


def low_rank() -> Any:
    made = compiled(layers.Dense(4), layers.Dense(3))
    made.layers[0].enable_lora(2)
    made.compile(loss=LOSS)
    return made


def quantized() -> Any:
    made = compiled(layers.Dense(4), layers.Dense(3), layers.LayerNormalization())
    made.quantize("int8")
    made.compile(loss=LOSS)
    return made


def adapted() -> Any:
    scaling = layers.Normalization()
    scaling.adapt(X)
    return compiled(scaling, layers.Dense(3))


@keras.ops.custom_gradient
def doubled(x: Any) -> Any:
    def gradient(*given: Any, upstream: Any = None) -> Any:
        return 2 * (given[0] if upstream is None else upstream)

    return x, gradient


class Calling(layers.Layer):
    """Calls a function of its inputs and itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def call(self, inputs: Any) -> Any:
        return self._function(inputs, self)


class Tracking(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="mean")

    def call(self, inputs: Any) -> Any:
        self.tracker.update_state(ops.mean(inputs))
        return inputs


class Constant(layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(4,), dtype="int32", trainable=False, initializer="ones", name="table")

    def call(self, inputs: Any) -> Any:
        return inputs * ops.cast(self.table, "float32")


def with_loss(inputs: Any, layer: Any) -> Any:
    layer.add_loss(ops.mean(inputs**2))
    return inputs


CARRIED: dict[str, Callable[[], Any]] = {
    "a layer that is called twice": shared,
    "a model within a model": nested,
    "enable_lora": low_rank,
    "quantize": quantized,
    "an adapted Normalization": adapted,
    "add_loss": lambda: compiled(layers.Dense(4), Calling(with_loss), layers.Dense(3)),
    "a custom gradient": lambda: compiled(layers.Dense(4), Calling(lambda x, layer: doubled(x)), layers.Dense(3)),
    "stop_gradient": lambda: compiled(layers.Dense(4), Calling(lambda x, _: ops.stop_gradient(x) + x), layers.Dense(3)),
    "a metric that call updates": lambda: compiled(Tracking(), layers.Dense(3)),
    "a constant of whole numbers": lambda: compiled(Constant(), layers.Dense(3)),
    "masks and a recurrent layer": lambda: compiled(layers.Reshape((2, 2)), layers.Masking(), layers.GRU(3)),
    "layers of float64": lambda: compiled(layers.Dense(4, dtype="float64"), layers.Dense(3)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_has_the_gradients_of_keras(name: str) -> None:
    ours = model(CARRIED[name])
    values = first_values(ours)
    ours.check(batch())
    found, gradients = ours.loss_and_gradients(values, batch(), np)
    due, of_weights = alone(ours.to_user_object(values), values)
    assert float(found) == pytest.approx(due, rel=1e-5)
    assert of_weights.keys() == gradients.keys()
    for path, gradient in of_weights.items():
        assert np.asarray(gradients[path]) == pytest.approx(np.asarray(gradient), abs=1e-5)


def test_a_frozen_kernel_with_low_rank_weights_stays_as_it_is() -> None:
    assert kinds(model(low_rank)) == {"sequential/dense/kernel": "frozen"}


def stateful() -> Any:
    made = keras.Sequential(
        [keras.Input((4,), batch_size=8), layers.Reshape((2, 2)), layers.LSTM(4, stateful=True), layers.Dense(3)]
    )
    made.compile(loss=LOSS)
    return made


def counted(counter: Any) -> Callable[..., Any]:
    def count(inputs: Any, layer: Any) -> Any:
        counter.assign(counter + 1)
        return inputs

    return count


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a stateful recurrent layer": (
        stateful,
        "such as the state of a stateful RNN, is written while a step is computed",
    ),
    "a variable of nobody": (
        lambda: compiled(Calling(counted(keras.Variable(0.0, trainable=False))), layers.Dense(3)),
        "a variable that is no weight of 'sequential'",
    ),
    "a kernel that its layer writes": (
        lambda: compiled(layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3)),
        "'sequential/spectral_normalization/dense/kernel' is trained, and a layer writes it while a step is computed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    ours = model(make)
    with pytest.raises(WrongModel) as refused:
        ours.loss_and_gradients(first_values(ours), batch(), np)
    assert says in str(refused.value)
