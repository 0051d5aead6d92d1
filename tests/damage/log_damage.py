"""Random bit flips over a push log of three incarnations: `python tests/damage/log_damage.py --flips 10000`.

After each flip a replay must give the records that were written, bit for bit: all of them where the flipped bit does
not matter any more (another incarnation or the checkpoint has taken over), else those before the damage, which it must
name (P18).
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parashard_server.durability.write_ahead_log.log import WriteAheadLog, open_log
from parashard_server.durability.write_ahead_log.records import HEAD_BYTES, HEADER_BYTES, LogIdentity, LogRecord
from parashard_server.durability.write_ahead_log.replay import LogEnd, replay
from parashard_server.durability.write_ahead_log.segments import find_segments

IDENTITY = LogIdentity("run-1", "d" * 64, plan_version=1, shard=0)
RECORD_BYTES_MAX = 1 << 16
Content = tuple[int, int, bytes | None, bool, int | None, bytes]


def main() -> int:
    """Flip, print what was seen, and return the exit code."""
    parser = argparse.ArgumentParser(description="Flips random bits of a push log and replays it.")
    parser.add_argument("--flips", type=int, default=500, help="how many bits, one at a time")
    parser.add_argument("--seed", type=int, default=0, help="what the log and the bits are drawn from")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, violations = flip_log_bits(Path(folder), arguments.flips, arguments.seed)
    seen = ", ".join(f"{outcome} {times}" for outcome, times in sorted(outcomes.items()))
    sys.stdout.writelines(f"{line}\n" for line in [*violations, f"push log: {len(violations)} of {arguments.flips}"])
    sys.stdout.write(f"{seen} (seed {arguments.seed})\n")
    return int(bool(violations))


def flip_log_bits(folder: Path, flips: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Flip bits one at a time and replay; return how often each outcome came, and what should not have been."""
    draw = random.Random(seed)
    write_three_incarnations(folder, draw)
    sound = [contents(record) for record in replay(folder, IDENTITY, 0, RECORD_BYTES_MAX)]
    segments = find_segments(folder)
    before = {segment.path: segment.path.read_bytes() for segment in segments}
    bits = [(path, bit) for path, content in before.items() for bit in range(8 * len(content))]
    outcomes: Counter[str] = Counter()
    violations = []
    for _ in range(flips):
        path, bit = draw.choice(bits)
        from_position = draw.choice((0, 0, draw.randrange(len(sound) + 1)))
        changed = bytearray(before[path])
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        replaying = replay(folder, IDENTITY, from_position, RECORD_BYTES_MAX)
        found = [contents(record) for record in replaying]
        path.write_bytes(before[path])
        outcome, violation = judged(found, sound[from_position:], replaying.ended, path, bit // 8, before[path])
        outcomes[outcome] += 1
        if violation:
            violations.append(f"bit {bit} of {path.name}, replay from {from_position}: {violation}")
    return outcomes, violations


def judged(
    found: list[Content], expected: list[Content], end: LogEnd, path: Path, offset: int, content: bytes
) -> tuple[str, str]:
    """Return what a replay made of a flip at an offset of a file, and what is wrong with that, if anything."""
    if found != expected[: len(found)]:
        return "wrong", "a record that was never written"
    if end.reason == "end":
        return "harmless", "" if len(found) == len(
            expected
        ) else f"{len(expected) - len(found)} records lost in silence"
    damaged_at = max(start for start in record_starts(content) if start <= offset)
    if end.reason != "damage" or not end.place.startswith(f"{path}, byte {damaged_at}: "):
        return "misnamed", f"flipped in what begins at byte {damaged_at}, told {end}"
    return "detected", ""


def record_starts(content: bytes) -> Iterator[int]:
    """Yield where the header and each record of a sound segment begin."""
    yield 0
    start = HEADER_BYTES
    while start < len(content):
        yield start
        (payload_bytes,) = struct.unpack_from("<Q", content, start + 28)
        start += HEAD_BYTES + payload_bytes


def contents(record: LogRecord) -> Content:
    """Return a record as values that compare bit for bit."""
    gradient = None if record.gradient is None else record.gradient.tobytes()
    return record.position, record.step, gradient, record.skipped, record.staleness


def write_three_incarnations(folder: Path, draw: random.Random) -> None:
    """Write an incarnation of two segments that goes on after a second one took over, and a third."""
    zombie = open_log(folder, IDENTITY, 1, 0, fsync=False)
    write_records(zombie, 12, draw)
    zombie.roll()
    write_records(zombie, 8, draw)
    second = open_log(folder, IDENTITY, 2, zombie.position, fsync=False)
    write_records(second, 10, draw)
    write_records(zombie, 5, draw)
    third = open_log(folder, IDENTITY, 3, second.position, fsync=False)
    write_records(third, 10, draw)
    for log in (zombie, second, third):
        log.close()


def write_records(log: WriteAheadLog, records: int, draw: random.Random) -> None:
    """Append records of drawn content."""
    for _ in range(records):
        gradient = np.frombuffer(draw.randbytes(4 * draw.randrange(60)), "<f4") if draw.random() < 0.9 else None
        staleness = draw.choice((None, draw.randrange(100)))
        skipped = draw.random() < 0.1
        log.append(draw.randrange(10**6), gradient, staleness=staleness, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
