from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ShardVersion(_message.Message):
    __slots__ = ("plan_version", "incarnation", "number", "shard", "pushes", "applied", "written_at", "parts_from")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FROM_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    incarnation: int
    number: int
    shard: int
    pushes: int
    applied: _containers.RepeatedCompositeFieldContainer[StepRange]
    written_at: float
    parts_from: int
    def __init__(self, plan_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., shard: _Optional[int] = ..., pushes: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[StepRange, _Mapping]]] = ..., written_at: _Optional[float] = ..., parts_from: _Optional[int] = ...) -> None: ...

class ServedTable(_message.Message):
    __slots__ = ("name", "row_elements", "initializer", "scale", "rows", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    row_elements: int
    initializer: str
    scale: float
    rows: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., row_elements: _Optional[int] = ..., initializer: _Optional[str] = ..., scale: _Optional[float] = ..., rows: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class ServedVariable(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Sight(_message.Message):
    __slots__ = ("newest", "served", "final", "final_steps", "now", "problem", "looked_at")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FINAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    newest: _containers.RepeatedCompositeFieldContainer[ShardVersion]
    served: _containers.RepeatedCompositeFieldContainer[ShardVersion]
    final: bool
    final_steps: int
    now: float
    problem: str
    looked_at: float
    def __init__(self, newest: _Optional[_Iterable[_Union[ShardVersion, _Mapping]]] = ..., served: _Optional[_Iterable[_Union[ShardVersion, _Mapping]]] = ..., final: _Optional[bool] = ..., final_steps: _Optional[int] = ..., now: _Optional[float] = ..., problem: _Optional[str] = ..., looked_at: _Optional[float] = ...) -> None: ...

class GetServedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServedReply(_message.Message):
    __slots__ = ("run_id", "job", "seed", "tables", "variables", "sight", "fresh")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    SIGHT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job: str
    seed: int
    tables: _containers.RepeatedCompositeFieldContainer[ServedTable]
    variables: _containers.RepeatedCompositeFieldContainer[ServedVariable]
    sight: Sight
    fresh: bool
    def __init__(self, run_id: _Optional[str] = ..., job: _Optional[str] = ..., seed: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[ServedTable, _Mapping]]] = ..., variables: _Optional[_Iterable[_Union[ServedVariable, _Mapping]]] = ..., sight: _Optional[_Union[Sight, _Mapping]] = ..., fresh: _Optional[bool] = ...) -> None: ...

class GetRowsRequest(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class GetRowsReply(_message.Message):
    __slots__ = ("row_elements", "rows", "present", "versions")
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    row_elements: int
    rows: bytes
    present: bytes
    versions: _containers.RepeatedCompositeFieldContainer[ShardVersion]
    def __init__(self, row_elements: _Optional[int] = ..., rows: _Optional[bytes] = ..., present: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[ShardVersion, _Mapping]]] = ...) -> None: ...

class GetVariableRequest(_message.Message):
    __slots__ = ("variable", "first", "elements")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    variable: str
    first: int
    elements: int
    def __init__(self, variable: _Optional[str] = ..., first: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class GetVariableReply(_message.Message):
    __slots__ = ("shape", "values", "versions")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    versions: _containers.RepeatedCompositeFieldContainer[ShardVersion]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[ShardVersion, _Mapping]]] = ...) -> None: ...

class HeldTable(_message.Message):
    __slots__ = ("table", "token")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    table: str
    token: str
    def __init__(self, table: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class HeldPartition(_message.Message):
    __slots__ = ("variable", "row_start", "row_stop", "token")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    variable: str
    row_start: int
    row_stop: int
    token: str
    def __init__(self, variable: _Optional[str] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class HeldShard(_message.Message):
    __slots__ = ("version", "tables", "partitions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    version: ShardVersion
    tables: _containers.RepeatedCompositeFieldContainer[HeldTable]
    partitions: _containers.RepeatedCompositeFieldContainer[HeldPartition]
    def __init__(self, version: _Optional[_Union[ShardVersion, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[HeldTable, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[HeldPartition, _Mapping]]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("run_id", "tables", "variables", "held", "wait_s", "fresh")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    tables: _containers.RepeatedScalarFieldContainer[str]
    variables: _containers.RepeatedScalarFieldContainer[str]
    held: _containers.RepeatedCompositeFieldContainer[HeldShard]
    wait_s: float
    fresh: bool
    def __init__(self, run_id: _Optional[str] = ..., tables: _Optional[_Iterable[str]] = ..., variables: _Optional[_Iterable[str]] = ..., held: _Optional[_Iterable[_Union[HeldShard, _Mapping]]] = ..., wait_s: _Optional[float] = ..., fresh: _Optional[bool] = ...) -> None: ...

class TableBegin(_message.Message):
    __slots__ = ("table", "whole", "rows", "gone", "token")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    table: str
    whole: bool
    rows: int
    gone: int
    token: str
    def __init__(self, table: _Optional[str] = ..., whole: _Optional[bool] = ..., rows: _Optional[int] = ..., gone: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class PartitionBegin(_message.Message):
    __slots__ = ("variable", "row_start", "row_stop", "token", "follows")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    variable: str
    row_start: int
    row_stop: int
    token: str
    follows: bool
    def __init__(self, variable: _Optional[str] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ..., token: _Optional[str] = ..., follows: _Optional[bool] = ...) -> None: ...

class ShardBegin(_message.Message):
    __slots__ = ("version", "shards", "tables", "elements", "partitions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    version: ShardVersion
    shards: int
    tables: _containers.RepeatedCompositeFieldContainer[TableBegin]
    elements: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionBegin]
    def __init__(self, version: _Optional[_Union[ShardVersion, _Mapping]] = ..., shards: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableBegin, _Mapping]]] = ..., elements: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionBegin, _Mapping]]] = ...) -> None: ...

class RowsPart(_message.Message):
    __slots__ = ("table", "keys", "rows", "gone")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    rows: bytes
    gone: bytes
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., gone: _Optional[bytes] = ...) -> None: ...

class VariablePart(_message.Message):
    __slots__ = ("variable", "row_start", "row_stop", "first", "values")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    variable: str
    row_start: int
    row_stop: int
    first: int
    values: bytes
    def __init__(self, variable: _Optional[str] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ..., first: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class ShardEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeReply(_message.Message):
    __slots__ = ("begin", "rows", "variable", "end", "sight")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIGHT_FIELD_NUMBER: _ClassVar[int]
    begin: ShardBegin
    rows: RowsPart
    variable: VariablePart
    end: ShardEnd
    sight: Sight
    def __init__(self, begin: _Optional[_Union[ShardBegin, _Mapping]] = ..., rows: _Optional[_Union[RowsPart, _Mapping]] = ..., variable: _Optional[_Union[VariablePart, _Mapping]] = ..., end: _Optional[_Union[ShardEnd, _Mapping]] = ..., sight: _Optional[_Union[Sight, _Mapping]] = ...) -> None: ...
