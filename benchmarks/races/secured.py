"""What mutual TLS costs a push and a pull: our contestant with it and without, in turns, on loopback.

    python -m benchmarks.races.secured [--rounds N] [--write]

One process is the worker of all of them; each has a coordinator and a shard of its own. Beside the times stand what the
processor did at both ends, and what it must do at least: with TLS all that it does without, and AES-GCM at the rate of
`openssl speed` four times for each byte, as each of push and pull is encrypted at one end and decrypted at the other.
That on all cores without a pause is the least time that AES-GCM allows, where TLS is OpenSSL's: over TCP. Records and
system calls cost more: `bare_tls` is what two processes need that send these bytes there and back and do nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import seam
from benchmarks.races.bare_tls import there_and_back_ms
from benchmarks.races.ours import OurPushPull
from benchmarks.tables import load_before, spread, table, write
from benchmarks.training import clean_up_when_ended
from parashard.process.resources import EVERY_STEP, cores, keep_freed_memory
from parashard.security.certs import issue, make_authority
from parashard.security.identity import Identity, Role

REPEATS = {1: 100, 16: 10, 64: 5}
"""Pushes and pulls of a round, by size in MiB."""
TARGETS = {"tcp": 1.25, "grpc": 1.2}
CIPHER = "aes-256-gcm"  # the preference of both sides of a stream
RECORD_BYTES = 16 << 10
CRYPTED = 4  # encryptions and decryptions of a byte that is pushed and pulled
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (default: %(default)s)")
    parser.add_argument("--transports", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--sizes-mib", nargs="+", type=int, default=list(REPEATS), metavar="MIB")
    parser.add_argument("--write", action="store_true", help="write secured.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    keep_freed_memory(EVERY_STEP)  # as a worker does
    busy = load_before(os.getloadavg()[0])
    rate = aes_gcm_bytes_per_s()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_authority(folder / "ca", valid_days=1)
        issue(folder / "ca", folder / "tls", [Identity(role, "bench") for role in Role], valid_days=1)
        for transport in arguments.transports:
            for size_mib in arguments.sizes_mib:
                rows.append(measured(transport, size_mib, folder / "tls", arguments.rounds))
                print(section(rows[-1:], rate), flush=True)
    if arguments.write:
        sections = {"Inside mutual TLS and without": f"{busy} {section(rows, rate)}"}
        write("secured", sections, {"rows": rows, "aes_gcm_bytes_per_s": rate})


def measured(transport: str, size_mib: int, tls_dir: Path, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of push and pull of each round, inside TLS and without, and those of the processor."""
    settings = [f'cluster.transport="{transport}"']
    gradient = seam.gradient_of((size_mib << 20) // 4)
    repeats = REPEATS.get(size_mib, 5)
    row: dict[str, Any] = {"transport": transport, "size_mib": size_mib, "repeats": repeats}
    row["bare_ms"] = [there_and_back_ms(tls_dir, size_mib << 20, repeats) for _ in range(rounds)]
    with ExitStack() as stack:
        contestants = {"tls": OurPushPull(settings, tls_dir), "off": OurPushPull(settings)}
        for name, contestant in contestants.items():
            stack.callback(contestant.close)
            contestant.open(gradient)
            row |= {f"{name}_ms": [], f"{name}_cpu_ms": []}
        for number in range(rounds):
            for name in sorted(contestants, reverse=number % 2 == 0):
                took_ms, cpu_ms = turn(contestants[name], repeats)
                row[f"{name}_ms"].append(took_ms)
                row[f"{name}_cpu_ms"].append(cpu_ms)
        for contestant in contestants.values():
            pushes = rounds * (seam.WARM_UPS + repeats)
            seam.check(np.zeros_like(gradient), contestant.pull(), gradient, pushes)
    return row


def turn(contestant: seam.PushPull, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a push and a pull, and the mean of all processes' cores."""
    for _ in range(seam.WARM_UPS):
        contestant.push()
        contestant.pull()
    before_s = processor_s()
    times, _ = seam.PushPull.timed(contestant, repeats)
    return statistics.median(times["both_ms"]), 1000 * (processor_s() - before_s) / repeats


def processor_s() -> float:
    """Return the CPU seconds of this process and of all that it has started and not reaped."""
    return time.process_time() + sum(_ticks(pid) for pid in _children(os.getpid())) / TICKS_PER_S


def _children(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime of proc(5), which come 11 after the state


def aes_gcm_bytes_per_s() -> float | None:
    """Return how fast one core encrypts records by `openssl speed`; None without that program."""
    if shutil.which("openssl") is None:
        return None
    words = ["openssl", "speed", "-mr", "-seconds", "1", "-bytes", str(RECORD_BYTES), "-evp", CIPHER]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    return float(next(line for line in said.splitlines() if line.startswith("+F:")).rpartition(":")[2])


def least_ratio(row: dict[str, Any], rate: float) -> float:
    """Return how many times as long push and pull take at least inside TLS, by `rate` bytes a second of AES-GCM."""
    aes_ms = 1000 * CRYPTED * (row["size_mib"] << 20) / rate
    least_ms: float = (statistics.median(row["off_cpu_ms"]) + aes_ms) / cores()
    return max(1.0, least_ms / statistics.median(row["off_ms"]))


def section(rows: Sequence[dict[str, Any]], rate: float | None) -> str:
    """Return the Markdown table: how many times as long push and pull take inside TLS."""
    header = [
        "push + pull",
        "off, ms",
        "mTLS, ms",
        "bare TLS, ms",
        "ratio of the medians",
        "ratio (single rounds)",
        "target",
        "least possible",
    ]
    lines = []
    for row in rows:
        off_ms, tls_ms = row["off_ms"], row["tls_ms"]
        single = [inside / without for inside, without in zip(tls_ms, off_ms, strict=True)]
        by_openssl = row["transport"] == "tcp" and rate is not None
        lines.append(
            [
                f"{row['size_mib']} MiB, {row['transport']}",
                f"{statistics.median(off_ms):.2f}",
                f"{statistics.median(tls_ms):.2f}",
                f"{statistics.median(row['bare_ms']):.2f}",
                f"{statistics.median(tls_ms) / statistics.median(off_ms):.2f}",
                spread(single),
                f"{TARGETS[row['transport']]:g}",
                f"{least_ratio(row, rate):.2f}" if by_openssl and rate is not None else "not known",
                f"{statistics.median(row['off_cpu_ms']):.2f}",
                f"{statistics.median(row['tls_cpu_ms']):.2f}",
            ]
        )
    told = "not measured: no `openssl`" if rate is None else f"{rate / 1e9:.2f} GB/s on one core (`openssl speed`)"
    return f"{ssl.OPENSSL_VERSION}, {CIPHER}: {told}.\n\n" + table(
        [*header, "processor off, ms", "processor mTLS, ms"], lines
    )


if __name__ == "__main__":
    main()
