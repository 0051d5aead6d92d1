"""Each type of value, by its framework and use: it arrives in its type or a wider one, or is refused."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.examples.indexed import indexed
from parashard.api.programs.calls import decoded, encoded
from parashard.data.base import Batch
from parashard.errors import BadData, ConfigurationError, WrongModel
from parashard.models.declaration import parts_of
from parashard.plan.embedding import mixed_ids

torch: Any = pytest.importorskip("torch", reason="NO TEST OF TYPES: PyTorch is not installed; `make test-frameworks`")
jax: Any = pytest.importorskip("jax", reason="NO TEST OF TYPES: JAX is not installed; `make test-frameworks` has it")

KEPT = {"bool": "bool", "uint8": "uint8"}
WIDER = dict.fromkeys(("int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"), "int64")
FLOATS = dict.fromkeys(("float16", "float32", "float64"), "float32")
NUMBERS = {**KEPT, **WIDER, **FLOATS}
ZEROS = np.zeros(4)
OBJECTS: dict[str, tuple[Any, str]] = {
    "complex64": (
        ZEROS.astype(np.complex64),
        "are complex64, and due are real numbers: np.stack([x.real, x.imag], -1)",
    ),
    "datetime64": (
        ZEROS.astype("datetime64[s]"),
        "are datetime64[s], and due are numbers: such as (x - x.min()) / np.",
    ),
    "timedelta64": (ZEROS.astype("timedelta64[s]"), "are timedelta64[s], and due are numbers"),
    "str": (ZEROS.astype("U3"), "are text, and due are numbers: np.unique("),
    "bytes": (ZEROS.astype("S3"), "are text, and due are numbers"),
    "object": (ZEROS.astype(object), "must be an array of numbers with one axis for the examples, found object"),
    "structured": (
        np.zeros(4, [("a", "f4"), ("b", "i4")]),
        "have the fields a, b, and due are numbers: {name: x[name]",
    ),
    "masked": (np.ma.masked_equal(ZEROS, 1), "are a masked array, and a mask would be lost: .filled(value)"),
    "uint64": (np.array([2**63] * 4, np.uint64), "found the value 9223372036854775808; a whole number is at most"),
    "torch complex64": (torch.zeros(4, dtype=torch.complex64), "are complex64, and due are real numbers"),
    "torch sparse": (
        torch.eye(4).to_sparse(),
        "are a tensor that is no array in memory: sparse_coo on cpu; .to_dense()",
    ),
    "torch meta": (torch.zeros(4, device="meta"), "are a tensor that is no array in memory: strided on meta"),
    "JAX complex64": (jax.numpy.zeros(4, "complex64"), "are complex64, and due are real numbers"),
    "JAX keys": (jax.random.split(jax.random.key(0), 4), "are no array: "),
}


def of_framework(framework: str, dtype: str) -> Any:
    if framework == "numpy":
        return ZEROS.astype(dtype)
    return torch.zeros(4, dtype=getattr(torch, dtype)) if framework == "torch" else jax.numpy.zeros(4, dtype)


CASES = [(framework, dtype) for framework in ("numpy", "torch", "jax") for dtype in NUMBERS]
CASES += [("torch", "bfloat16"), ("jax", "bfloat16")]


@pytest.mark.parametrize(("framework", "dtype"), CASES)
def test_numbers_arrive_as_inputs_targets_and_weights(framework: str, dtype: str) -> None:
    given, due = of_framework(framework, dtype), NUMBERS.get(dtype, "float32")
    inputs, targets, weights = indexed((given, given, given), "data").take(np.arange(2), 0)
    assert (str(inputs.dtype), str(weights.dtype)) == (due, "float32")
    assert str(targets.dtype) == ("int64" if dtype == "uint8" else due), "labels of uint8 number classes"


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("place", ["inputs", "targets"])
def test_others_are_refused_as_data(name: str, place: str) -> None:
    given, says = OBJECTS[name]
    with pytest.raises(BadData) as refused:
        indexed((given, ZEROS) if place == "inputs" else (ZEROS, given), "data")
    assert refused.value.message.removeprefix(f"data: {place}").lstrip(": ").startswith(says)


def test_what_float32_has_not_is_refused_as_a_target() -> None:
    with pytest.raises(BadData, match="example 1 has a value that is too large for float32"):
        indexed((ZEROS, np.array([0, 1e300, 0, 0])), "data")


class Seen(torch.nn.Module):  # type: ignore[misc]
    """Keeps the types that it is called with."""

    types: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def forward(self, *inputs: Any) -> Any:
        Seen.types = tuple(str(one.dtype).removeprefix("torch.") for one in inputs)
        return sum(one.float() for one in inputs) * self.w


ALL = tuple(indexed((ZEROS.astype(dtype), ZEROS), "data").take(np.arange(4), 0)[0] for dtype in NUMBERS)


def test_a_module_and_a_function_get_what_arrives() -> None:
    model = ps.torch.Model(Seen, torch.nn.functional.mse_loss)
    model.predict(model.initial_variables(), ALL)
    assert Seen.types == tuple(NUMBERS.values())
    found: list[str] = []

    def apply(parameters: Any, inputs: Any) -> Any:
        found.extend(str(one.dtype) for one in inputs)
        return parameters["w"] * inputs[0]

    own = ps.jax.Model(lambda key: {"w": jax.numpy.zeros(1)}, lambda *_: 0.0, apply=apply)
    own.predict(own.initial_variables(), ALL)
    assert found == [{"int64": "int32"}.get(due, due) for due in NUMBERS.values()]


def test_a_mask_is_negated_as_in_its_framework() -> None:
    class Masked(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(5, 1)

        def forward(self, x: Any, padded: Any) -> Any:
            return super().forward(x * ~padded)

    x, padded = np.ones((3, 5), np.float32), np.arange(5) > np.zeros((3, 1))
    data = indexed(((x, padded), np.zeros((3, 1))), "data").take(np.arange(3), 0)
    model = ps.torch.Model(Masked, torch.nn.functional.mse_loss)
    values = model.initial_variables()
    net = model.to_user_object(values)
    due = net(torch.from_numpy(x), torch.from_numpy(padded)).detach().numpy()
    np.testing.assert_allclose(model.predict(values, data[0]), due)


def test_whole_numbers_that_jax_would_cut_are_refused() -> None:
    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        return (parameters["w"] * inputs - targets).mean()

    model = ps.jax.Model(lambda key: {"w": jax.numpy.zeros(1)}, loss, apply=lambda p, x: p["w"] * x)
    values = model.initial_variables()
    batch = Batch(0, 0, np.arange(1), np.array([2**40]), np.zeros(1, np.float32))
    for call in (
        lambda: model.loss_and_gradients(values, batch, np),
        lambda: model.evaluate(values, batch, np),
        lambda: model.predict(values, batch.inputs),
    ):
        with pytest.raises(
            WrongModel, match=r"whole number 1099511627776, and JAX has 32 bits of it: start the script"
        ):
            call()


@pytest.mark.parametrize("dtype", [*FLOATS, *KEPT, *WIDER, "bfloat16"])
def test_variables_are_float32_of_the_same_values(dtype: str) -> None:
    given = jax.numpy.ones(3, dtype) if dtype == "bfloat16" else np.ones(3, dtype)
    array = parts_of("w", given)[1]
    assert array is not None
    assert (str(array.dtype), array.tolist()) == ("float32", [1, 1, 1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.ones(2, complex), "is complex128; due are real numbers"),
        (np.array(["1"]), "is <U1; due are real numbers"),
        (np.zeros(2, "datetime64[s]"), r"is datetime64\[s\]; due are real numbers"),
        (np.array([2**24 + 1]), "has whole numbers that float32 lacks; variables are float32"),
    ],
)
def test_others_are_refused_as_variables(given: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parts_of("w", given)


@pytest.mark.parametrize("dtype", WIDER)
def test_whole_numbers_are_keys(dtype: str) -> None:
    assert mixed_ids(np.array([7], dtype)).tolist() == mixed_ids([7]).tolist()


@pytest.mark.parametrize("given", [[-1], [-100], [-(2**63)], [2**63 + 5], [True], [1.0], ["a"], [1 + 0j]])
def test_others_are_no_keys(given: Any) -> None:
    with pytest.raises(ConfigurationError):
        mixed_ids(np.array(given, np.uint64 if given[0] == 2**63 + 5 else None))


@pytest.mark.parametrize(("framework", "dtype"), CASES)
def test_results_and_arguments_keep_their_type(framework: str, dtype: str) -> None:
    found = decoded(encoded(of_framework(framework, dtype)))
    due = "float32" if dtype == "bfloat16" else str(np.asarray(of_framework(framework, dtype)).dtype)
    assert (str(found.dtype), found.tolist()) == (due, [0] * 4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "bool", "int32", "complex64"])
def test_predictions_of_jax_have_the_type_of_the_output(dtype: str) -> None:
    model = ps.jax.Model(lambda key: {"w": jax.numpy.zeros(1)}, lambda *_: 0.0, apply=lambda p, x: x.astype(dtype))
    found = model.predict(model.initial_variables(), np.ones(3, np.float32))
    assert str(found.dtype) == ("float32" if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "bool", "int32", "complex64"])
def test_predictions_have_the_type_of_the_output(dtype: str) -> None:
    class Out(Seen):
        def forward(self, x: Any) -> Any:
            return x.to(getattr(torch, dtype))

    model = ps.torch.Model(Out, torch.nn.functional.mse_loss)
    found = model.predict(model.initial_variables(), np.ones(3, np.float32))
    assert str(found.dtype) == ("float32" if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_keras_casts_to_the_type_of_its_input(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))
    keras: Any = pytest.importorskip("keras")

    class Own(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            Seen.types = (keras.backend.standardize_dtype(x.dtype),)
            return keras.ops.cast(x, "float32")

    given = keras.Input((1,), dtype=dtype)
    made = keras.Model(given, keras.layers.Dense(1)(Own(dtype=dtype)(given)))
    made.compile(loss="mse")
    model = ps.keras.Model(made)
    data = indexed((np.ones((4, 1), dtype), ZEROS), "data").take(np.arange(4), 0)
    values = {name: parts_of(name, value)[1] for name, value in model.initial_variables().items()}
    model.predict(values, data[0])
    assert Seen.types == (dtype,)
