"""Conversions between the package's values and the protobuf messages of the control plane.

The only file that builds or reads `Plan` messages; knows no RPC.
"""

from __future__ import annotations

from collections.abc import Iterable

from parashard._proto import coordinator_pb2, shard_pb2
from parashard.encodings.encoding import Encoding
from parashard.errors import ConfigurationError, MalformedFrame
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import Initializer, Variable, in_name_order
from parashard.transports.base import ShardAddress, View


def plan_message(plan: Plan) -> coordinator_pb2.Plan:
    """Return a plan as its message."""
    variables = in_name_order(plan.variables)
    index = {variable.name: i for i, variable in enumerate(variables)}
    return coordinator_pb2.Plan(
        version=plan.version,
        variables=[
            coordinator_pb2.VariableSpec(
                name=v.name,
                shape=v.shape,
                initializer=v.initializer.kind,
                initializer_scale=v.initializer.scale,
                frozen=v.frozen,
                decay=v.decay,
                learning_rate_factor=v.learning_rate_factor,
                encoding=v.encoding,
                state=v.state,
            )
            for v in variables
        ],
        shards=[
            coordinator_pb2.ShardPartitions(
                partitions=[
                    coordinator_pb2.PartitionSpec(
                        variable=index[p.variable], row_start=p.row_start, row_stop=p.row_stop
                    )
                    for p in partitions
                ]
            )
            for partitions in plan.shards
        ],
    )


def plan_from(message: coordinator_pb2.Plan) -> Plan:
    """Return the plan in a message; MalformedFrame if it names or declares an invalid variable."""
    try:
        variables = _variables_from(message)
    except ConfigurationError as error:
        raise MalformedFrame(f"a plan declares a variable that cannot be: {error}") from None

    def partition(spec: coordinator_pb2.PartitionSpec) -> Partition:
        if spec.variable >= len(variables):
            raise MalformedFrame(f"a plan names variable number {spec.variable} and declares {len(variables)}")
        return Partition(variables[spec.variable].name, spec.row_start, spec.row_stop)

    shards = tuple(tuple(partition(spec) for spec in shard.partitions) for shard in message.shards)
    return Plan(message.version, {v.name: v for v in variables}, shards)


def _variables_from(message: coordinator_pb2.Plan) -> list[Variable]:
    return [
        Variable(
            name=v.name,
            shape=tuple(v.shape),
            initializer=Initializer(v.initializer, v.initializer_scale),
            frozen=v.frozen,
            decay=v.decay,
            learning_rate_factor=v.learning_rate_factor,
            encoding=_encoding_in(v),
            state=v.state,
        )
        for v in message.variables
    ]


def view_from(message: coordinator_pb2.GetViewReply) -> View:
    """Return the view in a message."""
    return View(
        message.view,
        tuple(ShardAddress(s.address, s.incarnation, s.data_address, s.local_path) for s in message.shards),
    )


def _encoding_in(message: coordinator_pb2.VariableSpec) -> str:
    encoding: str = message.encoding or "float32"  # plans of versions before encodings name none
    Encoding.parse(encoding)
    return encoding  # as it was: it is part of the job's digest


def interval_messages(steps: IntervalSet) -> list[shard_pb2.Interval]:
    """Return a set of steps as messages."""
    return [shard_pb2.Interval(start=start, stop=stop) for start, stop in steps.intervals()]


def intervals_from(messages: Iterable[shard_pb2.Interval]) -> IntervalSet:
    """Return the set of steps in messages."""
    try:
        return IntervalSet((m.start, m.stop) for m in messages)
    except ValueError as error:
        raise MalformedFrame(str(error)) from None
