from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Interval(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StalenessCount(_message.Message):
    __slots__ = ("staleness", "pushes")
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    staleness: int
    pushes: int
    def __init__(self, staleness: _Optional[int] = ..., pushes: _Optional[int] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("shard", "incarnation", "version", "applied", "buffered_steps", "duplicate_pushes", "skipped_steps", "refused_pushes", "staleness", "unknown_staleness", "step_lag_max", "variable_bytes", "slot_bytes", "push_bytes", "pull_bytes", "queue_bytes_max", "held", "checkpoint_rounds", "checkpoints", "failed_checkpoints", "checkpoint_error", "checkpoint_bytes", "checkpoint_s", "checkpoint_stall_s", "push_float32_bytes", "pull_unmoved_bytes", "tables")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_STEPS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_PUSHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PUSHES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STEP_LAG_MAX_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ERROR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STALL_S_FIELD_NUMBER: _ClassVar[int]
    PUSH_FLOAT32_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_UNMOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    version: int
    applied: _containers.RepeatedCompositeFieldContainer[Interval]
    buffered_steps: int
    duplicate_pushes: int
    skipped_steps: int
    refused_pushes: int
    staleness: _containers.RepeatedCompositeFieldContainer[StalenessCount]
    unknown_staleness: int
    step_lag_max: int
    variable_bytes: int
    slot_bytes: int
    push_bytes: int
    pull_bytes: int
    queue_bytes_max: int
    held: _containers.RepeatedCompositeFieldContainer[Interval]
    checkpoint_rounds: _containers.RepeatedScalarFieldContainer[int]
    checkpoints: int
    failed_checkpoints: int
    checkpoint_error: str
    checkpoint_bytes: int
    checkpoint_s: float
    checkpoint_stall_s: float
    push_float32_bytes: int
    pull_unmoved_bytes: int
    tables: _containers.RepeatedCompositeFieldContainer[TableFigures]
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., buffered_steps: _Optional[int] = ..., duplicate_pushes: _Optional[int] = ..., skipped_steps: _Optional[int] = ..., refused_pushes: _Optional[int] = ..., staleness: _Optional[_Iterable[_Union[StalenessCount, _Mapping]]] = ..., unknown_staleness: _Optional[int] = ..., step_lag_max: _Optional[int] = ..., variable_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., push_bytes: _Optional[int] = ..., pull_bytes: _Optional[int] = ..., queue_bytes_max: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., checkpoint_rounds: _Optional[_Iterable[int]] = ..., checkpoints: _Optional[int] = ..., failed_checkpoints: _Optional[int] = ..., checkpoint_error: _Optional[str] = ..., checkpoint_bytes: _Optional[int] = ..., checkpoint_s: _Optional[float] = ..., checkpoint_stall_s: _Optional[float] = ..., push_float32_bytes: _Optional[int] = ..., pull_unmoved_bytes: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableFigures, _Mapping]]] = ...) -> None: ...

class TableFigures(_message.Message):
    __slots__ = ("table", "rows", "rows_max", "memory_bytes", "candidates", "added_rows", "evicted_rows", "pulled_keys", "pulled_rows", "hottest_keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PULLED_KEYS_FIELD_NUMBER: _ClassVar[int]
    PULLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    rows: int
    rows_max: int
    memory_bytes: int
    candidates: int
    added_rows: int
    evicted_rows: int
    pulled_keys: int
    pulled_rows: int
    hottest_keys: _containers.RepeatedCompositeFieldContainer[HotKey]
    def __init__(self, table: _Optional[str] = ..., rows: _Optional[int] = ..., rows_max: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., candidates: _Optional[int] = ..., added_rows: _Optional[int] = ..., evicted_rows: _Optional[int] = ..., pulled_keys: _Optional[int] = ..., pulled_rows: _Optional[int] = ..., hottest_keys: _Optional[_Iterable[_Union[HotKey, _Mapping]]] = ...) -> None: ...

class HotKey(_message.Message):
    __slots__ = ("key", "pushes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    key: int
    pushes: int
    def __init__(self, key: _Optional[int] = ..., pushes: _Optional[int] = ...) -> None: ...

class TakeCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "coordinator_incarnation", "round", "ahead", "shard", "damaged")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    coordinator_incarnation: int
    round: int
    ahead: bool
    shard: int
    damaged: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., coordinator_incarnation: _Optional[int] = ..., round: _Optional[int] = ..., ahead: _Optional[bool] = ..., shard: _Optional[int] = ..., damaged: _Optional[str] = ...) -> None: ...

class TakeCheckpointReply(_message.Message):
    __slots__ = ("folder", "manifest_bytes", "manifest_sha256", "applied", "skipped")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    folder: str
    manifest_bytes: int
    manifest_sha256: str
    applied: _containers.RepeatedCompositeFieldContainer[Interval]
    skipped: _containers.RepeatedCompositeFieldContainer[Interval]
    def __init__(self, folder: _Optional[str] = ..., manifest_bytes: _Optional[int] = ..., manifest_sha256: _Optional[str] = ..., applied: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., skipped: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "coordinator_incarnation", "round", "shard")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    coordinator_incarnation: int
    round: int
    shard: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., coordinator_incarnation: _Optional[int] = ..., round: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class RollbackReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("run_id", "shard", "plan_version", "incarnation", "changes", "buckets", "weights")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    shard: int
    plan_version: int
    incarnation: int
    changes: ReadChanges
    buckets: ReadBuckets
    weights: ReadWeights
    def __init__(self, run_id: _Optional[str] = ..., shard: _Optional[int] = ..., plan_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., changes: _Optional[_Union[ReadChanges, _Mapping]] = ..., buckets: _Optional[_Union[ReadBuckets, _Mapping]] = ..., weights: _Optional[_Union[ReadWeights, _Mapping]] = ...) -> None: ...

class ReadChanges(_message.Message):
    __slots__ = ("position", "weights", "known_version")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    position: int
    weights: bool
    known_version: int
    def __init__(self, position: _Optional[int] = ..., weights: _Optional[bool] = ..., known_version: _Optional[int] = ...) -> None: ...

class ReadBuckets(_message.Message):
    __slots__ = ("table", "position", "first", "stop", "digests", "from_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FROM_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    position: int
    first: int
    stop: int
    digests: bool
    from_key: int
    def __init__(self, table: _Optional[str] = ..., position: _Optional[int] = ..., first: _Optional[int] = ..., stop: _Optional[int] = ..., digests: _Optional[bool] = ..., from_key: _Optional[int] = ...) -> None: ...

class ReadWeights(_message.Message):
    __slots__ = ("offset_bytes", "length_bytes", "known_version")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    length_bytes: int
    known_version: int
    def __init__(self, offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., known_version: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("version", "position", "lost", "complete", "rows", "has_weights", "run_offsets", "run_lengths", "weights", "applied", "digests", "more", "next_key")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    HAS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RUN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NEXT_KEY_FIELD_NUMBER: _ClassVar[int]
    version: int
    position: int
    lost: bool
    complete: bool
    rows: _containers.RepeatedCompositeFieldContainer[ReadRows]
    has_weights: bool
    run_offsets: _containers.RepeatedScalarFieldContainer[int]
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    weights: bytes
    applied: _containers.RepeatedCompositeFieldContainer[Interval]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    more: bool
    next_key: int
    def __init__(self, version: _Optional[int] = ..., position: _Optional[int] = ..., lost: _Optional[bool] = ..., complete: _Optional[bool] = ..., rows: _Optional[_Iterable[_Union[ReadRows, _Mapping]]] = ..., has_weights: _Optional[bool] = ..., run_offsets: _Optional[_Iterable[int]] = ..., run_lengths: _Optional[_Iterable[int]] = ..., weights: _Optional[bytes] = ..., applied: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., digests: _Optional[_Iterable[bytes]] = ..., more: _Optional[bool] = ..., next_key: _Optional[int] = ...) -> None: ...

class ReadRows(_message.Message):
    __slots__ = ("table", "keys", "values", "last_use", "gone")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    values: bytes
    last_use: bytes
    gone: bytes
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ..., last_use: _Optional[bytes] = ..., gone: _Optional[bytes] = ...) -> None: ...
