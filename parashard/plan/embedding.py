"""Embedding tables: rows by 64-bit key, which determines a row's initial values and its shard.

Owns the declaration of a table, the order of keys, and a row's initial values, which workers and shards share (P27).
Pure.

Below the user's code a key has its *mixed* form, a bijection of 64 bits whose top bits are the key's bucket (P28):
ascending mixed keys are in the order of buckets, and those of a shard are contiguous.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from parashard.errors import ConfigurationError, shortened
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.row_rules import NO_RULES, RowRules
from parashard.plan.seeding import key_of, splitmix64
from parashard.plan.variables import Float32s, Initializer, drawn

Keys = npt.NDArray[np.uint64]
RowDtype = Literal["float32", "float16", "bfloat16"]
RowEncoding = Literal["float32", "bfloat16", "float16", "int8"]
Combiner = Literal["sum", "mean"]
COMBINERS = get_args(Combiner)


class KeyedRows(NamedTuple):
    """Rows of a table with their keys, and with their optimizer state if a job continues with it."""

    keys: Keys  # shape (rows,): mixed, ascending, each once
    values: Float32s  # shape (rows, row_elements)
    t: NDArray[np.uint32] | None = None  # shape (rows,): number of pushes; None: the optimizer's state is new
    # Optimizer slots by name, shape (rows, slot_elements); empty: they are new.
    slots: Mapping[str, Float32s] = MappingProxyType({})


BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS
"""Parts of the key space that are placed, moved and compared as a unit; all tables of a job have the same."""
KEY_BYTES = 8
NO_IDS_FROM = -(1 << 16)
"""From here to -1 programs have numbers that are no ids: -1 for padding, -100 for labels that a loss ignores."""
_INT64_MAX = 2**63 - 1
_NAN_AS_INT64 = -(2**63)
FLOAT16_MAX = np.float32(65504)
BFLOAT16 = np.dtype("V2")
"""Stands for bfloat16, which NumPy lacks: two bytes, which no arithmetic or cast accepts by mistake."""
BFLOAT16_MAX_BITS = np.uint32(0x7F7F)
ROW_ELEMENTS_MAX = 1 << 14
KEYS_PER_STEP_MAX = 1 << 24
ROWS_MAX = (1 << 32) - 2
"""Rows are referred to by 32 bits."""
ROWS_MAX_DEFAULT = 1 << 26

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_U64 = np.uint64
_LANE = _U64(0xD1342543DE82EF95)  # distance of the counters of a row's elements: odd, so that no two are equal


@dataclass(frozen=True)
class EmbeddingTable:
    """A table of rows by key; a key's first push creates its row.

    Its settings are those of `parashard.job.embeddings.TableSettings`, which checks the relations between them. Bounds
    of messages and memory follow from `keys_per_step_max` (P34). Slots and arithmetic of rows are float32 for every
    `dtype`. Shards do not use the combiner; `gradient_encoding` is the effective `encoding`.
    """

    name: str
    row_elements: int
    optimizer: OptimizerSpec
    initializer: Initializer = field(default_factory=Initializer)
    keys_per_step_max: int = 1 << 16
    rows_max: int = ROWS_MAX_DEFAULT
    rules: RowRules = NO_RULES
    dtype: RowDtype = "float32"
    combiner: Combiner | None = None
    encoding: RowEncoding = "float32"

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and 1 <= len(self.name) <= 200) or _CONTROL.search(self.name):
            raise ConfigurationError(
                "a table's name must be text of 1 to 200 characters, without line ends and other control characters, "
                f"found {shortened(repr(self.name))}"
            )
        if not 1 <= self.row_elements <= ROW_ELEMENTS_MAX:  # a server's answer is unchecked; a job's were checked
            raise ConfigurationError(
                f"table {self.name!r}: row_elements must be 1 to {ROW_ELEMENTS_MAX}, found {self.row_elements}"
            )
        if self.rules.admit_after > 1 and len(candidates_of(self.name)) > 200:
            raise ConfigurationError(
                f"table {self.name!r}: admit_after must be 1 where the table's name has more than 189 characters, "
                f"found {self.rules.admit_after}"
            )

    @property
    def gradient_encoding(self) -> RowEncoding:
        """Encoding of its rows' gradients: float32 where int8 with a scale for each row would be no shorter."""
        return "float32" if self.encoding == "int8" and self.row_elements == 1 else self.encoding

    @property
    def push_bytes_max(self) -> int:
        """Most bytes of a push for this table, also as held for a round: no encoding is longer than float32."""
        return self.keys_per_step_max * (KEY_BYTES + ELEMENT_BYTES * self.row_elements)

    @property
    def slots(self) -> int:
        """Number of optimizer slots of a row."""
        return len(self.optimizer.slots)

    @property
    def slot_elements(self) -> int:
        """Elements of each slot."""
        return 1 if self.optimizer.kind == "rowwise_adagrad" else self.row_elements


def candidates_of(table: str) -> str:
    """Return the name in checkpoints of a table's candidates: keys that are counted and have no row yet."""
    return f"{table} candidates"


def mixed(keys: npt.ArrayLike) -> Keys:
    """Return the mixed form of 64-bit keys (negative: as unsigned), a new array: SplitMix64 with them as counters."""
    found = np.atleast_1d(np.asarray(keys))
    if not found.size:
        return np.empty(0, _U64)
    if found.dtype.kind not in "iu":
        raise ConfigurationError(f"keys are whole numbers of up to 64 bits, found {found.dtype}")
    words: Keys = splitmix64(found.astype(np.int64 if found.dtype.kind == "i" else _U64).view(_U64).copy(), 0)
    return words


def mixed_ids(ids: npt.ArrayLike) -> Keys:
    """Return the mixed form of a program's ids: from 0 to 2^63 - 1, or 64-bit hashes as int64."""
    found = np.asarray(ids)
    if found.size and found.dtype.kind in "iu":
        if found.dtype.kind == "u" and (most := int(found.max())) > _INT64_MAX:
            raise ConfigurationError(
                f"id {most} is above 2^63 - 1; give hashes as int64: ids.view(numpy.int64) has the same bits"
            )
        if found.dtype.kind == "i" and found.min() < 0:
            wrong = found[((found >= NO_IDS_FROM) & (found < 0)) | (found == _NAN_AS_INT64)]
            if wrong.size:
                raise ConfigurationError(
                    f"id {wrong[0]} stands for no id, and has no row: leave it out, or give the layer "
                    f"padding_key={wrong[0]}"
                )
    return mixed(found)


def unmixed(words: Keys) -> Keys:
    """Return the keys of mixed ones: the inverse of `mixed`."""
    z: Keys = words ^ (words >> _U64(31)) ^ (words >> _U64(62))
    z *= _U64(pow(0x94D049BB133111EB, -1, 1 << 64))
    z ^= (z >> _U64(27)) ^ (z >> _U64(54))
    z *= _U64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    z ^= (z >> _U64(30)) ^ (z >> _U64(60))
    z *= _U64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
    return z


def buckets_of(words: Keys) -> npt.NDArray[np.int64]:
    """Return the buckets of mixed keys."""
    return (words >> _U64(64 - BUCKET_BITS)).astype(np.int64)


def bucket_ranges(shards: int) -> tuple[tuple[int, int], ...]:
    """Return each shard's half-open range of buckets: in order, of sizes that differ by at most one."""
    if not 1 <= shards <= BUCKETS:
        raise ConfigurationError(f"a job with tables has 1 to {BUCKETS:,} shards, found {shards:,}")
    return tuple(itertools.pairwise(BUCKETS * shard // shards for shard in range(shards + 1)))


def found_among(keys: Keys, among: Keys) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return the place of each key among ascending ones, and whether it is there; if not, the place is undefined."""
    if not len(among):
        return np.zeros(len(keys), np.intp), np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(among, keys), len(among) - 1)
    found: npt.NDArray[np.bool_] = among[places] == keys
    return places, found


def cut_by_shard(words: Keys, shards: int) -> list[slice]:
    """Return each shard's run of ascending mixed keys."""
    firsts = np.array([begin for begin, _ in bucket_ranges(shards)], _U64) << _U64(64 - BUCKET_BITS)
    return [slice(begin, end) for begin, end in itertools.pairwise([*np.searchsorted(words, firsts), len(words)])]


def kept_as(values: Float32s, dtype: RowDtype) -> npt.NDArray[Any]:
    """Round rows to the stored dtype: to nearest, ties to even; values out of range to the greatest finite one."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    codes = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    np.minimum(codes, BFLOAT16_MAX_BITS, out=codes)
    codes[magnitude > np.uint32(0x7F800000)] = 0x7FC0  # NaN stays NaN, as in the other dtypes
    codes |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return codes.astype(np.uint16).view(BFLOAT16)


def kept_dtype(dtype: RowDtype) -> np.dtype[Any]:
    """Return the NumPy dtype of stored rows."""
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a job file's name for the dtype of an array of rows."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


def floats_of(kept: npt.NDArray[Any]) -> Float32s:
    """Return rows as float32, exactly; rows of float32 themselves."""
    if kept.dtype != BFLOAT16:
        return kept.astype(np.float32, copy=False)
    return (np.ascontiguousarray(kept).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_numpys(kept: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows in a dtype that NumPy has: bfloat16 as float32, others as they are."""
    return floats_of(kept) if kept.dtype == BFLOAT16 else kept


def rows_sha256(rows: Mapping[str, KeyedRows]) -> str:
    """Return SHA-256 (hex) over rows, table by table in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(f"{name}\0{len(rows[name].keys)}\0".encode())
        digest.update(np.ascontiguousarray(rows[name].keys, "<u8").data)
        digest.update(np.ascontiguousarray(rows[name].values, "<f4").data)
        if rows[name].t is not None:
            digest.update(np.ascontiguousarray(rows[name].t, "<u4").data)
        for slot, values in sorted(rows[name].slots.items()):
            digest.update(f"{slot}\0".encode())
            digest.update(np.ascontiguousarray(values, "<f4").data)
    return digest.hexdigest()


def first_rows(table: EmbeddingTable, seed: int) -> Callable[[Keys], Float32s]:
    """Return the function from mixed keys to their rows' initial values, float32 of shape (keys, row_elements)."""
    # A row's values are a function of (seed, table, key), with the same bits on every machine, and exact in the stored
    # dtype.
    own = key_of(f"parashard first rows\0{seed}\0{table.name}")
    lanes = np.arange(table.row_elements, dtype=_U64) * _LANE

    def rows(words: Keys) -> Float32s:
        counters = words[:, None] + lanes
        values = drawn(table.initializer, own, counters).astype(np.float32)
        return floats_of(kept_as(values, table.dtype))

    return rows
