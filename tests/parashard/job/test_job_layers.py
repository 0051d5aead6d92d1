from pathlib import Path
from typing import Any

import pytest

from parashard.errors import ConfigurationError
from parashard.job.layers import layered, parse_set

FILE = Path("job.toml")
TABLE: dict[str, Any] = {"cluster": {"shards": 2, "partitioner": {"kind": "maximum-size", "max_bytes": 64}}, "data": {}}


def test_flag_over_environment_over_file() -> None:
    environ = {"PARASHARD_CLUSTER__SHARDS": "3", "PARASHARD_CLUSTER__WORKERS": "5"}
    layers = layered(FILE, TABLE, [("cluster.shards", 4, "--shards")], environ)
    assert layers.table["cluster"]["shards"] == 4
    assert layers.table["cluster"]["workers"] == 5
    assert layers.origin(("cluster", "shards")) == "flag --shards"
    assert layers.origin(("cluster", "workers")) == "environment PARASHARD_CLUSTER__WORKERS"
    assert layers.origin(("cluster", "partitioner", "kind")) == "file job.toml"
    assert layers.origin(("cluster", "host")) == "default"
    assert TABLE["cluster"]["shards"] == 2  # the argument is as it was


def test_the_last_flag_wins() -> None:
    layers = layered(FILE, TABLE, [("cluster.shards", 4, "--shards"), ("cluster.shards", 5, "--set")], {})
    assert (layers.table["cluster"]["shards"], layers.origin(("cluster", "shards"))) == (5, "flag --set")


def test_a_table_replaces_the_whole_table_and_its_origins() -> None:
    layers = layered(FILE, TABLE, [("cluster.partitioner", {"kind": "whole"}, "--set")], {})
    assert layers.table["cluster"]["partitioner"] == {"kind": "whole"}
    assert layers.origin(("cluster", "partitioner", "kind")) == "flag --set"
    assert layers.origin(("cluster", "partitioner", "max_bytes")) == "default"


def test_in_the_environment_a_table_comes_before_its_keys() -> None:
    environ = {
        "PARASHARD_CLUSTER__PARTITIONER__MAX_BYTES": "9",
        "PARASHARD_CLUSTER__PARTITIONER": '{ kind = "maximum-size", max_bytes = 1 }',
    }
    layers = layered(FILE, {}, [], environ)
    assert layers.table["cluster"]["partitioner"] == {"kind": "maximum-size", "max_bytes": 9}


def test_an_empty_table_gives_no_origin_to_keys_below_it() -> None:
    layers = layered(FILE, TABLE, [], {})
    assert layers.origin(("data",)) == "file job.toml"
    assert layers.origin(("data", "source")) == "default"


def test_a_list_gives_its_origin_to_its_elements() -> None:
    assert layered(FILE, {"model": {"hidden": [1, 2]}}, [], {}).origin(("model", "hidden", "1")) == "file job.toml"


def test_a_table_has_the_origins_of_what_is_in_it() -> None:
    layers = layered(FILE, TABLE, [("cluster.workers", 1, "--workers")], {})
    assert layers.origin(("cluster",)) == "file job.toml and flag --workers"


def test_the_name_of_a_variable_has_any_case_and_needs_two_underscores() -> None:
    environ = {"Parashard_Model__Activation": "tanh", "PARASHARD_HOME": "/x", "OTHER__KEY": "1"}
    assert layered(FILE, {}, [], environ).table == {"model": {"activation": "tanh"}}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"PARASHARD_CLUSTER__": "1"},
            "environment PARASHARD_CLUSTER__: not a key; allowed: PARASHARD_TABLE__KEY, such as "
            "PARASHARD_CLUSTER__SHARDS",
        ),
        (
            {"PARASHARD_VARIABLES__X__FROZEN": "true"},
            "environment PARASHARD_VARIABLES__X__FROZEN: settings of variables come from the job file or from --set, "
            "not from the environment",
        ),
        (
            {"PARASHARD_JOB__SEED": "1", "parashard_job__seed": "2"},
            "environment: PARASHARD_JOB__SEED and parashard_job__seed both set job.seed; unset one of them",
        ),
        (
            {"PARASHARD_CLUSTER__SHARDS__N": "1"},
            "environment PARASHARD_CLUSTER__SHARDS__N: cluster.shards.n: cluster.shards is no table but 2 "
            "(file job.toml)",
        ),
    ],
)
def test_what_the_environment_must_not_say(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        layered(FILE, TABLE, [], environ)
    assert str(error.value) == message


def test_paths_and_tuples_of_flags_become_plain() -> None:
    overrides = [("data.path", Path("/x"), "--data"), ("model.hidden", (1, 2), "--hidden")]
    assert layered(FILE, {}, overrides, {}).table == {"data": {"path": "/x"}, "model": {"hidden": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("cluster.shards=4", "cluster.shards", 4),
        ("consistency.policy=sync:4", "consistency.policy", "sync:4"),
        ("job.name=", "job.name", ""),
        ("job.name=a=b", "job.name", "a=b"),
        ('variables."a=b.*".frozen=true', 'variables."a=b.*".frozen', True),
    ],
)
def test_parse_set(text: str, key: str, value: object) -> None:
    assert parse_set(text) == (key, value, "--set")


@pytest.mark.parametrize("text", ["", "cluster.shards", "=4", "cluster.shards 4", "cluster..shards=4"])
def test_parse_set_refuses(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_set(text)
    assert str(error.value) == f'flag --set: found "{text}"; allowed: key.path=value, such as cluster.shards=4'
