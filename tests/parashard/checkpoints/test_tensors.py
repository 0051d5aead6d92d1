"""Tensor files: what was written is read back bit for bit, and nothing else is."""

import tracemalloc
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from safetensors.numpy import load, save

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import ShardManifest, StoredFile
from parashard.checkpoints.tensors import iterate_tensors, write_tensors
from parashard.errors import AlreadyStored, DamagedCheckpoint, StoreFailed
from parashard.plan.variables import Float32s
from support.checkpoint_cases import PLAN, model_of, write_shard
from support.store_fakes import MemoryStore

ID = CheckpointId(1, 0, 1, 1)
FIRST = "variables-0.safetensors"


def ones(rows: int) -> Float32s:
    return np.ones((rows, 3), np.float32)


def with_file(manifest: ShardManifest, store: MemoryStore, content: bytes) -> ShardManifest:
    """Return the manifest of a shard that wrote `content` as its first file, and meant it."""
    store.contents[f"{ID.folder}/{FIRST}"] = content
    file = StoredFile(name=FIRST, size_bytes=len(content), sha256=sha256_of(content))
    return manifest.replaced(files=(file, *manifest.files[1:]))


# --- writing ---


def test_files_are_filled_to_their_size_in_the_order_of_the_arrays():
    store = MemoryStore()
    arrays = {"a": ones(2), "b": ones(2), "c": ones(9), "d": ones(1)}  # 24, 24, 108, 12 bytes
    files = write_tensors(store, "f", arrays, "slots", file_bytes=50)
    assert [sorted(load(store.contents[f"f/{file.name}"])) for file in files] == [["a", "b"], ["c"], ["d"]]
    assert [file.name for file in files] == [f"slots-{i}.safetensors" for i in range(3)]


def test_files_are_reported_with_size_and_digest():
    store = MemoryStore()
    for file in write_tensors(store, "f", {"a": ones(2), "b": ones(3)}, "variables", file_bytes=1):
        content = store.contents[f"f/{file.name}"]
        assert (file.size_bytes, file.sha256) == (len(content), sha256_of(content))


def test_each_array_is_asked_for_once_and_those_of_a_file_are_let_go_with_it():
    class Made(Mapping[str, Float32s]):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def __getitem__(self, name: str) -> Float32s:
            self.asked.append(name)
            return np.ones((1 << 18, 1), np.float32)

        def __iter__(self) -> Iterator[str]:
            return iter("abcdefgh")

        def __len__(self) -> int:
            return 8

    class Sink(MemoryStore):
        def create(self, name: str, content: bytes | memoryview) -> None:
            assert len(content) < 1 << 21

    made = Made()
    tracemalloc.start()
    try:
        write_tensors(Sink(), "f", made, "variables", file_bytes=1 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.asked == list("abcdefgh")
    assert peak_bytes < 5 << 20  # of 8 MiB: the file, its copies, and the next array


def test_arrays_with_strides_are_written_by_their_values():
    store, transposed = MemoryStore(), np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_tensors(store, "f", {"t": transposed}, "variables")
    assert np.array_equal(load(store.contents[f"f/{FIRST}"])["t"], transposed)


def test_no_arrays_no_files():
    assert write_tensors(MemoryStore(), "f", {}, "slots") == []


def test_a_file_that_is_there_is_never_written_over():
    store = MemoryStore(contents={f"f/{FIRST}": b"mine"})
    with pytest.raises(AlreadyStored):
        write_tensors(store, "f", {"a": ones(1)}, "variables")
    assert store.contents == {f"f/{FIRST}": b"mine"}


def test_a_full_disk_is_reported():
    store = MemoryStore()
    fault = store.fail("create", "variables-1")
    with pytest.raises(StoreFailed, match="no space left"):
        write_tensors(store, "f", {"a": ones(1), "b": ones(1)}, "variables", file_bytes=1)
    assert fault.fired == 1


# --- reading ---


def test_what_was_written_comes_back():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    tensors = dict(iterate_tensors(store, ID.folder, manifest, "variables"))
    model = model_of(0)
    assert len(tensors) == len(PLAN.shards[0])
    for p in PLAN.shards[0]:
        rows = tensors[f"{p.variable}[{p.row_start}:{p.row_stop}]"]
        assert rows.tobytes() == model[p.variable][p.row_start : p.row_stop].tobytes()


def test_variables_and_slots_are_apart_even_where_their_tensors_have_one_name():
    # Slot m of variable "bias" and a variable called "m/bias" have the same name.
    store, held = MemoryStore(), (("bias", 0, 1), ("m/bias", 0, 1))
    values = {"bias[0:1]": np.float32([1]), "m/bias[0:1]": np.float32([2])}
    state = {"m/bias[0:1]": np.float32([3]), "m/m/bias[0:1]": np.float32([4])}
    files = write_tensors(store, "f", values, "variables") + write_tensors(store, "f", state, "slots")
    manifest = write_shard(MemoryStore(), ID, partitions=held, slots=("m",), files=tuple(files))
    assert dict(iterate_tensors(store, "f", manifest, "variables"))["m/bias[0:1]"] == 2
    assert dict(iterate_tensors(store, "f", manifest, "slots"))["m/bias[0:1]"] == 3


def test_a_wrong_size_is_found_before_anything_is_read():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    store.contents[f"{ID.folder}/{FIRST}"] += b"\0"
    store.calls.clear()
    with pytest.raises(DamagedCheckpoint, match=rf"{FIRST}: \d+ bytes; the manifest says \d+"):
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))
    assert [operation for operation, _ in store.calls] == ["size"]


def test_a_changed_byte_is_found():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    store.contents[f"{ID.folder}/{FIRST}"] = store.contents[f"{ID.folder}/{FIRST}"][:-1] + b"x"
    with pytest.raises(DamagedCheckpoint, match=f"{FIRST}: SHA-256"):
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))


def test_a_file_that_is_gone_is_named():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    del store.contents[f"{ID.folder}/slots-1.safetensors"]
    with pytest.raises(DamagedCheckpoint, match=r"slots-1\.safetensors: is not there"):
        dict(iterate_tensors(store, ID.folder, manifest, "slots"))


def test_tensors_of_a_file_come_after_the_whole_file_is_checked():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    del store.contents[f"{ID.folder}/variables-1.safetensors"]
    tensors = iterate_tensors(store, ID.folder, manifest, "variables")
    assert next(tensors)[0].startswith("dense/")
    with pytest.raises(DamagedCheckpoint):
        list(tensors)


def test_a_store_that_does_not_answer_is_not_damage():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    fault = store.fail("read", FIRST)
    with pytest.raises(StoreFailed) as failed:
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))
    assert not isinstance(failed.value, DamagedCheckpoint)
    assert fault.fired == 1


P = PLAN.shards[0][0]
NAME = f"{P.variable}[{P.row_start}:{P.row_stop}]"
RIGHT = model_of(0)[P.variable][P.row_start : P.row_stop]
WRONG = {
    "another name": ({"other[0:1]": RIGHT}, "is not one that the manifest says"),
    "another dtype": ({NAME: RIGHT.astype(np.float64)}, "float64"),
    "a row too few": ({NAME: RIGHT[:-1]}, f"float32, {P.rows} rows"),
    "a row too many": ({NAME: np.concatenate([RIGHT, RIGHT[:1]])}, f"float32, {P.rows} rows"),
    "no rows": ({NAME: np.array(1, np.float32)}, f"float32, {P.rows} rows"),
    "one too many": ({NAME: RIGHT, "x": RIGHT}, "no such tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_are_those_that_the_manifest_says(case):
    tensors, said = WRONG[case]
    store = MemoryStore()
    manifest = with_file(write_shard(store, ID), store, save(tensors))
    with pytest.raises(DamagedCheckpoint, match=said):
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))


def tensors_of_dtype(dtype: str) -> bytes:
    header = b'{"x":{"dtype":"%s","shape":[1],"data_offsets":[0,2]}}' % dtype.encode()
    return len(header).to_bytes(8, "little") + header + b"\0\0"


@pytest.mark.parametrize("content", [b"", b"not safetensors", tensors_of_dtype("F8_E4M3"), tensors_of_dtype("F99")])
def test_what_is_no_safetensors_is_refused(content):
    store = MemoryStore()
    manifest = with_file(write_shard(store, ID), store, content)
    with pytest.raises(DamagedCheckpoint, match="not safetensors"):
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))


def test_a_variable_of_bfloat16_is_not_one_that_the_manifest_says():
    store = MemoryStore()
    manifest = with_file(write_shard(store, ID), store, tensors_of_dtype("BF16"))
    with pytest.raises(DamagedCheckpoint, match=r"tensor 'x'.*is not one that the manifest says"):
        dict(iterate_tensors(store, ID.folder, manifest, "variables"))


def test_a_tensor_that_no_file_has_is_missed():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    without = manifest.replaced(files=manifest.files[1:])
    with pytest.raises(DamagedCheckpoint, match="no file has the tensor"):
        dict(iterate_tensors(store, ID.folder, without, "variables"))
