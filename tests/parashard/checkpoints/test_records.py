"""Records: their bytes are one function of their fields, every bit is covered, and foreign bytes are refused."""

import json
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.checkpoints import encoding
from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.encoding import MANIFEST_BYTES_MAX, Record, decode, encode, sha256_of
from parashard.checkpoints.manifest import JobManifest, PlanRecord, RunRecord, ShardManifest, StoredFile
from parashard.errors import DamagedCheckpoint, NewerFormat, StoreFailed
from parashard.frozen_model import validated
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition
from support.checkpoint_cases import DIGEST, PLAN, write_drained, write_shard
from support.store_fakes import MemoryStore

STORE = MemoryStore()
SHARD = write_shard(STORE, CheckpointId(1, 0, 9, 9))
RECORDS: dict[str, Record] = {
    "shard": SHARD,
    "plan": PlanRecord.of(PLAN, source="j1", coordinator_incarnation=2),
    "job": write_drained(STORE),
    "run": RunRecord(
        run_id="run-1",
        job_digest=DIGEST,
        identity={"job": {"seed": 1, "x": [1.5, None, True, "é"]}},
        job_toml='[job]\nname = "ü"\n',
        created_at=1.25,
    ),
}
kinds = pytest.mark.parametrize("kind", sorted(RECORDS))


def sealed(body: str, kind: str = "shard-manifest") -> bytes:
    """Return bytes whose digest is right, whatever the body."""
    return f'{{"body":{body},"kind":"{kind}","sha256":"{sha256_of(body.encode())}"}}'.encode()


def body_of(record: Record, **changed: object) -> str:
    return json.dumps({**record.plain(), **changed}, sort_keys=True, separators=(",", ":"))


def changed(**fields: object) -> ShardManifest:
    return SHARD.replaced(**fields)


# --- what was written ---


@kinds
def test_decoding_gives_what_was_encoded(kind):
    record = RECORDS[kind]
    assert decode(type(record), encode(record), "f") == record


@kinds
def test_a_record_is_json_that_any_tool_reads(kind):
    read = json.loads(encode(RECORDS[kind]))
    assert sorted(read) == ["body", "kind", "sha256"]
    assert read["body"]["format"] == 1
    assert read["sha256"] == sha256_of(body_of(RECORDS[kind]).encode())


intervals = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 50)), max_size=20).map(
    lambda drawn: tuple(IntervalSet((start, start + length) for start, length in drawn).intervals())
)


@given(intervals, st.none() | st.integers(0, 2**63 - 1), st.floats(0, 1e12), st.text(min_size=1, max_size=200))
def test_any_manifest_comes_back(applied, round_, written_at, run_id):
    manifest = changed(applied=applied, round=round_, written_at=written_at, run_id=run_id)
    assert decode(ShardManifest, encode(manifest), "f") == manifest
    assert tuple(manifest.steps.intervals()) == applied


def test_skipped_steps_are_written_where_there_are_some():  # versions without the field wrote none
    assert b"skipped" not in encode(changed(skipped=()))
    assert decode(ShardManifest, encode(changed(skipped=((0, 1),))), "f").skipped == ((0, 1),)


# --- what was not ---


@kinds
def test_every_flipped_bit_is_found(kind):
    content = encode(RECORDS[kind])
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint):
            decode(type(RECORDS[kind]), bytes(damaged), "f")


@kinds
def test_every_truncation_and_anything_appended_is_found(kind):
    content = encode(RECORDS[kind])
    for damaged in [content[:length] for length in range(len(content))] + [content + b"\n", content + content]:
        with pytest.raises(DamagedCheckpoint):
            decode(type(RECORDS[kind]), damaged, "f")


@pytest.mark.parametrize("other", sorted(set(RECORDS) - {"shard"}))
def test_a_record_of_another_kind_is_refused(other):
    with pytest.raises(DamagedCheckpoint, match="not a whole shard-manifest"):
        decode(ShardManifest, encode(RECORDS[other]), "store/manifest.json")


def test_the_error_says_where_and_what():
    with pytest.raises(DamagedCheckpoint, match=r"^s3://b/manifest.json: these 3 bytes are not a whole shard-manifest"):
        decode(ShardManifest, b"{}\n", "s3://b/manifest.json")


BODIES = {
    "no format": (body_of(SHARD, format=0), "format 1: format: "),
    "a format that is no number": (body_of(SHARD, format="2"), "format 1: format: "),
    "a format that is true": (body_of(SHARD, format=True), "canonical"),
    "a field too many": (body_of(SHARD, more=1), "more"),
    "text for a number": (body_of(SHARD, number="1"), "number"),
    "a number that is not a whole one": (body_of(SHARD, number=1.0), "number"),
    "an integer where a float is": (body_of(SHARD, written_at=1), "canonical"),
    "white space": (body_of(SHARD) + " ", "canonical"),
    "a key twice": ('{"shard":1,' + body_of(SHARD)[1:], "canonical"),
    "NaN": (body_of(SHARD).replace("1.5", "NaN"), "written_at"),
    "no JSON": ("{", "not a shard-manifest"),
    "no object": ("[]", "not a shard-manifest"),
    "deep": ("[" * 100_000, "not a shard-manifest"),
    "a long number": ("9" * 10_000, "not a shard-manifest"),
}


@pytest.mark.parametrize("case", BODIES)
def test_bytes_with_a_right_digest_that_we_did_not_write_are_refused(case):
    body, said = BODIES[case]
    with pytest.raises(DamagedCheckpoint, match=said):
        decode(ShardManifest, sealed(body), "f")


@pytest.mark.parametrize("more", [{}, {"new_field": [1, 2]}])
def test_a_record_of_a_later_version_is_no_damage(more):
    said = "^f: a shard-manifest of format 2, and this version reads format 1: a newer version of parashard wrote it$"
    with pytest.raises(NewerFormat, match=said):
        decode(ShardManifest, sealed(body_of(SHARD, format=2, **more)), "f")


@pytest.mark.parametrize("value", ["NaN", "1e999", "-0", "1E5", '"\\ud800"', "9" * 5000])
def test_a_free_table_is_canonical_too(value):
    body = body_of(RECORDS["run"]).replace("1.5", value)
    with pytest.raises(DamagedCheckpoint):
        decode(RunRecord, sealed(body, "run"), "f")


FIELDS = {
    "touching intervals": {"applied": ((0, 2), (2, 3))},
    "an empty interval": {"applied": ((2, 2),)},
    "intervals in disorder": {"applied": ((4, 5), (0, 1))},
    "a negative step": {"applied": ((-1, 5),)},
    "rows in reverse": {"partitions": (("w", 3, 3),)},
    "a partition twice": {"partitions": (("w", 0, 3), ("w", 0, 3))},
    "a slot twice": {"slots": ("m", "m")},
    "a slot with a slash": {"slots": ("m/n",)},
    "a digest that is none": {"job_digest": "D" * 64},
    "a number that no name holds": {"number": 10**9},
    "a position that no index holds": {"log_position": 2**63},
    "a file twice": {"files": (SHARD.files[0], SHARD.files[0])},
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_manifest_that_cannot_be_is_not_written(case):
    with pytest.raises(ValidationError):
        encode(changed(**FIELDS[case]))


def test_the_largest_numbers_are_taken():
    manifest = changed(number=10**9 - 1, incarnation=10**9 - 1, log_position=2**63 - 1)
    assert decode(ShardManifest, encode(manifest), "f") == manifest


@pytest.mark.parametrize("rows", [0, 2**63])
def test_a_variable_with_no_rows_or_more_than_an_index_holds_is_refused(rows):
    table = RECORDS["plan"].plain()
    table["plan"]["variables"][0]["shape"] = [rows]
    with pytest.raises(ValidationError, match="shape"):
        validated(PlanRecord, table)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "x\n", "x" * 201])
def test_a_file_lies_in_its_manifests_folder(name):  # else collecting could delete what is not ours
    with pytest.raises(ValidationError):
        validated(StoredFile, {"name": name, "size_bytes": 1, "sha256": "0" * 64})


@pytest.mark.parametrize("name", ["jobs", "shards/p0001/s0000/../../x", "shards/p1/s0/i1-c1", "/shards/p0001"])
def test_a_part_is_a_folder_of_a_shards_checkpoint(name):
    part = RECORDS["job"].plain()["parts"][0]
    with pytest.raises(ValidationError):
        validated(JobManifest, {**RECORDS["job"].plain(), "parts": [{**part, "name": name}]})


# --- foreign bytes, and sizes ---


@kinds
@given(st.binary(max_size=300))
def test_random_bytes(kind, content):
    with pytest.raises(DamagedCheckpoint):
        decode(type(RECORDS[kind]), content, "f")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@kinds
@given(st.data(), json_values)
@example(None, "\ud800")  # half a character
def test_random_values_under_a_right_digest(kind, data, value):
    record = RECORDS[kind]
    field = data.draw(st.sampled_from(sorted(type(record).model_fields))) if data else "job_toml"
    body = body_of(record, **{field: value})
    try:
        decoded = decode(type(record), sealed(body, record.kind), "f")
    except DamagedCheckpoint:
        return
    except NewerFormat:
        assert field == "format"
        return
    assert encode(decoded) == sealed(body, record.kind)


def test_bytes_over_the_limit_are_refused_before_anything_is_made_of_them():
    content = bytes(MANIFEST_BYTES_MAX + 1)
    assert_allocates_at_most(1 << 16, content, "at most 16777216")


def test_bytes_that_would_become_many_objects_are_not_parsed_before_their_digest_is_right():
    content = b'{"body":' + b"[]," * 300_000  # each of three bytes would be an object of 56
    assert_allocates_at_most(4 * len(content), content, "not a whole shard-manifest")


def assert_allocates_at_most(limit_bytes: int, content: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpoint, match=said):
            decode(ShardManifest, content, "f")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= limit_bytes


def test_a_record_that_could_not_be_read_back_is_not_written(monkeypatch):
    monkeypatch.setattr(encoding, "MANIFEST_BYTES_MAX", len(encode(SHARD)))
    assert decode(ShardManifest, encode(SHARD), "f") == SHARD
    with pytest.raises(StoreFailed, match="is not written"):
        encode(changed(applied=((0, 2), (100, 2000))))


# --- plans ---


def test_a_plan_comes_back_with_what_its_shards_start_from():
    record = RECORDS["plan"]
    assert record.to_plan() == PLAN
    assert (record.version, record.source, record.coordinator_incarnation) == (1, "j1", 2)


ROWS = {
    "a gap": [[("dense/bias", 0, 5), ("dense/weight", 1, 8)], []],
    "an overlap": [[("dense/bias", 0, 5), ("dense/weight", 0, 4)], [("dense/weight", 3, 8)]],
    "a range without rows": [[("dense/bias", 0, 0), ("dense/bias", 0, 5)], [("dense/weight", 0, 8)]],
    "a range without rows at the end": [[("dense/bias", 0, 5)], [("dense/weight", 0, 8), ("dense/weight", 8, 8)]],
    "rows that are missing": [[("dense/bias", 0, 5)], [("dense/weight", 0, 7)]],
    "no rows at all": [[("dense/bias", 0, 5)], []],
    "rows too many": [[("dense/bias", 0, 5)], [("dense/weight", 0, 9)]],
    "another variable": [[("dense/bias", 0, 5)], [("dense/weight", 0, 8), ("x", 0, 1)]],
}


@pytest.mark.parametrize("case", ROWS)
def test_a_plan_places_every_row_once(case):
    table = RECORDS["plan"].plain()
    table["plan"]["shards"] = ROWS[case]
    record = validated(PlanRecord, table)
    with pytest.raises(DamagedCheckpoint, match="plan 1: "):
        record.to_plan()


def test_a_plan_whose_variable_cannot_be_is_damaged():
    table = RECORDS["plan"].plain()
    table["plan"]["variables"][0]["initializer"] = "magic"
    with pytest.raises(DamagedCheckpoint, match="magic"):
        validated(PlanRecord, table).to_plan()


def test_partitions_are_those_of_the_plan_in_order():
    assert SHARD.held == PLAN.shards[0]
    assert all(isinstance(p, Partition) for p in SHARD.held)
    assert SHARD.size_bytes == sum(file.size_bytes for file in SHARD.files)
