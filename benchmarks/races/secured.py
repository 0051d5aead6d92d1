"""What mutual TLS costs a push and a pull: our contestant with it and without, in turns, on loopback.

    python -m benchmarks.races.secured [--rounds N]

One process is the worker of all of them; each has a coordinator and a shard of its own. Also the mTLS section of
`benchmarks.races.promises`, which calls it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers import seam
from benchmarks.races.ours import OurPushPull
from benchmarks.races.rows import Row, compared
from benchmarks.tables import table
from parashard.security.certs import issue, make_authority
from parashard.security.identity import Identity, Role

TRANSPORTS = ("tcp", "grpc")
SIZES_MIB = (1, 16)
REPEATS = 10


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (default: %(default)s)")
    print(section(measured(parser.parse_args().rounds)))


def measured(rounds: int) -> list[Row]:
    """Return, for each transport and size, push and pull inside TLS beside the same without: the median of a round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_authority(folder / "ca", valid_days=1)
        issue(folder / "ca", folder / "tls", [Identity(role, "bench") for role in Role], valid_days=1)
        return [
            _compared(transport, size_mib, folder / "tls", rounds) for transport in TRANSPORTS for size_mib in SIZES_MIB
        ]


def _compared(transport: str, size_mib: int, tls_dir: Path, rounds: int) -> Row:
    settings = [f'cluster.transport="{transport}"']
    with ExitStack() as stack:
        answers = []
        for contestant in (OurPushPull(settings, tls_dir), OurPushPull(settings)):
            stack.callback(contestant.close)
            answers.append(seam.push_pull_answers(contestant))
        request = {"size_bytes": size_mib << 20, "repeats": REPEATS}
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for own, answer in zip(times, answers, strict=True):
                own.append(sorted(answer(request)["both_ms"])[REPEATS // 2])
    return compared("promises", f"{size_mib} MiB, {transport}", ("mTLS", times[0]), ("off", times[1]))


def section(rows: Sequence[Row]) -> str:
    """Return the Markdown table: how many times as long push and pull take inside TLS."""
    lines = [[row.size, f"{row.ours_ms:.2f}", f"{row.peer_ms:.2f}", f"{row.ours_ms / row.peer_ms:.2f}"] for row in rows]
    return table(["push + pull", "mTLS, ms", "off, ms", "relative to off"], lines)


if __name__ == "__main__":
    main()
