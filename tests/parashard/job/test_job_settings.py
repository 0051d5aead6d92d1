import pytest

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.schema import VariableSettings, apply_settings
from parashard.plan.variables import Variable

VARIABLES = {
    name: Variable(name, (4, 2)) for name in ("dense_0.weight", "dense_0.bias", "dense_1.weight", "dense_1.bias")
}


def test_a_setting_changes_what_it_matches_and_nothing_else() -> None:
    changed = apply_settings(VARIABLES, {"*.bias": VariableSettings(decay=False, learning_rate_factor=2.0)})
    assert changed["dense_0.bias"] == Variable("dense_0.bias", (4, 2), decay=False, learning_rate_factor=2.0)
    assert changed["dense_1.bias"] == Variable("dense_1.bias", (4, 2), decay=False, learning_rate_factor=2.0)
    assert changed["dense_0.weight"] == VARIABLES["dense_0.weight"]
    assert VARIABLES["dense_0.bias"].decay  # the argument is as it was


def test_the_later_pattern_wins_key_by_key() -> None:
    settings = {
        "dense_0.*": VariableSettings(frozen=True, decay=False),
        "*": VariableSettings(frozen=False),
    }
    changed = apply_settings(VARIABLES, settings)
    assert not changed["dense_0.bias"].frozen
    assert not changed["dense_0.bias"].decay
    settings = dict(reversed(settings.items()))
    assert apply_settings(VARIABLES, settings)["dense_0.bias"].frozen


def test_an_encoding_is_kept_in_its_shortest_form() -> None:
    assert validated(VariableSettings, {"encoding": "topk:0.10"}).encoding == "topk:0.1"
    changed = apply_settings(VARIABLES, {"*.weight": VariableSettings(encoding="int8")})
    assert {name for name, variable in changed.items() if variable.encoding == "int8"} == {
        "dense_0.weight",
        "dense_1.weight",
    }


def test_state_without_a_gradient_takes_frozen_only() -> None:
    variables = {"mean": Variable("mean", (2,), state="average:0.1"), "weight": Variable("weight", (2,))}
    given = VariableSettings(encoding="int8", decay=False, learning_rate_factor=2.0, frozen=True)
    changed = apply_settings(variables, {"*": given})
    assert changed["mean"] == Variable("mean", (2,), state="average:0.1", frozen=True)
    assert changed["weight"].encoding == "int8"


def test_case_matters_and_the_whole_name_must_match() -> None:
    for pattern in ("DENSE_0.bias", "dense_0", "bias"):
        with pytest.raises(ConfigurationError, match="matches no variable"):
            apply_settings(VARIABLES, {pattern: VariableSettings(frozen=True)})


def test_a_pattern_that_matches_nothing_is_named_with_the_names_there_are() -> None:
    with pytest.raises(ConfigurationError) as error:
        apply_settings(VARIABLES, {"*.scale": VariableSettings(frozen=True)})
    assert str(error.value) == (
        'variables."*.scale": the pattern matches no variable; the model has: '
        "dense_0.bias, dense_0.weight, dense_1.bias, dense_1.weight"
    )
