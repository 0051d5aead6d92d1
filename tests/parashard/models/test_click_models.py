"""Models that look up rows of embedding tables: formulas, exact gradients, evaluations, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.base import LooksUp
from parashard.models.building import build_model
from parashard.plan.variables import Variable
from support.click_cases import (
    CLICK_MODELS,
    COLUMNS,
    DIMENSION,
    built_click,
    click_batch,
    click_spec,
    click_start,
    tables,
)
from support.model_cases import OnBoth, finite_differences, spec_of

each_model = pytest.mark.parametrize(("options", "numbers"), CLICK_MODELS.values(), ids=CLICK_MODELS.keys())
each_kind = pytest.mark.parametrize("kind", ["wide_deep", "fm", "deepfm", "dlrm"])


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


@each_model
@pytest.mark.parametrize("n", [1, 5])
def test_gradients_of_variables_and_rows_are_those_of_finite_differences(options: Any, numbers: int, n: int) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers, n)
    variables = click_start(model, batch, np.float64)
    _, gradients = model.loss_and_gradients(variables, batch, np)
    assert gradients.keys() == variables.keys()
    for name, expected in finite_differences(model, variables, batch).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


@each_model
def test_float32_stays_float32_and_agrees_with_float64(options: Any, numbers: int) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers)
    single, double = click_start(model, batch), click_start(model, batch, np.float64)
    loss, gradients = model.loss_and_gradients(single, batch, np)
    exact_loss, exact = model.loss_and_gradients(double, batch, np)
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert (gradient.dtype, exact[name].dtype) == (np.float32, np.float64), name
        assert gradient.shape == single[name].shape
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-3, atol=1e-5, err_msg=name)


@each_model
def test_what_is_given_is_not_changed_and_gradients_are_new(options: Any, numbers: int) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers)
    variables = click_start(model, batch)
    given = [*variables.values(), *batch.inputs.values(), *batch.places.values(), batch.targets]
    for held in given:
        held.flags.writeable = False
    _, gradients = model.loss_and_gradients(variables, batch, np)
    model.evaluate(variables, batch, np)
    assert not any(np.shares_memory(gradient, held) for gradient in gradients.values() for held in given)


@each_model
def test_dropout_depends_on_step_and_seed_and_is_not_in_evaluations(options: Any, numbers: int) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers)
    variables = click_start(model, batch, np.float64)

    def loss(seed: int, step: int) -> Any:
        return built_click(options, numbers, seed).loss_and_gradients(
            variables, click_batch(model, numbers, step=step), np
        )[0]

    assert loss(7, 11) == loss(7, 11)
    changes = options.get("dropout", 0) > 0
    assert (loss(7, 11) != loss(7, 12), loss(7, 11) != loss(8, 11)) == (changes, changes)
    whole = built_click(options | ({"dropout": 0.0} if changes else {}), numbers)
    assert model.evaluate(variables, batch, np)["loss"] == pytest.approx(
        whole.loss_and_gradients(variables, batch, np)[0], rel=1e-12
    )


@each_model
def test_models_use_what_both_namespaces_have(options: Any, numbers: int) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers)
    variables = click_start(model, batch)
    model.loss_and_gradients(variables, batch, OnBoth())
    model.evaluate(variables, batch, OnBoth())


@each_model
def test_every_declared_variable_has_its_own_name(options: Any, numbers: int) -> None:
    for name, declared in built_click(options, numbers).initial_variables().items():
        assert isinstance(declared, Variable)
        assert declared.name == name
        assert declared.decay == name.endswith(".weight")


@pytest.mark.gpu
@each_model
def test_a_gpu_computes_what_numpy_computes(options: Any, numbers: int, xp_gpu: Any) -> None:
    model = built_click(options, numbers)
    batch = click_batch(model, numbers)
    variables = click_start(model, batch)
    on_gpu = {name: xp_gpu.asarray(values) for name, values in variables.items()}
    gpu_batch = replace(
        batch,
        inputs={"numbers": xp_gpu.asarray(batch.inputs["numbers"]), "keys": batch.inputs["keys"]},
        targets=xp_gpu.asarray(batch.targets),
        places={name: xp_gpu.asarray(places) for name, places in batch.places.items()},
    )
    loss, gradients = model.loss_and_gradients(variables, batch, np)
    gpu_loss, gpu_gradients = model.loss_and_gradients(on_gpu, gpu_batch, xp_gpu)
    assert float(gpu_loss) == pytest.approx(float(loss), rel=1e-4)
    for name, gradient in gradients.items():
        assert gpu_gradients[name].dtype == np.float32
        np.testing.assert_allclose(xp_gpu.asnumpy(gpu_gradients[name]), gradient, rtol=1e-3, atol=1e-5, err_msg=name)
    figures = {name: float(value) for name, value in model.evaluate(variables, batch, np).items()}
    gpu_figures = {name: float(value) for name, value in model.evaluate(on_gpu, gpu_batch, xp_gpu).items()}
    assert gpu_figures == pytest.approx(figures, rel=1e-3, nan_ok=True)


# --- formulas, by another way than the models' own ---


def lookup(variables: Any, batch: Any, table: str) -> Any:
    return variables[table][batch.places[table]]


def logits_of(kind: str, options: Any, numbers: int = 3) -> tuple[Any, Any, Any, Any]:
    """Return a model's logits, recovered from its loss on single examples, with what they are of."""
    model = built_click({"kind": kind, **options}, numbers)
    batch = click_batch(model, numbers)
    variables = click_start(model, batch, np.float64)
    logits, _ = model.logits(variables, batch, None, np)  # type: ignore[attr-defined]
    assert logits.shape == (4, 1)
    return logits[:, 0], variables, batch, model


def test_a_factorization_machine_adds_the_products_of_all_pairs_of_keys() -> None:
    logits, variables, batch, _ = logits_of("fm", {})
    vectors, weights = lookup(variables, batch, "deep"), lookup(variables, batch, "wide")
    for example, found in enumerate(logits):
        pairs = sum(vectors[example, i] @ vectors[example, j] for i in range(COLUMNS) for j in range(i + 1, COLUMNS))
        linear = batch.inputs["numbers"][example] @ variables["dense_0.weight"] + variables["dense_0.bias"]
        assert found == pytest.approx(pairs + weights[example].sum() + linear[0], rel=1e-6)


def test_wide_and_deep_adds_weights_to_what_layers_make_of_numbers_and_embeddings() -> None:
    logits, variables, batch, _ = logits_of("wide_deep", {"hidden": [5]})
    deep = lookup(variables, batch, "deep").reshape(4, -1)
    inputs = np.concatenate([batch.inputs["numbers"], deep], axis=1)
    hidden = np.maximum(inputs @ variables["dense_0.weight"] + variables["dense_0.bias"], 0)
    due = hidden @ variables["dense_1.weight"] + variables["dense_1.bias"]
    np.testing.assert_allclose(logits, due[:, 0] + lookup(variables, batch, "wide").sum(axis=(1, 2)), rtol=1e-6)


def test_deepfm_is_a_factorization_machine_and_layers_over_the_same_embeddings() -> None:
    logits, variables, batch, _ = logits_of("deepfm", {"hidden": [5]})
    wide_deep, *_ = logits_of("wide_deep", {"hidden": [5]})
    vectors = lookup(variables, batch, "deep")
    products = np.einsum("nid,njd->nij", vectors, vectors)
    pairs = products[:, *np.triu_indices(COLUMNS, 1)].sum(axis=1)
    np.testing.assert_allclose(logits - wide_deep, pairs, rtol=1e-6)


def test_dlrm_has_the_products_of_embeddings_and_the_vector_of_the_numbers() -> None:
    logits, variables, batch, _ = logits_of("dlrm", {"bottom": [], "hidden": []})
    vector = batch.inputs["numbers"] @ variables["bottom.dense_0.weight"] + variables["bottom.dense_0.bias"]
    assert vector.shape == (4, DIMENSION)
    vectors = np.concatenate([vector[:, None], lookup(variables, batch, "deep")], axis=1)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(COLUMNS + 1) for j in range(i + 1, COLUMNS + 1)]
    inputs = np.concatenate([vector, np.stack(pairs, axis=1)], axis=1)
    due = inputs @ variables["top.dense_0.weight"] + variables["top.dense_0.bias"]
    np.testing.assert_allclose(logits, due[:, 0], rtol=1e-6)


@each_kind
def test_evaluations_give_loss_accuracy_auc_and_normalized_entropy(kind: str) -> None:
    model = built_click({"kind": kind}, 3)
    batch = click_batch(model, 3, n=40)
    variables = click_start(model, batch, np.float64)
    logits, _ = model.logits(variables, batch, None, np)  # type: ignore[attr-defined]
    share, clicked = sigmoid(logits[:, 0]), batch.targets == 1
    entropy = -np.log(np.where(clicked, share, 1 - share)).mean()
    base = clicked.mean()
    order = (share[clicked][:, None] > share[~clicked][None, :]).mean()
    found = {name: float(value) for name, value in model.evaluate(variables, batch, np).items()}
    assert found == pytest.approx(
        {
            "loss": entropy,
            "accuracy": ((share > 0.5) == clicked).mean(),
            "auc": order,
            "normalized_entropy": entropy / -(base * np.log(base) + (1 - base) * np.log(1 - base)),
        },
        abs=1e-3,
    )


# --- tables and data ---


@each_kind
def test_every_key_has_a_row_of_each_table_that_the_model_uses(kind: str) -> None:
    model = built_click({"kind": kind}, 3)
    assert isinstance(model, LooksUp)
    batch = click_batch(model, 3)
    assert sorted(model.keys(batch)) == (["deep"] if kind == "dlrm" else ["deep", "wide"])


NO_KEYS = "model kind '{}' needs keys, and the data has none: say data.key_columns"
PLAIN, CLICKS = spec_of((5,), 2), click_spec()


@each_kind
@pytest.mark.parametrize(
    ("spec", "dimensions", "said"),
    [
        (PLAIN, {}, NO_KEYS),
        (click_spec(classes=3), {}, "model kind '{}' tells two classes apart, and the data has 3 classes"),
        (
            click_spec(classes=0),
            {},
            "model kind '{}' tells two classes apart, and the data has targets that are values",
        ),
        (CLICKS, {"wide": 1}, r"model kind '{}' uses the table 'deep': say \[tables.deep\] dimension"),
    ],
)
def test_data_and_tables_that_do_not_fit_are_refused(kind: str, spec: DataSpec, dimensions: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.format(kind)):
        build_model(validated(ModelOptions, {"kind": kind}), spec, 0, None, tables(**dimensions))


@pytest.mark.parametrize("kind", ["wide_deep", "fm", "deepfm"])
def test_a_weight_is_one_number_in_a_table_of_its_own(kind: str) -> None:
    options = validated(ModelOptions, {"kind": kind})
    with pytest.raises(ConfigurationError, match=rf"tables\.wide\.dimension: found 2; allowed with '{kind}': 1"):
        build_model(options, CLICKS, 0, None, tables(wide=2, deep=3))
    with pytest.raises(ConfigurationError, match="uses the table 'wide'"):
        build_model(options, CLICKS, 0, None, tables(deep=3))
    build_model(validated(ModelOptions, {"kind": "dlrm"}), CLICKS, 0, None, tables(deep=3))


def test_dlrm_needs_a_number() -> None:
    options = validated(ModelOptions, {"kind": "dlrm"})
    with pytest.raises(ConfigurationError, match="'dlrm' needs a column of numbers, and the data has none"):
        build_model(options, click_spec(numbers=0), 0, None, tables())
