"""Plans and sets of steps come out of their messages as they went in; what makes no sense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import coordinator_pb2, shard_pb2
from parashard.client.proto_conversion import interval_messages, intervals_from, plan_from, plan_message
from parashard.errors import MalformedFrame
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import fixed_shards, place, split
from parashard.plan.variables import Initializer, Variable

variables = st.builds(
    Variable,
    name=st.text("abcdef._", min_size=1, max_size=8),
    shape=st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple),
    initializer=st.builds(
        Initializer, st.sampled_from(["zeros", "constant", "uniform", "normal"]), st.floats(-9, 9, allow_nan=False)
    ),
    frozen=st.booleans(),
    decay=st.booleans(),
    learning_rate_factor=st.floats(0, 10),
    encoding=st.sampled_from(["float32", "bfloat16", "float16", "int8", "topk:0.01", "topk:0.10"]),
)
states = st.builds(
    Variable, st.text("abcdef._", min_size=1), st.just((3, 8)), state=st.sampled_from(["counter", "sum"])
)
plans = st.builds(
    lambda found, cuts, shards, version: place(
        {v.name: v for v in found}, split({v.name: v for v in found}, fixed_shards(cuts)), shards, version
    ),
    st.lists(variables | states, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)


@given(plans)
def test_a_plan_comes_out_as_it_went_in(plan):
    message = coordinator_pb2.Plan.FromString(plan_message(plan).SerializeToString())
    assert plan_from(message) == plan
    assert [v.name for v in message.variables] == sorted(plan.variables)


@given(st.sets(st.integers(0, 60)))
def test_a_set_of_steps_comes_out_as_it_went_in(values):
    steps = IntervalSet((value, value + 1) for value in values)
    assert intervals_from(interval_messages(steps)) == steps


def test_a_partition_of_a_variable_that_is_not_declared_is_malformed():
    message = coordinator_pb2.Plan(
        variables=[coordinator_pb2.VariableSpec(name="w", shape=[4], initializer="zeros")],
        shards=[coordinator_pb2.ShardPartitions(partitions=[coordinator_pb2.PartitionSpec(variable=1, row_stop=4)])],
    )
    with pytest.raises(MalformedFrame, match="variable number 1 and declares 1"):
        plan_from(message)


def test_a_plan_from_before_there_were_encodings_means_float32():
    message = coordinator_pb2.Plan(variables=[coordinator_pb2.VariableSpec(name="w", shape=[4], initializer="zeros")])
    assert plan_from(message).variables["w"].encoding == "float32"


def test_an_encoding_that_there_is_not_is_malformed():
    spec = coordinator_pb2.VariableSpec(name="w", shape=[4], initializer="zeros", encoding="int4")
    with pytest.raises(MalformedFrame, match="encoding 'int4'; allowed: float32"):
        plan_from(coordinator_pb2.Plan(variables=[spec]))


def test_an_interval_that_ends_before_it_begins_is_malformed():
    with pytest.raises(MalformedFrame, match=r"\[5, 4\)"):
        intervals_from([shard_pb2.Interval(start=5, stop=4)])
