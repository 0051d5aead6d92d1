"""A job meets its data and its model: what does not fit is told before any step runs."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parashard.checkpoints.manifest import InitialManifest
from parashard.errors import BadData, ConfigurationError
from parashard.job.load import job_from_toml
from parashard.plan.variables import values_sha256
from parashard_coordinator.run.resolve import ResolvedJob
from support.resolved_job import resolved_here

JOB = """
job = {{ name = "small", epochs = 3, batch_size = 8 }}
data = {{ source = "synthetic", examples = 20, features = 4, classes = 3, held_out = {held_out} }}
model = {{ kind = "{kind}" }}
optimizer = {{ kind = "sgd", learning_rate = 0.1 }}
cluster = {{ shards = 2, partitioner = {{ kind = "fixed-shards" }}, queue_bytes = {queue_bytes} }}
evaluation = {{ {evaluation} }}
consistency = {{ policy = "{policy}" }}
"""
USER = """
import numpy as np
from parashard.plan.variables import Variable

class Mine:
    def __init__(self, initial): self.initial = initial
    def initial_variables(self): return self.initial
    def loss_and_gradients(self, variables, batch, xp): return 0.0, {}
    def evaluate(self, variables, batch, xp): return {}

def build(spec): return Mine(
"""


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def resolved(
    folder: Path,
    kind: str = "softmax",
    init_file: Path | None = None,
    held_out: int = 0,
    evaluation: str = "",
    policy: str = "async",
    queue_bytes: int = 1 << 20,
    **begun: Any,
) -> ResolvedJob:
    text = JOB.format(kind=kind, held_out=held_out, evaluation=evaluation, policy=policy, queue_bytes=queue_bytes)
    return resolved_here(job_from_toml(text), folder, init_file, **begun)


def user_model(folder: Path, initial: str) -> str:
    (folder / "mine.py").write_text(f"{USER.rstrip()}{initial})\n")
    return "mine:build"


def shapes(job: ResolvedJob) -> dict[str, tuple[int, ...]]:
    return {name: variable.shape for name, variable in job.plan.variables.items()}


def stored(folder: Path, **changed: np.ndarray) -> Path:
    """Write a file with the softmax model's variables, but for what is changed."""
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes(resolved(folder)).items()}
    arrays |= {name.replace("__", "."): value for name, value in changed.items()}
    save_file(arrays, folder / "first.safetensors")
    return folder / "first.safetensors"


def test_steps_variables_and_places_follow_from_data_and_model(tmp_path: Path) -> None:
    job = resolved(tmp_path)
    assert (job.steps.total, job.steps.steps_per_epoch) == (9, 3), "the short last batch is kept"
    assert sorted(shapes(job).values()) == [(3,), (4, 3)]
    assert len(job.plan.shards) == 2
    assert all(job.plan.shard_elements(shard) for shard in range(2))
    assert (job.initial, job.initial_sha256) == ({}, "")
    assert len(job.digest) == 64


def test_the_digest_is_the_job_s(tmp_path: Path) -> None:  # P2
    assert resolved(tmp_path).digest == resolved(tmp_path).digest
    assert resolved(tmp_path).digest != resolved(tmp_path, policy="sync:4").digest


@pytest.mark.parametrize(
    ("encoding", "policy", "more"),
    [("int8", "ssp:4", ""), ("bfloat16", "sync:4", ""), ("int8", "sync:4", ", frozen=True")],
)
def test_a_model_may_declare_encodings(tmp_path: Path, encoding: str, policy: str, more: str) -> None:
    kind = user_model(tmp_path, f'{{"a": Variable("a", (2,), encoding="{encoding}"{more})}}')
    assert resolved(tmp_path, kind, policy=policy).plan.variables["a"].encoding == encoding


@pytest.mark.parametrize(
    ("state", "policy", "refused"),
    [
        ("sum", "async", "'a': state sum, with consistency.policy async: differences from weights of unequal age"),
        ("sum", "ssp:2", "'a': state sum, with consistency.policy ssp:2"),
        (
            "counter",
            "sync:70000",
            "'a': state counter, with consistency.policy sync:70000; allowed: at most sync:6",
        ),
        ("sum", "sync:4", ""),
        ("counter", "async", ""),
        ("average:0.1", "async", ""),
    ],
)
def test_state_without_gradients_must_suit_the_consistency(
    tmp_path: Path, state: str, policy: str, refused: str
) -> None:
    kind = user_model(tmp_path, f'{{"a": Variable("a", (1, 8), state="{state}"), "b": Variable("b", (2,))}}')
    if not refused:
        assert resolved(tmp_path, kind, policy=policy).plan.variables["a"].state == state
        return
    with pytest.raises(ConfigurationError) as error:
        resolved(tmp_path, kind, policy=policy)
    assert refused in str(error.value)


def test_an_encoding_with_a_residue_is_refused_in_sync_wherever_it_was_declared(tmp_path: Path) -> None:  # P13
    kind = user_model(tmp_path, '{"a": Variable("a", (2,), encoding="int8")}')
    with pytest.raises(ConfigurationError, match=r"'a': encoding int8 with .* sync:4; allowed in sync: float32"):
        resolved(tmp_path, kind, policy="sync:4")


def test_arrays_that_a_model_starts_from_are_float32(tmp_path: Path) -> None:
    kind = user_model(tmp_path, '{"a": np.arange(6.0).reshape(2, 3), "b": [1, 2]}')
    job = resolved(tmp_path, kind)
    assert shapes(job) == {"a": (2, 3), "b": (2,)}
    assert {name: array.dtype for name, array in job.initial.items()} == {"a": np.float32, "b": np.float32}
    np.testing.assert_array_equal(job.initial["a"], np.arange(6.0).reshape(2, 3))
    assert job.initial_sha256 == values_sha256(job.initial)


@pytest.mark.parametrize(
    ("initial", "told"),
    [
        ("{}", "the model has no variables"),
        ('{"a": Variable("b", (2,))}', "declares variable 'b' under the name 'a'"),
        ('{"a": np.array([1.0, np.nan])}', "initial values of 'a' are not all finite"),
        ('{"a": "zeros"}', "initial value of 'a' is <U5; due are real numbers"),
        ('{"a": [[1.0], [1.0, 2.0]]}', "initial value of 'a' is not an array"),
        ('{"a": None}', "initial value"),
        ('{"a": np.float32(3)}', "variable 'a': .*every axis must be at least 1 and there must be one"),
        ('{"a": Variable("a", (2,)), 3: [1.0]}', "name must be text .* found 3"),
        ("[Variable('a', (2,))]", r"initial_variables\(\) returned list; a model returns a mapping"),
        ('{"a": np.zeros((0, 3))}', "variable 'a': .*every axis must be at least 1"),
        ('{"a": Variable("a", (2,), encoding="int4")}', "variable 'a': encoding 'int4'; allowed: float32"),
    ],
)
def test_a_model_s_mistake_is_reported(tmp_path: Path, initial: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        resolved(tmp_path, user_model(tmp_path, initial))


def test_what_initial_variables_raises_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{USER.replace('return self.initial', 'return self.start')}3)\n")
    with pytest.raises(ConfigurationError, match=r"initial_variables\(\) raised AttributeError: .* 'start'"):
        resolved(tmp_path, "mine:build")


@pytest.mark.parametrize("raising", ["sys.exit()", "raise KeyboardInterrupt"])
def test_a_model_that_exits_in_initial_variables_is_reported_with_its_line(tmp_path: Path, raising: str) -> None:
    text = USER.replace("return self.initial", f"import sys; {raising}")
    (tmp_path / "mine.py").write_text(f"{text.rstrip()}3)\n")
    line = 1 + text.splitlines().index(next(line for line in text.splitlines() if raising in line))
    with pytest.raises(
        ConfigurationError, match=rf"initial_variables\(\) raised (SystemExit|Key\w+) \(.*mine\.py:{line}\)$"
    ):
        resolved(tmp_path, "mine:build")


def test_a_file_may_have_the_first_values(tmp_path: Path) -> None:
    file = stored(tmp_path)
    job = resolved(tmp_path, init_file=file)
    np.testing.assert_equal(job.initial, load_file(file))
    assert job.initial_sha256 == values_sha256(load_file(file))


def test_a_file_goes_before_the_model_s_own_arrays(tmp_path: Path) -> None:
    kind = user_model(tmp_path, '{"a": np.zeros(2)}')
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "first.safetensors")
    job = resolved(tmp_path, kind, tmp_path / "first.safetensors")
    assert job.initial["a"].tolist() == [1.0, 1.0]


def test_a_run_that_has_begun_keeps_its_first_values_whatever_a_model_draws_anew(tmp_path: Path) -> None:  # P2
    kind = user_model(tmp_path, '{"a": np.random.default_rng().normal(size=4)}')
    first = resolved(tmp_path, kind)
    kept = InitialManifest(
        job_digest=first.digest, incarnation=1, sha256=first.initial_sha256, variables=(("a", (4,)),), files=()
    )
    again = resolved(tmp_path, kind, kept=kept)
    assert (again.digest, again.initial_sha256, again.initial) == (first.digest, first.initial_sha256, {})


def test_first_values_and_a_model_s_code_define_the_job(tmp_path: Path) -> None:  # P2
    digests = set()
    for values, code in (("[1.0]", ""), ("[2.0]", ""), ("[1.0]", "# another version\n")):
        folder = tmp_path / f"run-{len(digests)}"
        folder.mkdir()
        kind = user_model(folder, f'{{"a": np.array({values})}}')
        (folder / "mine.py").write_text(code + (folder / "mine.py").read_text())
        digests.add(resolved(folder, kind).digest)
        sys.modules.pop("mine")  # each is of a process of its own
        sys.path.remove(str(folder))
    assert len(digests) == 3


def named(folder: Path, shape: tuple[int, ...]) -> str:
    return next(name for name, of in shapes(resolved(folder)).items() if of == shape).replace(".", "__")


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.ones((3, 4), np.float32), r"is float32 \(3, 4\); the model's is float32 \(4, 3\)"),
        (np.ones((4, 3), np.float64), r"is float64 \(4, 3\); the model's is float32"),
        (np.full((4, 3), np.inf, np.float32), "are not all finite"),
    ],
)
def test_a_variable_that_does_not_fit_is_named(tmp_path: Path, array: np.ndarray, told: str) -> None:
    name = named(tmp_path, (4, 3))
    with pytest.raises(BadData, match=told) as caught:
        resolved(tmp_path, init_file=stored(tmp_path, **{name: array}))
    assert repr(name.replace("__", ".")) in str(caught.value)
    assert "first.safetensors" in str(caught.value)


def test_variables_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    save_file({"other": np.ones(2, np.float32)}, tmp_path / "first.safetensors")
    with pytest.raises(BadData, match=r"missing: .*weight.*; unknown: other"):
        resolved(tmp_path, init_file=tmp_path / "first.safetensors")


def test_a_file_that_is_not_there_or_no_safetensors_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"absent\.safetensors: cannot be read as safetensors"):
        resolved(tmp_path, init_file=tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("weights")
    with pytest.raises(BadData, match=r"text\.safetensors: cannot be read as safetensors"):
        resolved(tmp_path, init_file=tmp_path / "text.safetensors")


@pytest.mark.parametrize(("dtype", "bytes_"), [("BF16", 2), ("F8_E4M3", 1)])
def test_a_file_of_a_dtype_that_numpy_lacks_is_reported(tmp_path: Path, dtype: str, bytes_: int) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, bytes_]}}).encode()
    file = tmp_path / "first.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(bytes_))
    with pytest.raises(BadData, match="cannot be read as safetensors"):
        resolved(tmp_path, init_file=file)


@pytest.mark.parametrize("label", ["class", "value"])
def test_a_target_must_go_with_what_the_labels_are(tmp_path: Path, label: str) -> None:
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{i}.5,{i % 2}\n" for i in range(10)))
    text = JOB.format(kind="mlp", held_out=0, evaluation="KEY = 0.5", policy="async", queue_bytes=1 << 20)
    source = f'source = "csv", path = "{tmp_path}/a.csv", label = "y", target = "{label}"'
    text = re.sub("data = {.*}", f"data = {{ {source} }}", text)
    wrong, right = "target_accuracy", "target_mean_squared_error"
    if label == "class":
        wrong, right = right, wrong
    with pytest.raises(ConfigurationError, match=rf"evaluation\.{wrong}: the data's targets are .*allowed: .*{right}"):
        resolved_here(job_from_toml(text.replace("KEY", wrong)), None)
    resolved = resolved_here(job_from_toml(text.replace("KEY", right)), None)
    assert resolved.summary().startswith("8 training rows, 2 held out; 1 numeric and 0 text columns as 1 input; ")
    assert resolved.summary().endswith(f"; mlp with {resolved.parameters:,} parameters")


@pytest.mark.parametrize("key", ["target_accuracy", "target_loss"])
def test_a_target_needs_held_out_examples(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"evaluation\.{key} needs held-out examples"):
        resolved(tmp_path, evaluation=f"{key} = 0.5")
    assert resolved(tmp_path, evaluation=f"{key} = 0.5", held_out=4).spec.held_out == 4


def test_a_round_that_cannot_be_held_in_memory_is_refused(tmp_path: Path) -> None:  # P19
    with pytest.raises(ConfigurationError, match=r"sync:4: a shard may hold 4 gradients of \d+ bytes, more than"):
        resolved(tmp_path, policy="sync:4", queue_bytes=100)
    resolved(tmp_path, policy="ssp:4", queue_bytes=100)


def test_more_shards_than_rows_are_refused(tmp_path: Path) -> None:
    text = JOB.format(kind="softmax", held_out=0, evaluation="", policy="async", queue_bytes=0)
    told = r"^cluster\.shards = 8: the model's variables have 7 rows in all, and a row is not cut; allowed: at most 7$"
    with pytest.raises(ConfigurationError, match=told):
        resolved_here(job_from_toml(text, [("cluster.shards", 8, "--shards")]), None)
    assert len(resolved_here(job_from_toml(text, [("cluster.shards", 7, "--shards")]), None).plan.shards) == 7


def test_variables_that_this_machine_has_no_memory_for_are_refused_with_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = user_model(tmp_path, '{"a": Variable("a", (1 << 28,)), "b": Variable("b", (1 << 30,))}')
    told = (
        "the model's variables and 2 times as much for optimizer.kind = 'adam' need 15.0 GiB, and this machine's "
        "memory is 14.0 GiB; the largest variable is 'b' of shape (1073741824,): 4.0 GiB"
    )
    text = JOB.format(kind=kind, held_out=0, evaluation="", policy="async", queue_bytes=0)
    monkeypatch.setattr("parashard_coordinator.run.resolve.memory_bytes", lambda: 14 << 30)
    for kind, launcher, refused in (("adam", "local", told), ("sgd", "local", ""), ("adam", "external", "")):
        over = [("optimizer.kind", kind, "--set"), ("cluster.launcher", launcher, "--set")]
        if refused:
            with pytest.raises(ConfigurationError, match=f"^{re.escape(refused)}$"):
                resolved_here(job_from_toml(text, over), tmp_path)
        else:
            resolved_here(job_from_toml(text, over), tmp_path)


def test_a_budget_that_no_push_fits_into_is_refused(tmp_path: Path) -> None:  # P19
    with pytest.raises(ConfigurationError, match=r"queue_bytes = 28: a push to the largest shard has 32 bytes and"):
        resolved(tmp_path, queue_bytes=28)
    for enough in (32, 0):
        resolved(tmp_path, queue_bytes=enough)


def test_over_shared_memory_alone_every_worker_needs_its_slot(tmp_path: Path) -> None:  # P19
    text = JOB.format(kind="softmax", held_out=0, evaluation="", policy="async", queue_bytes=65599)
    job = job_from_toml(text, [("cluster.transport", "shm", "--set")])
    with pytest.raises(
        ConfigurationError, match=r"2 workers hold 32 bytes each and leave as much .* at least 65600, or 0"
    ):
        resolved_here(job, tmp_path)
    resolved_here(job_from_toml(text, [("cluster.transport", "auto", "--set")]), tmp_path)


# --- embedding tables ---

LOOKING = """
from parashard.plan.variables import Variable

class Looking:
    def initial_variables(self): return {"weight": Variable("weight", (4,)), "a.b": Variable("a.b", (4,))}
    def keys(self, batch): return {}
    def loss_and_gradients(self, variables, batch, xp): return 0.0, {}
    def evaluate(self, variables, batch, xp): return {}

def build(spec): return Looking()
"""


def with_tables(folder: Path, tables: dict[str, Any], queue_bytes: int = 0, policy: str = "async") -> ResolvedJob:
    (folder / "looking.py").write_text(LOOKING)
    text = JOB.format(kind="looking:build", held_out=0, evaluation="", policy=policy, queue_bytes=queue_bytes)
    return resolved_here(job_from_toml(text, [("tables", tables, "--set")]), folder)


@pytest.mark.parametrize(("name", "key"), [("weight", "tables.weight"), ("a.b", 'tables."a.b"')])
def test_a_table_with_the_name_of_a_variable_is_refused(tmp_path: Path, name: str, key: str) -> None:
    told = f"{key}: the model has a variable of that name; give the table another"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}$"):
        with_tables(tmp_path, {"user": {"dimension": 4}, name: {"dimension": 4}})
    assert with_tables(tmp_path, {"user": {"dimension": 4}}).job.tables.keys() == {"user"}


def test_a_table_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    clipped = {"kind": "adam", "learning_rate": 0.1, "clip_norm": 1.0}
    with pytest.raises(ConfigurationError, match=r"tables\.user\.optimizer\.clip_norm: found 1\.0; allowed: left out"):
        with_tables(tmp_path, {"user": {"dimension": 4, "optimizer": clipped}})


def test_tables_define_the_job(tmp_path: Path) -> None:  # P2
    ours, other = ({"user": {"dimension": dimension, "rows_max": 9}} for dimension in (4, 5))
    assert with_tables(tmp_path, ours).digest != with_tables(tmp_path, other).digest
    assert with_tables(tmp_path, ours).digest == with_tables(tmp_path, {"user": {"dimension": 4}}).digest


def test_a_push_has_room_for_as_many_rows_as_a_step_may_use(tmp_path: Path) -> None:  # P19, P34
    tables = {
        "user": {"dimension": 4, "keys_per_step_max": 100},
        "item": {"dimension": 1, "keys_per_step_max": 10},
    }
    due = 4 * 4 + 100 * (8 + 4 * 4) + 10 * (8 + 4 * 1)  # of a shard's four elements, and of all rows
    told = rf"queue_bytes = {due - 1}: a push to the largest shard has {due} bytes and would never fit"
    with pytest.raises(ConfigurationError, match=told):
        with_tables(tmp_path, tables, queue_bytes=due - 1)
    with pytest.raises(ConfigurationError, match=rf"sync:2: a shard may hold 2 gradients of {due} bytes"):
        with_tables(tmp_path, tables, queue_bytes=2 * due - 1, policy="sync:2")
    for queue_bytes, policy in ((due, "async"), (2 * due, "sync:2"), (0, "sync:2")):
        with_tables(tmp_path, tables, queue_bytes, policy)


@pytest.mark.parametrize(
    ("policy", "workers", "told"), [("auto:1", 4, True), ("auto:4", 4, False), ("async", 4, False)]
)
def test_workers_without_a_part_are_told_of(policy: str, workers: int, told: bool) -> None:
    text = JOB.format(kind="mlp", held_out=0, evaluation="", policy=policy, queue_bytes=1 << 30)
    job = job_from_toml(text, [("cluster.workers", workers, "flag --workers")])
    found = [line for line in resolved_here(job, None).warnings if "wait for the others" in line]
    assert [f"{policy}: a batch has 1 part, so that 3 of 4 workers wait" in line for line in found] == [True] * told
    assert ("workers share each batch in 4 parts" in resolved_here(job, None).summary()) == (policy == "auto:4")
