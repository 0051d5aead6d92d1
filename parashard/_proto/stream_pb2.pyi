from parashard._proto import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("target", "worker")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    target: _tensor_pb2.Target
    worker: str
    def __init__(self, target: _Optional[_Union[_tensor_pb2.Target, _Mapping]] = ..., worker: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("push_bytes_max", "slot_bytes", "elements", "partitions")
    PUSH_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    push_bytes_max: int
    slot_bytes: int
    elements: int
    partitions: int
    def __init__(self, push_bytes_max: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., elements: _Optional[int] = ..., partitions: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
