"""Where the time of push and pull goes: `python -m benchmarks.profile [--write]`.

Runs one worker and one shard as race 1 does, lets `perf` sample both processors once arrays and connections are warm,
and sorts the samples by what the code was doing. Needs Linux's `perf`, and the right to sample the kernel.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.races.ours import OurPushPull
from benchmarks.races.push_pull import MIB, settings_of
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended

CASES = (("shm", 64), ("tcp", 64), ("tcp", 4))
WARM_ROUNDS = 20
SAMPLES_PER_S = 4000
PERF_END_S = 30.0  # for writing its samples
CLASSES = {
    "idle: nothing to run": r"swapper .*(halt|idle|mwait)",
    "copies between memory of processes": r"\bmemmove|\bmemcpy|__mem(move|cpy)_",
    "copies into and out of sockets": r"_copy_(from|to)_iter|copyin|copyout|copy_user|skb_copy",
    "Python": r"libpython|\.cpython-|upb",
    "optimizer and check of values": r"\[JIT\]|perf-\d+\.map",
    "interrupts, waking and switching threads": r"_raw_spin_unlock_irqrestore|spin_lock_slowpath|finish_task_switch|"
    r"schedul|ttwu|wake|futex|pick_|dequeue|enqueue|swapper",
    "TCP": r"tcp|skb|sock|\bip_|__ip_|softirq|net_|dev_|loopback|page_frag|free_frozen|alloc_pages|get_page|__free|"
    r"rmqueue|check_object_size|kmem|kfree|slab",
}
OTHER = "everything else"


def shares(lines: Iterable[str]) -> dict[str, float]:
    """Return the share of all samples in each class of `CLASSES`; a sample belongs to the first class that fits.

    Parameters
    ----------
    lines : iterable of str
        As `perf report --fields=overhead,comm,dso,symbol` prints them, in percent.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        share, _, rest = line.strip().partition("% ")
        if not rest or line.startswith("#"):
            continue
        kind = next((name for name, pattern in CLASSES.items() if re.search(pattern, rest)), OTHER)
        found[kind] += float(share)
    total = sum(found.values())
    if not total:
        sys.exit("benchmarks.profile: perf has no samples")
    return {name: found[name] / total for name in (*CLASSES, OTHER)}


def profiled(transport: str, mib: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Return the mean milliseconds of a push and a pull while `perf` samples, and the shares of the samples."""
    contestant = OurPushPull(settings_of(transport))
    with tempfile.TemporaryDirectory() as folder:
        samples = str(Path(folder) / "samples")
        try:
            contestant.open(np.full(mib * MIB // 4, 0.5, np.float32))
            for _ in range(WARM_ROUNDS):
                contestant.push()
                contestant.pull()
            record = ["perf", "record", "-q", "-a", "-e", "cpu-clock", "-F", str(SAMPLES_PER_S), "-o", samples]
            with sampling(record):
                begin_s, rounds = time.perf_counter(), 0
                while time.perf_counter() < begin_s + seconds:
                    contestant.push()
                    contestant.pull()
                    rounds += 1
                took_s = time.perf_counter() - begin_s
        finally:
            contestant.close()
        report = ["perf", "report", "-i", samples, "--stdio", "--no-children", "--fields=overhead,comm,dso,symbol"]
        said = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    return took_s / rounds * 1e3, shares(said.splitlines())


@contextmanager
def sampling(record: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Let `perf record` run; it ends with the context, whatever happens in it."""
    perf = subprocess.Popen(record, stderr=subprocess.PIPE, text=True)
    try:
        yield perf
        if perf.poll() is not None:
            _, said = perf.communicate()
            sys.exit(f"benchmarks.profile: perf ended with {perf.returncode}: {said.strip()}")
    finally:
        perf.terminate()  # it writes its samples and ends; SIGINT may be ignored by inheritance
        try:
            perf.communicate(timeout=PERF_END_S)
        except subprocess.TimeoutExpired:
            perf.kill()
            perf.communicate()


def main() -> None:
    """Profile every case, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each case (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write profile.json and profile.md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    if shutil.which("perf") is None:
        sys.exit("benchmarks.profile: there is no `perf` here (Debian: linux-perf)")
    found = {f"{t}, {mib} MiB": profiled(t, mib, arguments.seconds) for t, mib in CASES}
    rows = [[kind, *(f"{share[kind]:.0%}" for _, share in found.values())] for kind in (*CLASSES, OTHER)]
    rows.append(["a push and a pull, while sampled", *(f"{ms:.2f} ms" for ms, _ in found.values())])
    text = table(["share of the samples of all processors", *found], rows)
    print(text)
    if arguments.write:
        figures = {case: {"push_pull_ms": ms, "shares": share} for case, (ms, share) in found.items()}
        write("profile", {"Where push and pull spend their time": text}, {"cases": figures})


if __name__ == "__main__":
    main()
