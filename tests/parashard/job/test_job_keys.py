import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.job.keys import dotted, key_parts, leaves, shown, toml_value

parts = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), min_size=1, max_size=4)


@given(parts)
def test_key_round_trip(key: list[str]) -> None:
    assert key_parts(dotted(*key)) == tuple(key)


def test_only_parts_that_need_quotes_have_them() -> None:
    assert dotted("variables", "*.bias", "decay") == 'variables."*.bias".decay'
    assert dotted("model", "hidden", 1) == "model.hidden.1"
    assert key_parts("variables.'*.bias'.decay") == ("variables", "*.bias", "decay")


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a b", "a = 1 #", "a\nb", '"a', '"\\q"', "é"])
def test_what_is_not_a_key(key: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        key_parts(key)
    assert str(error.value) == (
        f'{key!r} is not a key; a key is words joined by dots, such as cluster.shards or variables."*.bias".decay'
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("4.5", 4.5),
        ("true", True),
        ("[64, 32]", [64, 32]),
        ('"4"', "4"),
        ('{ kind = "whole" }', {"kind": "whole"}),
        ("sync:4", "sync:4"),
        ("127.0.0.1", "127.0.0.1"),
        ("", ""),
        ("a = b", "a = b"),
        ("2026-01-01", "2026-01-01"),
        ("12:30:00", "12:30:00"),
        ("1\nother = 2", "1\nother = 2"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_a_value_is_toml_else_text(text: str, value: object) -> None:
    assert toml_value(text) == value
    assert type(toml_value(text)) is type(value)


def test_a_long_value_is_cut() -> None:
    assert shown("a" * 100) == '"' + "a" * 76 + "..."
    assert shown([True, "x"]) == '[true, "x"]'


def test_leaves_of_nested_tables() -> None:
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == [
        (("a", "b"), 1),
        (("a", "c"), {}),
        (("d",), [{"e": 2}]),
    ]
