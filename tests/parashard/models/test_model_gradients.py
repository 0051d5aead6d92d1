"""What holds for every classifier: exact gradients, dtypes, determinism, evaluation; the same on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.plan.variables import Variable
from support.model_cases import CLASSIFIERS, ORACLES, OnBoth, batch_of, built, finite_differences, start

each_classifier = pytest.mark.parametrize(("options", "shape"), CLASSIFIERS.values(), ids=CLASSIFIERS.keys())


@each_classifier
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_those_of_finite_differences(options: Any, shape: Any, n: int) -> None:
    model, batch = built(options, shape), batch_of(shape, n)
    variables = start(model, np.float64)
    _, gradients = model.loss_and_gradients(variables, batch, np)
    assert gradients.keys() == variables.keys()
    for name, expected in finite_differences(model, variables, batch).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


@each_classifier
def test_float32_stays_float32_and_agrees_with_float64(options: Any, shape: Any) -> None:
    model, batch = built(options, shape), batch_of(shape)
    single, double = start(model), start(model, np.float64)
    loss, gradients = model.loss_and_gradients(single, batch, np)
    exact_loss, exact = model.loss_and_gradients(double, batch, np)
    assert np.shape(loss) == ()
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert (gradient.dtype, exact[name].dtype) == (np.float32, np.float64), name
        assert gradient.shape == single[name].shape
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-3, atol=1e-5, err_msg=name)


@each_classifier
def test_variables_and_inputs_are_not_changed(options: Any, shape: Any) -> None:
    model, batch = built(options, shape), batch_of(shape)
    variables = start(model)
    for held in (*variables.values(), batch.inputs, batch.targets):
        held.flags.writeable = False
    model.loss_and_gradients(variables, batch, np)
    model.evaluate(variables, batch, np)


@each_classifier
def test_gradients_are_new_arrays(options: Any, shape: Any) -> None:
    model, batch = built(options, shape), batch_of(shape)
    variables = start(model)
    _, first = model.loss_and_gradients(variables, batch, np)
    kept = {name: gradient.copy() for name, gradient in first.items()}
    _, second = model.loss_and_gradients(variables, batch_of(shape, n=5), np)
    for name, gradient in first.items():
        assert not np.shares_memory(gradient, second[name])
        assert not any(np.shares_memory(gradient, other) for other in (*variables.values(), batch.inputs))
        np.testing.assert_array_equal(gradient, kept[name])


@each_classifier
def test_a_step_computed_twice_gives_the_same_bits(options: Any, shape: Any) -> None:
    batch = batch_of(shape)
    results = []
    for model in (built(options, shape), built(options, shape)):  # two workers
        results.append(model.loss_and_gradients(start(model), batch, np))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        np.testing.assert_array_equal(gradient, results[1][1][name])


@each_classifier
def test_dropout_depends_on_step_and_seed_and_on_nothing_else(options: Any, shape: Any) -> None:
    model = built(options, shape)
    variables = start(model)
    loss = model.loss_and_gradients(variables, batch_of(shape, step=11), np)[0]
    other_step = model.loss_and_gradients(variables, batch_of(shape, step=12), np)[0]
    other_seed = built(options, shape, seed=8).loss_and_gradients(variables, batch_of(shape, step=11), np)[0]
    changes = options.get("dropout", 0) > 0
    assert (loss != other_step, loss != other_seed) == (changes, changes)


@each_classifier
def test_evaluation_is_the_mean_over_examples_without_dropout(options: Any, shape: Any) -> None:
    model, batch = built(options, shape), batch_of(shape, n=6)
    variables = start(model, np.float64)
    whole = built(options | ({"dropout": 0.0} if "dropout" in options else {}), shape)
    logits, _ = model.forward(variables, batch.inputs, None, np)  # type: ignore[attr-defined]
    metrics = model.evaluate(variables, batch, np)
    assert float(metrics["accuracy"]) == np.mean(
        [row.argmax() == t for row, t in zip(logits, batch.targets, strict=True)]
    )
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = [-np.log(row[t]) for row, t in zip(probabilities, batch.targets, strict=True)]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert metrics["loss"] == pytest.approx(whole.loss_and_gradients(variables, batch, np)[0], rel=1e-12)
    assert type(metrics["loss"]) is float


@each_classifier
def test_only_weights_decay(options: Any, shape: Any) -> None:
    for name, declared in built(options, shape).initial_variables().items():
        assert isinstance(declared, Variable)
        assert declared.decay == name.endswith(".weight")
        assert (declared.initializer.kind == "zeros") == name.endswith(".bias")


@pytest.mark.parametrize(("options", "shape"), (CLASSIFIERS | ORACLES).values(), ids=(CLASSIFIERS | ORACLES).keys())
def test_models_use_what_both_namespaces_have(options: Any, shape: Any) -> None:
    model, batch = built(options, shape), batch_of(shape)
    model.loss_and_gradients(start(model), batch, OnBoth())
    model.evaluate(start(model), batch, OnBoth())


@pytest.mark.gpu
def test_cupy_has_every_name_of_the_list(xp_gpu: Any) -> None:
    assert [name for name in OnBoth.NAMES if not hasattr(xp_gpu, name)] == []


@pytest.mark.gpu
@each_classifier
def test_a_gpu_computes_what_numpy_computes(options: Any, shape: Any, xp_gpu: Any) -> None:
    model = built(options, shape)
    variables = start(model)
    on_gpu = {name: xp_gpu.asarray(values) for name, values in variables.items()}
    loss, gradients = model.loss_and_gradients(variables, batch_of(shape), np)
    gpu_loss, gpu_gradients = model.loss_and_gradients(on_gpu, batch_of(shape, xp=xp_gpu), xp_gpu)
    assert float(gpu_loss) == pytest.approx(loss, rel=1e-4)
    for name, gradient in gradients.items():
        assert isinstance(gpu_gradients[name], xp_gpu.ndarray)
        assert gpu_gradients[name].dtype == np.float32
        np.testing.assert_allclose(xp_gpu.asnumpy(gpu_gradients[name]), gradient, rtol=1e-3, atol=1e-5, err_msg=name)
    metrics, gpu_metrics = (
        {name: float(value) for name, value in found.items()}
        for found in (
            model.evaluate(variables, batch_of(shape), np),
            model.evaluate(on_gpu, batch_of(shape, xp=xp_gpu), xp_gpu),
        )
    )
    assert gpu_metrics == pytest.approx(metrics, rel=1e-4, nan_ok=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "shape"), ORACLES.values(), ids=ORACLES.keys())
def test_oracles_push_from_a_gpu(options: Any, shape: Any, xp_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: b"\x07" * count)
    model = built(options, shape)
    on_gpu = {name: xp_gpu.asarray(values) for name, values in start(model).items()}
    _, expected = model.loss_and_gradients(start(model), batch_of(shape), np)
    _, gradients = model.loss_and_gradients(on_gpu, batch_of(shape, xp=xp_gpu), xp_gpu)
    for name, gradient in expected.items():
        assert gradients[name].dtype == np.float32
        np.testing.assert_array_equal(xp_gpu.asnumpy(gradients[name]), gradient)
