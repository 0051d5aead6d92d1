"""Damages checkpoints: whatever happens to a file is detected, or harmless, and the checkpoint before it is found.

`PYTHONPATH=.:tests python tests/damage/checkpoint_damage.py --flips 10000` prints the figures. The tests call the same
functions.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, job_name
from parashard.checkpoints.state import newest_verified, whole_model
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import Variable
from support.checkpoint_cases import RUN, model_of, slots_of, state_of, write_job, write_plan, write_state
from support.store_fakes import MemoryStore

PAGE_BYTES = 4096
ROWS = 520
VARIABLES = {"weight": Variable("weight", (ROWS, 4))}
# Rows in turns, so that each file, the manifest too, is longer than a page.
PLAN = Plan(1, VARIABLES, tuple(tuple(Partition("weight", i, i + 1) for i in range(s, ROWS, 2)) for s in range(2)))
OLD, NEW = CheckpointId(1, 0, 1, 1), CheckpointId(1, 0, 1, 2)
FILES = (NEW.manifest_name, f"{NEW.folder}/variables-0.safetensors", f"{NEW.folder}/slots-0.safetensors", job_name(2))

Figures = Counter[str]


class Damage:
    """Two drained checkpoints, of which a file of the newer one is damaged again and again.

    `figures` counts what was damaged as "detected" or "harmless"; anything else is an AssertionError.
    """

    def __init__(self) -> None:
        self.figures: Figures = Counter()
        self._store = MemoryStore()
        self._catalogue = Catalogue(self._store)
        write_plan(self._store, PLAN)
        for number in (1, 2):
            ids = [CheckpointId(1, shard, 1, number) for shard in range(2)]
            parts = [
                write_state(self._store, PLAN, id_, state_of(PLAN, id_.shard, number), file_bytes=1 << 20)
                for id_ in ids
            ]
            write_job(self._store, number, parts)
        self._bits = {number: model_of(number, VARIABLES)["weight"] for number in (1, 2)}
        self._slot_bits = {number: slots_of(number, VARIABLES) for number in (1, 2)}

    def content(self, name: str) -> bytes:
        """Return a file as it was written."""
        return self._store.contents[name]

    def strike(self, name: str, content: bytes) -> None:
        """Put damaged bytes in place of a file, look what comes of it, and put the file back."""
        sound = self._store.contents[name]
        self._store.contents[name] = content
        try:
            detected = self._job_detects() if name == job_name(2) else self._shard_detects()
        finally:
            self._store.contents[name] = sound
        self.figures["detected" if detected else "harmless"] += 1

    def _shard_detects(self) -> bool:
        """Restore the shard, and export the drained checkpoint that the damaged file is part of."""
        state, manifest, skipped = newest_verified(self._catalogue, 1, 0)
        assert state is not None
        assert manifest is not None
        assert manifest.run_id == RUN
        found = CheckpointId.of(manifest)
        assert (found, [id_ for id_, _ in skipped]) in ((OLD, [NEW]), (NEW, []))
        for p, array in state.variables.items():
            assert array.tobytes() == self._bits[found.number][p.row_start].tobytes()
        for slot, arrays in state.slots.items():
            for p, array in arrays.items():
                assert array.tobytes() == self._slot_bits[found.number][slot]["weight"][p.row_start].tobytes()
        return found == OLD

    def _job_detects(self) -> bool:
        job = self._catalogue.newest_job_manifest()
        assert job is not None
        assert whole_model(self._store, job)["weight"].tobytes() == self._bits[job.number].tobytes()
        return job.number == 1


def truncate_files() -> Figures:
    """Cut each file at every page boundary and at every byte of its last 64."""
    damage = Damage()
    for name in FILES:
        content = damage.content(name)
        for length in {*range(0, len(content), PAGE_BYTES), *range(max(0, len(content) - 64), len(content))}:
            damage.strike(name, content[:length])
    return damage.figures


def flip_bits(flips: int, seed: int) -> Figures:
    """Flip one random bit of a random file, `flips` times."""
    damage, draw = Damage(), random.Random(seed)
    for _ in range(flips):
        name = draw.choice(FILES)
        content = bytearray(damage.content(name))
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        damage.strike(name, bytes(content))
    return damage.figures


def lose_pages(strikes: int, seed: int) -> Figures:
    """Damage random files as a crash of the machine does: a page of zeros, a page of another file, bytes appended."""
    damage, draw = Damage(), random.Random(seed)
    for _ in range(strikes):
        name, other = draw.choice(FILES), damage.content(draw.choice(FILES))
        content = damage.content(name)
        start = draw.randrange(0, len(content), PAGE_BYTES)
        stop = min(len(content), start + PAGE_BYTES)
        page = draw.choice([bytes(stop - start), other[start:stop]])
        damage.strike(name, draw.choice([content[:start] + page + content[stop:], content + page]))
    return damage.figures


def main() -> int:
    """Print the figures; an AssertionError is what must not happen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=10_000, help="number of bits to flip")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage")
    arguments = parser.parse_args()
    for what, figures in (
        ("truncated files", truncate_files()),
        ("flipped bits", flip_bits(arguments.flips, arguments.seed)),
        ("lost pages", lose_pages(arguments.flips // 10, arguments.seed)),
    ):
        sys.stdout.write(f"{what}: 0 of {figures.total()} were missed; {figures['harmless']} changed nothing\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
