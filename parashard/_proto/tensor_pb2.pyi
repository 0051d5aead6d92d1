from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_TOPK: _ClassVar[DType]

class PushResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_RESULT_UNSPECIFIED: _ClassVar[PushResult]
    PUSH_RESULT_APPLIED: _ClassVar[PushResult]
    PUSH_RESULT_DUPLICATE: _ClassVar[PushResult]
    PUSH_RESULT_BUFFERED: _ClassVar[PushResult]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
DTYPE_INT8: DType
DTYPE_TOPK: DType
PUSH_RESULT_UNSPECIFIED: PushResult
PUSH_RESULT_APPLIED: PushResult
PUSH_RESULT_DUPLICATE: PushResult
PUSH_RESULT_BUFFERED: PushResult

class Target(_message.Message):
    __slots__ = ("run_id", "job_digest", "plan_version", "shard", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_digest: str
    plan_version: int
    shard: int
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., job_digest: _Optional[str] = ..., plan_version: _Optional[int] = ..., shard: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class TensorSlice(_message.Message):
    __slots__ = ("variable", "row_start", "row_stop", "row_elements", "dtype", "kept")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    variable: str
    row_start: int
    row_stop: int
    row_elements: int
    dtype: DType
    kept: int
    def __init__(self, variable: _Optional[str] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ..., row_elements: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., kept: _Optional[int] = ...) -> None: ...

class RowSlice(_message.Message):
    __slots__ = ("table", "rows", "row_elements", "dtype")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    table: str
    rows: int
    row_elements: int
    dtype: DType
    def __init__(self, table: _Optional[str] = ..., rows: _Optional[int] = ..., row_elements: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("target", "worker", "step", "total_bytes", "slices", "skipped", "pulled", "pulled_version", "traceparent", "learning_rate", "void", "rows", "norm")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    target: Target
    worker: str
    step: int
    total_bytes: int
    slices: _containers.RepeatedCompositeFieldContainer[TensorSlice]
    skipped: bool
    pulled: bool
    pulled_version: int
    traceparent: str
    learning_rate: float
    void: bool
    rows: _containers.RepeatedCompositeFieldContainer[RowSlice]
    norm: float
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., worker: _Optional[str] = ..., step: _Optional[int] = ..., total_bytes: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[TensorSlice, _Mapping]]] = ..., skipped: _Optional[bool] = ..., pulled: _Optional[bool] = ..., pulled_version: _Optional[int] = ..., traceparent: _Optional[str] = ..., learning_rate: _Optional[float] = ..., void: _Optional[bool] = ..., rows: _Optional[_Iterable[_Union[RowSlice, _Mapping]]] = ..., norm: _Optional[float] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("result", "version", "staleness_known", "staleness")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    result: PushResult
    version: int
    staleness_known: bool
    staleness: int
    def __init__(self, result: _Optional[_Union[PushResult, str]] = ..., version: _Optional[int] = ..., staleness_known: _Optional[bool] = ..., staleness: _Optional[int] = ...) -> None: ...

class TableKeys(_message.Message):
    __slots__ = ("table", "rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    table: str
    rows: int
    def __init__(self, table: _Optional[str] = ..., rows: _Optional[int] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("target", "for_round", "round", "for_step", "step", "offset_bytes", "length_bytes", "known", "known_version", "in_slot", "traceparent", "keys", "keys_in_slot", "least_version")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FOR_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FOR_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    target: Target
    for_round: bool
    round: int
    for_step: bool
    step: int
    offset_bytes: int
    length_bytes: int
    known: bool
    known_version: int
    in_slot: bool
    traceparent: str
    keys: _containers.RepeatedCompositeFieldContainer[TableKeys]
    keys_in_slot: bool
    least_version: int
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., for_round: _Optional[bool] = ..., round: _Optional[int] = ..., for_step: _Optional[bool] = ..., step: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., known: _Optional[bool] = ..., known_version: _Optional[int] = ..., in_slot: _Optional[bool] = ..., traceparent: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[TableKeys, _Mapping]]] = ..., keys_in_slot: _Optional[bool] = ..., least_version: _Optional[int] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("table", "present", "row_elements", "dtype")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    table: str
    present: int
    row_elements: int
    dtype: DType
    def __init__(self, table: _Optional[str] = ..., present: _Optional[int] = ..., row_elements: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("version", "run_offsets", "run_lengths", "tables", "last", "waited_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    run_offsets: _containers.RepeatedScalarFieldContainer[int]
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    last: bool
    waited_s: float
    def __init__(self, version: _Optional[int] = ..., run_offsets: _Optional[_Iterable[int]] = ..., run_lengths: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., last: _Optional[bool] = ..., waited_s: _Optional[float] = ...) -> None: ...
