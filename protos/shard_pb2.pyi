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
    __slots__ = ("shard", "incarnation", "version", "applied", "buffered_steps", "duplicate_pushes", "skipped_steps", "refused_pushes", "staleness", "unknown_staleness", "step_lag_max", "variable_bytes", "slot_bytes", "push_bytes", "pull_bytes", "queue_bytes_max")
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
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., buffered_steps: _Optional[int] = ..., duplicate_pushes: _Optional[int] = ..., skipped_steps: _Optional[int] = ..., refused_pushes: _Optional[int] = ..., staleness: _Optional[_Iterable[_Union[StalenessCount, _Mapping]]] = ..., unknown_staleness: _Optional[int] = ..., step_lag_max: _Optional[int] = ..., variable_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., push_bytes: _Optional[int] = ..., pull_bytes: _Optional[int] = ..., queue_bytes_max: _Optional[int] = ...) -> None: ...
