"""The `[model]` table: kinds, bounds, and data that a model does not go with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.model_options import CnnOptions, MlpOptions, ModelOptions, UserOptions
from parashard.models.building import build_model
from parashard.models.networks import ConvolutionalNetwork, MultilayerPerceptron
from parashard.plan.variables import Variable
from support.model_cases import CLASSIFIERS, built, spec_of


def test_a_toml_table_becomes_the_options_of_its_kind() -> None:
    assert validated(ModelOptions, {"kind": "mlp", "hidden": [3, 4]}) == MlpOptions(hidden=(3, 4))
    user = validated(ModelOptions, {"kind": "my.models:build", "depth": 3})
    assert isinstance(user, UserOptions)
    assert user.model_extra == {"depth": 3}


@pytest.mark.parametrize("options", [{"kind": "cnn", "kernel": 5}, {"kind": "a:b", "depth": 3}])
def test_options_survive_a_round_trip(options: Any) -> None:
    checked = validated(ModelOptions, options)
    assert options.items() <= checked.plain().items()
    assert validated(ModelOptions, checked.plain()) == checked


@pytest.mark.parametrize("options", [{"kind": "mpl"}, {"kind": 3}, {}])
def test_an_unknown_kind_is_reported_with_the_allowed_ones(options: Any) -> None:
    with pytest.raises(ValidationError) as told:
        validated(ModelOptions, options)
    assert ("kind" not in options) or all(
        kind in str(told.value) for kind in ("softmax", "mlp", "cnn", "ledger", "torn")
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"kind": "softmax", "hidden": [3]}, "hidden"),
        ({"kind": "mlp", "hidden": [0]}, "hidden.0"),
        ({"kind": "mlp", "hidden": ["3"]}, "hidden.0"),
        ({"kind": "mlp", "activation": "elu"}, "activation"),
        ({"kind": "mlp", "dropout": 1.0}, "dropout"),
        ({"kind": "mlp", "dropout": float("nan")}, "dropout"),
        ({"kind": "cnn", "channels": []}, "channels"),
        ({"kind": "cnn", "kernel": 0}, "kernel"),
        ({"kind": "cnn", "padding": "full"}, "padding"),
        ({"kind": "torn", "rows": 0}, "rows"),
        ({"kind": "not a module:build"}, "kind"),
        ({"kind": "module:"}, "kind"),
    ],
    ids=str,
)
def test_a_bad_value_is_reported_with_its_key(options: Any, key: str) -> None:
    with pytest.raises(ValidationError) as told:
        validated(ModelOptions, options)
    tags = ("built in", "user", options["kind"])
    assert ".".join(str(part) for part in told.value.errors()[0]["loc"] if part not in tags) == key


@pytest.mark.parametrize("options", [{"kind": "softmax"}, {"kind": "mlp", "loss": "cross_entropy"}, {"kind": "cnn"}])
@pytest.mark.parametrize("classes", [0, 1])
def test_a_classifier_needs_classes(options: Any, classes: int) -> None:
    instead = "leave model.loss out" if "loss" in options else 'use model.kind = "mlp"'
    said = "2 classes, found 1" if classes else f"targets are values .*{instead}.*data.target"
    with pytest.raises(ConfigurationError, match=rf"'{options['kind']}.* .*{said}"):
        build_model(validated(ModelOptions, options), spec_of((4, 4), classes), 0, None)


def test_a_regression_needs_values() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'mlp' with loss \"squared\" .* the data has 3 classes; leave loss out"
    ):
        build_model(validated(ModelOptions, {"kind": "mlp", "loss": "squared"}), spec_of((4,)), 0, None)


@pytest.mark.parametrize("loss", [None, "squared"])
def test_the_perceptron_of_values_has_one_output(loss: str | None) -> None:
    options = validated(MlpOptions, {"hidden": (5,), "loss": loss})
    declared = build_model(options, spec_of((4,), classes=0), 0, None).initial_variables()
    assert declared["dense_1.weight"].shape == (5, 1)


@pytest.mark.parametrize("shape", [(16,), (2, 2, 2, 2)])
def test_a_cnn_needs_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"\(height, width, channels\), found \("):
        ConvolutionalNetwork(CnnOptions(), spec_of(shape), 0)


@pytest.mark.parametrize("shape", [(9, 40), (40, 9)])
def test_a_cnn_needs_pixels_for_every_stage(shape: tuple[int, ...]) -> None:
    options = {"channels": (2, 2), "padding": "valid"}  # 9 -> 7 -> 3 -> 1 -> 0
    with pytest.raises(ConfigurationError, match=r"stage 1 of 2 has no pixel left of inputs of shape \("):
        ConvolutionalNetwork(validated(CnnOptions, options), spec_of(shape), 0)
    ConvolutionalNetwork(validated(CnnOptions, options), spec_of((10, 10)), 0)


def test_variables_have_the_shapes_and_initializers_of_their_layers() -> None:
    shapes = {name: declared.shape for name, declared in built(*CLASSIFIERS["cnn-valid"]).initial_variables().items()}
    assert shapes == {
        "conv_0.weight": (18, 3),
        "conv_0.bias": (3,),
        "dense_0.weight": (12, 4),
        "dense_0.bias": (4,),
        "dense_1.weight": (4, 3),
        "dense_1.bias": (3,),
    }
    for activation, kind in (("relu", "normal"), ("gelu", "normal"), ("tanh", "uniform")):
        options = validated(MlpOptions, {"hidden": (5,), "activation": activation})
        declared = MultilayerPerceptron(options, spec_of((4,)), 0).initial_variables()
        kinds = [v.initializer.kind for v in declared.values() if isinstance(v, Variable)]
        assert kinds == [kind, "zeros", "uniform", "zeros"]
