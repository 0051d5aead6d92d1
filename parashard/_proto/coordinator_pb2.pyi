from parashard._proto import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_MODEL: _ClassVar[FailureKind]
    FAILURE_KIND_WRONG_RESULT: _ClassVar[FailureKind]
    FAILURE_KIND_NOT_FINITE: _ClassVar[FailureKind]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_STARTING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DRAINING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_MODEL: FailureKind
FAILURE_KIND_WRONG_RESULT: FailureKind
FAILURE_KIND_NOT_FINITE: FailureKind
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_STARTING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DRAINING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_FAILED: JobState

class GetJobRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJobReply(_message.Message):
    __slots__ = ("run_id", "job_digest", "job_toml", "plan", "model_folder", "steps_total", "data_fingerprint", "checkpoint_url", "source", "initial_sha256", "examples", "stores_evaluated", "batched")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FOLDER_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_URL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    STORES_EVALUATED_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_digest: str
    job_toml: str
    plan: Plan
    model_folder: str
    steps_total: int
    data_fingerprint: str
    checkpoint_url: str
    source: str
    initial_sha256: str
    examples: int
    stores_evaluated: bool
    batched: bool
    def __init__(self, run_id: _Optional[str] = ..., job_digest: _Optional[str] = ..., job_toml: _Optional[str] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., model_folder: _Optional[str] = ..., steps_total: _Optional[int] = ..., data_fingerprint: _Optional[str] = ..., checkpoint_url: _Optional[str] = ..., source: _Optional[str] = ..., initial_sha256: _Optional[str] = ..., examples: _Optional[int] = ..., stores_evaluated: _Optional[bool] = ..., batched: _Optional[bool] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("version", "variables", "shards")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    variables: _containers.RepeatedCompositeFieldContainer[VariableSpec]
    shards: _containers.RepeatedCompositeFieldContainer[ShardPartitions]
    def __init__(self, version: _Optional[int] = ..., variables: _Optional[_Iterable[_Union[VariableSpec, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardPartitions, _Mapping]]] = ...) -> None: ...

class VariableSpec(_message.Message):
    __slots__ = ("name", "shape", "initializer", "initializer_scale", "frozen", "decay", "learning_rate_factor", "encoding", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_SCALE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    initializer: str
    initializer_scale: float
    frozen: bool
    decay: bool
    learning_rate_factor: float
    encoding: str
    state: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., initializer: _Optional[str] = ..., initializer_scale: _Optional[float] = ..., frozen: _Optional[bool] = ..., decay: _Optional[bool] = ..., learning_rate_factor: _Optional[float] = ..., encoding: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class ShardPartitions(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionSpec]
    def __init__(self, partitions: _Optional[_Iterable[_Union[PartitionSpec, _Mapping]]] = ...) -> None: ...

class PartitionSpec(_message.Message):
    __slots__ = ("variable", "row_start", "row_stop")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    variable: int
    row_start: int
    row_stop: int
    def __init__(self, variable: _Optional[int] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ...) -> None: ...

class RegisterShardRequest(_message.Message):
    __slots__ = ("run_id", "job_digest", "shard", "incarnation", "address", "http_address", "applied", "held", "checkpoint_rounds", "restored", "data_address", "local_path", "first_incarnation", "skipped", "chain_rounds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PATH_FIELD_NUMBER: _ClassVar[int]
    FIRST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CHAIN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_digest: str
    shard: int
    incarnation: int
    address: str
    http_address: str
    applied: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Interval]
    held: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Interval]
    checkpoint_rounds: _containers.RepeatedScalarFieldContainer[int]
    restored: str
    data_address: str
    local_path: str
    first_incarnation: int
    skipped: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Interval]
    chain_rounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., job_digest: _Optional[str] = ..., shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., applied: _Optional[_Iterable[_Union[_shard_pb2.Interval, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[_shard_pb2.Interval, _Mapping]]] = ..., checkpoint_rounds: _Optional[_Iterable[int]] = ..., restored: _Optional[str] = ..., data_address: _Optional[str] = ..., local_path: _Optional[str] = ..., first_incarnation: _Optional[int] = ..., skipped: _Optional[_Iterable[_Union[_shard_pb2.Interval, _Mapping]]] = ..., chain_rounds: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterShardReply(_message.Message):
    __slots__ = ("coordinator_incarnation", "cut_round", "state", "kept_rounds")
    COORDINATOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CUT_ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    coordinator_incarnation: int
    cut_round: int
    state: JobState
    kept_rounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, coordinator_incarnation: _Optional[int] = ..., cut_round: _Optional[int] = ..., state: _Optional[_Union[JobState, str]] = ..., kept_rounds: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("run_id", "job_digest", "name", "fingerprint", "http_address", "device", "token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_digest: str
    name: str
    fingerprint: str
    http_address: str
    device: str
    token: int
    def __init__(self, run_id: _Optional[str] = ..., job_digest: _Optional[str] = ..., name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., http_address: _Optional[str] = ..., device: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class RegisterWorkerReply(_message.Message):
    __slots__ = ("name", "incarnation", "lease_ttl_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    lease_ttl_s: float
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., lease_ttl_s: _Optional[float] = ...) -> None: ...

class GetViewRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetViewReply(_message.Message):
    __slots__ = ("view", "shards")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    view: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardAddress]
    def __init__(self, view: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardAddress, _Mapping]]] = ...) -> None: ...

class ShardAddress(_message.Message):
    __slots__ = ("address", "incarnation", "data_address", "local_path")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PATH_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    data_address: str
    local_path: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., data_address: _Optional[str] = ..., local_path: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("run_id", "worker", "incarnation", "sequence", "held", "completed", "failed", "evaluated", "want", "wait_s", "leaving", "phases", "held_evaluations", "computing", "steps_only", "warnings", "drifts", "gpu_memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    HELD_EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    STEPS_ONLY_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DRIFTS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker: str
    incarnation: int
    sequence: int
    held: _containers.RepeatedScalarFieldContainer[int]
    completed: _containers.RepeatedCompositeFieldContainer[CompletedStep]
    failed: _containers.RepeatedCompositeFieldContainer[FailedStep]
    evaluated: _containers.RepeatedCompositeFieldContainer[EvaluationResult]
    want: int
    wait_s: float
    leaving: bool
    phases: PhaseSeconds
    held_evaluations: _containers.RepeatedScalarFieldContainer[int]
    computing: _containers.RepeatedScalarFieldContainer[int]
    steps_only: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    drifts: _containers.RepeatedCompositeFieldContainer[StepDrift]
    gpu_memory: GpuMemory
    def __init__(self, run_id: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., completed: _Optional[_Iterable[_Union[CompletedStep, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[FailedStep, _Mapping]]] = ..., evaluated: _Optional[_Iterable[_Union[EvaluationResult, _Mapping]]] = ..., want: _Optional[int] = ..., wait_s: _Optional[float] = ..., leaving: _Optional[bool] = ..., phases: _Optional[_Union[PhaseSeconds, _Mapping]] = ..., held_evaluations: _Optional[_Iterable[int]] = ..., computing: _Optional[_Iterable[int]] = ..., steps_only: _Optional[bool] = ..., warnings: _Optional[_Iterable[str]] = ..., drifts: _Optional[_Iterable[_Union[StepDrift, _Mapping]]] = ..., gpu_memory: _Optional[_Union[GpuMemory, _Mapping]] = ...) -> None: ...

class GpuMemory(_message.Message):
    __slots__ = ("used_bytes", "total_bytes")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    total_bytes: int
    def __init__(self, used_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class StepDrift(_message.Message):
    __slots__ = ("step", "drift", "updates")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    step: int
    drift: float
    updates: int
    def __init__(self, step: _Optional[int] = ..., drift: _Optional[float] = ..., updates: _Optional[int] = ...) -> None: ...

class CompletedStep(_message.Message):
    __slots__ = ("step", "incarnations", "loss", "examples", "skipped", "metrics")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    loss: float
    examples: int
    skipped: bool
    metrics: _containers.RepeatedCompositeFieldContainer[MetricSums]
    def __init__(self, step: _Optional[int] = ..., incarnations: _Optional[_Iterable[int]] = ..., loss: _Optional[float] = ..., examples: _Optional[int] = ..., skipped: _Optional[bool] = ..., metrics: _Optional[_Iterable[_Union[MetricSums, _Mapping]]] = ...) -> None: ...

class MetricSums(_message.Message):
    __slots__ = ("name", "kind", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class FailedStep(_message.Message):
    __slots__ = ("step", "reason", "kind")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    step: int
    reason: str
    kind: FailureKind
    def __init__(self, step: _Optional[int] = ..., reason: _Optional[str] = ..., kind: _Optional[_Union[FailureKind, str]] = ...) -> None: ...

class EvaluationResult(_message.Message):
    __slots__ = ("evaluation", "metrics", "error", "incarnations", "weights", "judged_steps", "kind")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_STEPS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    evaluation: int
    metrics: _containers.ScalarMap[str, float]
    error: str
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    weights: str
    judged_steps: int
    kind: FailureKind
    def __init__(self, evaluation: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ..., incarnations: _Optional[_Iterable[int]] = ..., weights: _Optional[str] = ..., judged_steps: _Optional[int] = ..., kind: _Optional[_Union[FailureKind, str]] = ...) -> None: ...

class PhaseSeconds(_message.Message):
    __slots__ = ("lease", "pull", "compute", "push", "transfer", "gpu_wait")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    GPU_WAIT_FIELD_NUMBER: _ClassVar[int]
    lease: float
    pull: float
    compute: float
    push: float
    transfer: float
    gpu_wait: float
    def __init__(self, lease: _Optional[float] = ..., pull: _Optional[float] = ..., compute: _Optional[float] = ..., push: _Optional[float] = ..., transfer: _Optional[float] = ..., gpu_wait: _Optional[float] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("step", "skip", "traceparent", "announce", "learning_rate", "probe", "least_version")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    LEAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    step: int
    skip: bool
    traceparent: str
    announce: bool
    learning_rate: float
    probe: bool
    least_version: int
    def __init__(self, step: _Optional[int] = ..., skip: _Optional[bool] = ..., traceparent: _Optional[str] = ..., announce: _Optional[bool] = ..., learning_rate: _Optional[float] = ..., probe: _Optional[bool] = ..., least_version: _Optional[int] = ...) -> None: ...

class EvaluationGrant(_message.Message):
    __slots__ = ("evaluation", "for_round", "round", "incarnations", "store")
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    FOR_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    evaluation: int
    for_round: bool
    round: int
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    store: bool
    def __init__(self, evaluation: _Optional[int] = ..., for_round: _Optional[bool] = ..., round: _Optional[int] = ..., incarnations: _Optional[_Iterable[int]] = ..., store: _Optional[bool] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("granted", "evaluations", "revoked", "state", "view", "retry_after_s", "reason", "ahead", "depth", "stored")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    granted: _containers.RepeatedCompositeFieldContainer[Grant]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationGrant]
    revoked: _containers.RepeatedScalarFieldContainer[int]
    state: JobState
    view: int
    retry_after_s: float
    reason: str
    ahead: int
    depth: int
    stored: int
    def __init__(self, granted: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationGrant, _Mapping]]] = ..., revoked: _Optional[_Iterable[int]] = ..., state: _Optional[_Union[JobState, str]] = ..., view: _Optional[int] = ..., retry_after_s: _Optional[float] = ..., reason: _Optional[str] = ..., ahead: _Optional[int] = ..., depth: _Optional[int] = ..., stored: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("run_id", "job", "state", "reason", "steps_total", "steps_complete", "steps_leased", "examples_per_s", "elapsed_s", "training_loss", "held_out", "workers", "shards", "staleness_p50", "staleness_p95", "staleness_max", "step_lag_max", "workers_wanted", "events", "consistency", "http_address", "events_total", "rollbacks", "problems", "skipped_steps", "partly_skipped_steps", "tables", "training")
    class HeldOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TrainingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEASED_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_P50_FIELD_NUMBER: _ClassVar[int]
    STALENESS_P95_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_LAG_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PARTLY_SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job: str
    state: JobState
    reason: str
    steps_total: int
    steps_complete: int
    steps_leased: int
    examples_per_s: float
    elapsed_s: float
    training_loss: float
    held_out: _containers.ScalarMap[str, float]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    staleness_p50: int
    staleness_p95: int
    staleness_max: int
    step_lag_max: int
    workers_wanted: int
    events: _containers.RepeatedScalarFieldContainer[str]
    consistency: str
    http_address: str
    events_total: int
    rollbacks: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    skipped_steps: int
    partly_skipped_steps: int
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    training: _containers.ScalarMap[str, float]
    def __init__(self, run_id: _Optional[str] = ..., job: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., steps_total: _Optional[int] = ..., steps_complete: _Optional[int] = ..., steps_leased: _Optional[int] = ..., examples_per_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., training_loss: _Optional[float] = ..., held_out: _Optional[_Mapping[str, float]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., staleness_p50: _Optional[int] = ..., staleness_p95: _Optional[int] = ..., staleness_max: _Optional[int] = ..., step_lag_max: _Optional[int] = ..., workers_wanted: _Optional[int] = ..., events: _Optional[_Iterable[str]] = ..., consistency: _Optional[str] = ..., http_address: _Optional[str] = ..., events_total: _Optional[int] = ..., rollbacks: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., skipped_steps: _Optional[int] = ..., partly_skipped_steps: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., training: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("total", "fullest")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FULLEST_FIELD_NUMBER: _ClassVar[int]
    total: _shard_pb2.TableFigures
    fullest: float
    def __init__(self, total: _Optional[_Union[_shard_pb2.TableFigures, _Mapping]] = ..., fullest: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "incarnation", "live", "device", "steps_complete", "steps_held", "examples_per_s", "restarts", "phases", "http_address", "gpu_memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STEPS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STEPS_HELD_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    live: bool
    device: str
    steps_complete: int
    steps_held: int
    examples_per_s: float
    restarts: int
    phases: PhaseSeconds
    http_address: str
    gpu_memory: GpuMemory
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., live: _Optional[bool] = ..., device: _Optional[str] = ..., steps_complete: _Optional[int] = ..., steps_held: _Optional[int] = ..., examples_per_s: _Optional[float] = ..., restarts: _Optional[int] = ..., phases: _Optional[_Union[PhaseSeconds, _Mapping]] = ..., http_address: _Optional[str] = ..., gpu_memory: _Optional[_Union[GpuMemory, _Mapping]] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "address", "registered", "record", "http_address", "steps_applied", "live")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    address: str
    registered: bool
    record: _shard_pb2.InspectReply
    http_address: str
    steps_applied: int
    live: bool
    def __init__(self, shard: _Optional[int] = ..., address: _Optional[str] = ..., registered: _Optional[bool] = ..., record: _Optional[_Union[_shard_pb2.InspectReply, _Mapping]] = ..., http_address: _Optional[str] = ..., steps_applied: _Optional[int] = ..., live: _Optional[bool] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers", "run_id")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    workers: int
    run_id: str
    def __init__(self, workers: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("workers_wanted",)
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    workers_wanted: int
    def __init__(self, workers_wanted: _Optional[int] = ...) -> None: ...

class ProcessName(_message.Message):
    __slots__ = ("role", "index")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class ProcessExit(_message.Message):
    __slots__ = ("process", "exit_code", "reason", "number")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    process: ProcessName
    exit_code: int
    reason: str
    number: int
    def __init__(self, process: _Optional[_Union[ProcessName, _Mapping]] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class SuperviseRequest(_message.Message):
    __slots__ = ("run_id", "exits", "running", "stop_reason", "scheduled", "closed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXITS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    exits: _containers.RepeatedCompositeFieldContainer[ProcessExit]
    running: _containers.RepeatedCompositeFieldContainer[ProcessName]
    stop_reason: str
    scheduled: int
    closed: bool
    def __init__(self, run_id: _Optional[str] = ..., exits: _Optional[_Iterable[_Union[ProcessExit, _Mapping]]] = ..., running: _Optional[_Iterable[_Union[ProcessName, _Mapping]]] = ..., stop_reason: _Optional[str] = ..., scheduled: _Optional[int] = ..., closed: _Optional[bool] = ...) -> None: ...

class SuperviseReply(_message.Message):
    __slots__ = ("start", "stop", "state", "reason", "kill", "exit_code", "complete")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedCompositeFieldContainer[ProcessName]
    stop: _containers.RepeatedCompositeFieldContainer[ProcessName]
    state: JobState
    reason: str
    kill: _containers.RepeatedCompositeFieldContainer[ProcessName]
    exit_code: int
    complete: _containers.RepeatedCompositeFieldContainer[_shard_pb2.Interval]
    def __init__(self, start: _Optional[_Iterable[_Union[ProcessName, _Mapping]]] = ..., stop: _Optional[_Iterable[_Union[ProcessName, _Mapping]]] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., kill: _Optional[_Iterable[_Union[ProcessName, _Mapping]]] = ..., exit_code: _Optional[int] = ..., complete: _Optional[_Iterable[_Union[_shard_pb2.Interval, _Mapping]]] = ...) -> None: ...

class CreateCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "request", "stop")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request: int
    stop: bool
    def __init__(self, run_id: _Optional[str] = ..., request: _Optional[int] = ..., stop: _Optional[bool] = ...) -> None: ...

class CreateCheckpointReply(_message.Message):
    __slots__ = ("checkpoint", "error", "steps")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    error: str
    steps: int
    def __init__(self, checkpoint: _Optional[str] = ..., error: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run_id", "handled", "stop_reason", "learning_rate", "wants_steps", "steps_seen", "coordinator", "decision", "between", "planned")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WANTS_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_SEEN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    handled: int
    stop_reason: str
    learning_rate: float
    wants_steps: bool
    steps_seen: int
    coordinator: int
    decision: int
    between: bool
    planned: _containers.RepeatedCompositeFieldContainer[PlannedRate]
    def __init__(self, run_id: _Optional[str] = ..., handled: _Optional[int] = ..., stop_reason: _Optional[str] = ..., learning_rate: _Optional[float] = ..., wants_steps: _Optional[bool] = ..., steps_seen: _Optional[int] = ..., coordinator: _Optional[int] = ..., decision: _Optional[int] = ..., between: _Optional[bool] = ..., planned: _Optional[_Iterable[_Union[PlannedRate, _Mapping]]] = ...) -> None: ...

class PlannedRate(_message.Message):
    __slots__ = ("epoch", "learning_rate")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    learning_rate: float
    def __init__(self, epoch: _Optional[int] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("coordinator", "state", "milestone", "steps", "steps_seen", "steps_total", "learning_rate", "stopped_by")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MILESTONE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_SEEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_BY_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    state: JobState
    milestone: Milestone
    steps: _containers.RepeatedCompositeFieldContainer[StepEnd]
    steps_seen: int
    steps_total: int
    learning_rate: LearningRate
    stopped_by: int
    def __init__(self, coordinator: _Optional[int] = ..., state: _Optional[_Union[JobState, str]] = ..., milestone: _Optional[_Union[Milestone, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepEnd, _Mapping]]] = ..., steps_seen: _Optional[int] = ..., steps_total: _Optional[int] = ..., learning_rate: _Optional[_Union[LearningRate, _Mapping]] = ..., stopped_by: _Optional[int] = ...) -> None: ...

class Milestone(_message.Message):
    __slots__ = ("after_steps", "first_epoch", "epoch_losses", "evaluated", "metrics", "weights", "judged_steps", "learning_rates", "epoch_metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    AFTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LOSSES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_METRICS_FIELD_NUMBER: _ClassVar[int]
    after_steps: int
    first_epoch: int
    epoch_losses: _containers.RepeatedScalarFieldContainer[float]
    evaluated: bool
    metrics: _containers.ScalarMap[str, float]
    weights: str
    judged_steps: int
    learning_rates: _containers.RepeatedScalarFieldContainer[float]
    epoch_metrics: _containers.RepeatedCompositeFieldContainer[EpochMetrics]
    def __init__(self, after_steps: _Optional[int] = ..., first_epoch: _Optional[int] = ..., epoch_losses: _Optional[_Iterable[float]] = ..., evaluated: _Optional[bool] = ..., metrics: _Optional[_Mapping[str, float]] = ..., weights: _Optional[str] = ..., judged_steps: _Optional[int] = ..., learning_rates: _Optional[_Iterable[float]] = ..., epoch_metrics: _Optional[_Iterable[_Union[EpochMetrics, _Mapping]]] = ...) -> None: ...

class EpochMetrics(_message.Message):
    __slots__ = ("figures", "sums")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    figures: _containers.ScalarMap[str, float]
    sums: _containers.RepeatedCompositeFieldContainer[MetricSums]
    def __init__(self, figures: _Optional[_Mapping[str, float]] = ..., sums: _Optional[_Iterable[_Union[MetricSums, _Mapping]]] = ...) -> None: ...

class StepEnd(_message.Message):
    __slots__ = ("step", "loss", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LearningRate(_message.Message):
    __slots__ = ("first_step", "learning_rate", "after_steps")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    learning_rate: float
    after_steps: int
    def __init__(self, first_step: _Optional[int] = ..., learning_rate: _Optional[float] = ..., after_steps: _Optional[int] = ...) -> None: ...
