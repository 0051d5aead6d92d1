"""PublishedRows: rows of an embedding table that are looked up while newer versions are built.

Pure, and immutable: a change returns another instance, which shares unchanged arrays, so that readers need no lock. It
holds the rows of checkpoints, of running shards and of replicas.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys, buckets_of, found_among
from parashard.plan.row_rules import RowRules, evicted
from parashard.plan.variables import Float32s

OVERLAY_ROWS_MIN = 1024
"""The overlay is merged into the base once it has more rows than this, and than an eighth of the base's."""
GONE_KEYS_MIN = 1 << 16
"""Most keys of lost rows to remember for subscribers, or as many as there are rows if that is more."""

NO_KEYS: Keys = np.empty(0, np.uint64)


class Block(NamedTuple):
    """Rows in ascending order of keys; the arrays' first axis is that of the rows."""

    keys: Keys  # mixed, each once
    values: Float32s  # shape (rows, row_elements)
    last_use: NDArray[np.uint32]  # time of each row's last push
    changed: NDArray[np.int64]  # number of each row's last change
    there: NDArray[np.bool_]  # False: the key has no row

    def taken(self, which: Any) -> Block:
        """Return some of the rows."""
        return Block(*(array[which] for array in self))


class RowChange(NamedTuple):
    """New values of rows, and keys that lost their row; both ascending, no key in both."""

    keys: Keys
    values: Float32s
    last_use: NDArray[np.uint32]
    gone: Keys


@dataclass(frozen=True)
class PublishedRows:
    """Rows of a table: a sorted base, and over it a small sorted overlay of later changes."""

    base: Block
    overlay: Block  # takes precedence over the base
    gone: Keys  # keys that lost their row, ascending
    gone_changed: NDArray[np.int64]  # number of the change that removed each
    floor: int  # keys that lost their row by a change up to this one may be forgotten
    rows: int  # number of rows

    @classmethod
    def empty(cls, row_elements: int) -> Self:
        """Return a table without a row."""
        return cls(_no_rows(row_elements), _no_rows(row_elements), NO_KEYS, np.empty(0, np.int64), 0, 0)

    @property
    def row_elements(self) -> int:
        """Elements of a row."""
        return int(self.base.values.shape[1])

    def look_up(self, keys: Keys) -> tuple[Float32s, NDArray[np.bool_]]:
        """Return the rows of mixed keys in any order, and which of them are there; the others are zeros."""
        values = np.zeros((len(keys), self.row_elements), np.float32)
        present = np.zeros(len(keys), np.bool_)
        for block in (self.base, self.overlay):
            places, found = found_among(keys, block.keys)
            at = places[found]
            values[found] = np.where(block.there[at][:, None], block.values[at], np.float32(0))
            present[found] = block.there[at]
        return values, present

    def with_change(self, change: RowChange, number: int) -> PublishedRows:
        """Return the table after a change, whose number is greater than those before."""
        if not len(change.keys) and not len(change.gone):
            return self
        touched = np.sort(np.concatenate([change.keys, change.gone]), kind="stable")  # of two runs: a merge
        had = self.look_up(touched)[1]
        rows = self.rows + len(change.keys) - int(had.sum())
        lost = change.gone[self.look_up(change.gone)[1]]
        kept = self.overlay.taken(~found_among(self.overlay.keys, touched)[1])
        overlay = _sorted_blocks(kept, self._overlaid(change, number))
        still = ~found_among(self.gone, touched)[1]
        again = found_among(self.gone, change.gone)[1]
        gone = np.concatenate([self.gone[still | again], lost])
        gone_changed = np.concatenate([self.gone_changed[still | again], np.full(len(lost), number, np.int64)])
        order = np.argsort(gone, kind="stable")
        changed = replace(self, overlay=overlay, gone=gone[order], gone_changed=gone_changed[order], rows=rows)
        return changed._compact()

    def replaced(self, whole: PublishedRows, number: int) -> PublishedRows:
        """Return the table with the rows of another one, in which bit-identical rows count as unchanged."""
        new = whole.all_rows()
        old = self.all_rows()
        places, found = found_among(new.keys, old.keys)
        same = found.copy()
        at = places[found]
        bits_equal = (new.values[found].view(np.uint32) == old.values[at].view(np.uint32)).all(axis=1)
        same[found] = bits_equal & (new.last_use[found] == old.last_use[at])
        lost = old.keys[~found_among(old.keys, new.keys)[1]]
        return self.with_change(RowChange(new.keys[~same], new.values[~same], new.last_use[~same], lost), number)

    def evicted(self, rules: RowRules, now: int) -> RowChange:
        """Return the change that removes the rows which a table's rules end at time `now`."""
        keys = [NO_KEYS]
        if rules.ends_rows:
            for block, hidden in ((self.base, self.overlay.keys), (self.overlay, NO_KEYS)):
                some = block.keys[block.there & evicted(rules, now, block.last_use, block.values)]
                keys.append(some[~found_among(some, hidden)[1]])
        return RowChange(NO_KEYS, self.base.values[:0], self.base.last_use[:0], np.sort(np.concatenate(keys)))

    def since(self, number: int) -> tuple[Keys, Float32s, Keys] | None:
        """Return keys and rows that changed after a change, and the keys that lost their row; None if unknown."""
        if number < self.floor:
            return None
        parts = []
        for block, hidden in ((self.base, self.overlay.keys), (self.overlay, NO_KEYS)):
            some = block.taken((block.changed > number) & block.there)
            parts.append(some.taken(~found_among(some.keys, hidden)[1]))
        rows = _sorted_blocks(*parts)
        return rows.keys, rows.values, self.gone[self.gone_changed > number]

    def forgetting(self) -> PublishedRows:
        """Return the table without the record of keys that lost their row, which only a server needs."""
        return replace(self, gone=NO_KEYS, gone_changed=np.empty(0, np.int64))

    def all_rows(self) -> Block:
        """Return all rows."""
        if not len(self.overlay.keys):
            return self.base
        kept = self.base.taken(~found_among(self.base.keys, self.overlay.keys)[1])
        return _sorted_blocks(kept, self.overlay.taken(self.overlay.there))

    def _overlaid(self, change: RowChange, number: int) -> Block:
        hiding = change.gone[found_among(change.gone, self.base.keys)[1]]
        keys = np.concatenate([change.keys, hiding])
        none = np.zeros((len(hiding), self.row_elements), np.float32)
        order = np.argsort(keys, kind="stable")
        return Block(
            keys,
            np.concatenate([change.values, none]),
            np.concatenate([change.last_use, np.zeros(len(hiding), np.uint32)]),
            np.full(len(keys), number, np.int64),
            np.arange(len(keys)) < len(change.keys),
        ).taken(order)

    def _compact(self) -> PublishedRows:
        compact = self
        if len(self.overlay.keys) > max(OVERLAY_ROWS_MIN, len(self.base.keys) // 8):
            compact = replace(compact, base=self.all_rows(), overlay=_no_rows(self.row_elements))
        if len(compact.gone) > max(GONE_KEYS_MIN, compact.rows):
            floor = int(np.sort(compact.gone_changed)[len(compact.gone) // 2])
            kept = compact.gone_changed > floor
            compact = replace(compact, gone=compact.gone[kept], gone_changed=compact.gone_changed[kept], floor=floor)
        return compact


def _no_rows(row_elements: int) -> Block:
    return Block(
        NO_KEYS,
        np.empty((0, row_elements), np.float32),
        np.empty(0, np.uint32),
        np.empty(0, np.int64),
        np.empty(0, np.bool_),
    )


def _sorted_blocks(some: Block, others: Block) -> Block:
    """Return the rows of two blocks that have no key in common."""
    if not len(some.keys) or not len(others.keys):
        return some if len(some.keys) else others
    pairs: Iterable[Any] = zip(some, others, strict=True)
    both = Block(*(np.concatenate(pair) for pair in pairs))
    return both.taken(np.argsort(both.keys, kind="stable"))


DIGEST_BYTES = 16


class BucketDigests:
    """Digests of buckets [first, stop), whose rows are added piece by piece in the order of their keys."""

    def __init__(self, first: int, stop: int) -> None:
        self._first, self._stop = first, stop
        self._of: dict[int, tuple[hashlib.blake2b, ...]] = {}

    def add(self, keys: Keys, last_use: NDArray[np.uint32], values: Float32s) -> None:
        """Add rows."""
        buckets, begins = np.unique(buckets_of(keys), return_index=True)
        bounds = itertools.pairwise([*begins.tolist(), len(keys)])
        for bucket, (begin, stop) in zip(buckets.tolist(), bounds, strict=True):
            if bucket not in self._of:
                self._of[bucket] = tuple(hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(3))
            parts = (keys[begin:stop], "<u8"), (last_use[begin:stop], "<u4"), (values[begin:stop], "<f4")
            for of, (part, dtype) in zip(self._of[bucket], parts, strict=True):
                of.update(np.ascontiguousarray(part, dtype).data)

    def digests(self) -> Sequence[bytes]:
        """Return the digest of each bucket; empty: it has no row."""
        return [self._digest(bucket) for bucket in range(self._first, self._stop)]

    def _digest(self, bucket: int) -> bytes:
        if bucket not in self._of:
            return b""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for of in self._of[bucket]:
            whole.update(of.digest())
        return whole.digest()
