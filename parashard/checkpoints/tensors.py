"""Tensor files: arrays as safetensors files of bounded size, verified before they are read back.

Owns the names of tensors and files. Knows manifests, and neither steps nor plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np

from parashard.checkpoints.catalogue import place_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import ShardManifest, StoredFile
from parashard.errors import DamagedCheckpoint, NotStored
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s
from parashard.store import Store
from parashard.store.arrays import from_bytes, to_bytes

FILE_BYTES = 256 << 20
"""Approximate size of a file; a larger tensor has a file of its own."""

Prefix = Literal["variables", "slots"]


def variable_tensor(partition: Partition) -> str:
    """Return the name of the tensor with a partition's values."""
    return f"{partition.variable}[{partition.row_start}:{partition.row_stop}]"


def slot_tensor(slot: str, partition: Partition) -> str:
    """Return the name of the tensor with a partition's part of an optimizer slot."""
    return f"{slot}/{variable_tensor(partition)}"


def write_tensors(
    store: Store, folder: str, arrays: Mapping[str, Float32s], prefix: Prefix, *, file_bytes: int = FILE_BYTES
) -> list[StoredFile]:
    """Write arrays as `FOLDER/PREFIX-0.safetensors`, `PREFIX-1...`, and return the files."""
    # Each array is read once, in the mapping's order, and released with its file, so the mapping may create arrays
    # lazily. A file is closed before an array that would make it larger than `file_bytes`. Without a manifest the files
    # are no checkpoint.
    written: list[StoredFile] = []

    def close(batch: dict[str, Float32s]) -> None:
        content = to_bytes(batch)
        name = f"{prefix}-{len(written)}.safetensors"
        store.create(f"{folder}/{name}", content)
        written.append(StoredFile(name=name, size_bytes=len(content), sha256=sha256_of(content)))

    batch: dict[str, Float32s] = {}
    batch_bytes = 0
    for name in arrays:
        array = arrays[name]
        assert array.dtype == np.float32, f"{name}: {array.dtype}"
        if batch and batch_bytes + array.nbytes > file_bytes:
            close(batch)
            batch, batch_bytes = {}, 0
        batch[name] = np.ascontiguousarray(array)  # safetensors reads memory, not strides
        batch_bytes += array.nbytes
    if batch:
        close(batch)
    return written


def iterate_tensors(
    store: Store, folder: str, manifest: ShardManifest, prefix: Prefix
) -> Iterator[tuple[str, Float32s]]:
    """Yield the names and tensors of a checkpoint's variables, or of its slots; each file is verified first.

    The arrays have shape (rows, ...) and are read-only. One file is in memory at a time. Raises as `iterate_files`.
    """
    files = (file for file in manifest.files if file.name.startswith(f"{prefix}-"))
    return iterate_files(store, folder, files, _tensors_due(manifest, prefix))


def iterate_files(
    store: Store, folder: str, files: Iterable[StoredFile], rows_due: Mapping[str, int]
) -> Iterator[tuple[str, Float32s]]:
    """Yield the names and tensors of files; raise at the end unless every tensor in `rows_due` was there."""
    due = dict(rows_due)
    for file in files:
        for name, array in _parsed(read_file(store, folder, file), place_of(store, f"{folder}/{file.name}")).items():
            rows = due.pop(name, None)
            if rows is None or array.dtype != np.float32 or array.shape[:1] != (rows,):
                raise DamagedCheckpoint(
                    f"{place_of(store, f'{folder}/{file.name}')}: tensor {name!r} ({array.dtype}, shape {array.shape}) "
                    f"is not one that the manifest says; due: {f'float32, {rows} rows' if rows else 'no such tensor'}"
                )
            yield name, array
    if due:
        raise DamagedCheckpoint(f"{place_of(store, folder)}: no file has the tensor {min(due)!r} of the manifest")


def read_file(store: Store, folder: str, file: StoredFile) -> bytes:
    """Return the verified content of a file of a checkpoint. The size is checked before anything is read."""
    name = f"{folder}/{file.name}"
    where = place_of(store, name)
    try:
        size_bytes = store.size(name)
        if size_bytes != file.size_bytes:
            raise DamagedCheckpoint(f"{where}: {size_bytes} bytes; the manifest says {file.size_bytes}")
        content = store.read(name, file.size_bytes)
    except NotStored:
        raise DamagedCheckpoint(f"{where}: is not there; the manifest says {file.size_bytes} bytes") from None
    digest = sha256_of(content)
    if digest != file.sha256:
        raise DamagedCheckpoint(f"{where}: SHA-256 {digest[:16]}...; the manifest says {file.sha256[:16]}...")
    return content


def _parsed(content: bytes, where: str) -> dict[str, Float32s]:
    try:
        return from_bytes(content)
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: not safetensors of float32: {error}") from None


def _tensors_due(manifest: ShardManifest, prefix: Prefix) -> dict[str, int]:
    if prefix == "variables":
        return {variable_tensor(p): p.rows for p in manifest.held}
    return {slot_tensor(slot, p): p.rows for slot in manifest.slots for p in manifest.held}
