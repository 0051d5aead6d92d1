"""A table that a script declares has the settings of `[tables.NAME]`, and refuses others in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

import parashard as ps
from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.embeddings import TableSettings, checked_tables, embedding_of, plain_of

OTHER: dict[str, Any] = {
    "dtype": "float16",
    "combiner": "sum",
    "encoding": "int8",
    "initializer": "normal",
    "scale": 0.5,
    "optimizer": ps.FTRL(0.1, l1=0.25),
    "keys_per_step_max": 9,
    "rows_max": 12,
    "admit_after": 2,
    "admit_probability": 0.5,
    "evict_unused_steps": 7,
    "evict_norm_below": 0.25,
    "evict_norm_every": 3,
    "evict_above_rows": 10,
    "evict_first": "lfu",
}
"""A value for settings that is not their default."""
NEEDED: dict[str, dict[str, Any]] = {
    "optimizer": {"initializer": "zeros"},
    "evict_norm_every": {"evict_norm_below": 1.0},
    "evict_first": {"evict_above_rows": 10},
}
"""What such a value has a meaning with."""


@pytest.mark.parametrize("key", [key for key in TableSettings.model_fields if key != "dimension"])
def test_a_setting_is_the_one_of_a_job_file(key: str) -> None:
    declared = ps.Table("users", 4, **NEEDED.get(key, {}), **{key: OTHER[key]})
    settings = validated(TableSettings, plain_of(declared))
    assert getattr(settings, key) == OTHER[key]
    assert settings.dimension == 4 == declared.dimension
    assert declared != ps.Table("users", 4)


def test_what_is_not_said_is_as_in_a_job_file() -> None:
    said = validated(TableSettings, plain_of(ps.Table("users", 4)))
    assert embedding_of("users", said) == embedding_of("users", TableSettings(dimension=4))
    assert said.initializer == "uniform"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dimension": 0}, "ps.Table('users'): dimension: found 0; allowed: >= 1"),
        ({"dimension": 2.5}, "ps.Table('users'): dimension: found 2.5; allowed: an integer"),
        ({"dimension": 4, "dim": 4}, "ps.Table('users') has no dim=; allowed: name, dimension, "),
        ({"dimension": 4, "scale": "wide"}, "ps.Table('users'): scale: found \"wide\"; allowed: a number"),
        (
            {"dimension": 4, "optimizer": "sgd"},
            "ps.Table('users'): optimizer: found 'sgd'; allowed: an optimizer such ",
        ),
        ({"dimension": 4, "evict_first": "lfu"}, "ps.Table('users'): evict_first: found \"lfu\" with evict_above_rows"),
        ({"dimension": 4, "evict_norm_every": 3}, "ps.Table('users'): evict_norm_every: found 3 with evict_norm_below"),
        ({"dimension": 4, "optimizer": ps.LAMB(1e-3)}, "ps.Table('users'): optimizer.kind: found \"lamb\"; allowed: "),
        (
            {"dimension": 4, "optimizer": ps.SGD(0.1, clip_norm=1.0)},
            "ps.Table('users'): optimizer.clip_norm: found 1.0",
        ),
    ],
)
def test_another_value_is_refused_in_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ps.Table("users", **arguments)
    assert str(refused.value).startswith(sentence)


def test_tables_of_one_name_are_one_table() -> None:
    first, same, other = ps.Table("users", 4), ps.Table("users", 4), ps.Table("users", 5)
    items = ps.Table("items", 4)
    assert checked_tables([first, items, same]) == {"items": items, "users": first}
    assert len({first, same}) == 1
    with pytest.raises(ConfigurationError, match="two tables are named 'users', and their settings differ"):
        checked_tables([first, other])


@pytest.mark.parametrize("tables", ["users", {"users": 4}, None, 3])
def test_what_is_no_list_of_tables_is_refused(tables: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tables is a list such as \[ps.Table"):
        checked_tables(tables)


def test_a_name_alone_is_no_table() -> None:
    with pytest.raises(ConfigurationError, match="tables has 'users'; allowed: tables such as"):
        checked_tables(["users"])
