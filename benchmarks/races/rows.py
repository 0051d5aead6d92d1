"""Rows of the races' tables: the times of two contestants in turns, their ratio, and its target.

Pure. Called by every race.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.tables import table

TARGETS: Mapping[tuple[str, str, str], float] = {
    ("same host", "64 MiB", "TensorFlow"): 5.0,
    ("same host", "64 MiB", "PyTorch RPC"): 4.0,
    ("same host", "64 MiB", "Ray"): 4.0,
    ("same host", "4 MiB", "TensorFlow"): 5.0,
    ("same host", "1 MiB", "TensorFlow"): 5.0,
    ("across TCP", "64 MiB", "TensorFlow"): 2.0,
    ("across TCP", "64 MiB", "PyTorch RPC"): 1.5,
    ("across TCP", "64 MiB", "PyTorch RPC (TCP)"): 1.5,
    ("across TCP", "4 MiB", "TensorFlow"): 2.0,
    ("across TCP", "1 MiB", "TensorFlow"): 2.0,
    ("across gRPC", "64 MiB", "TensorFlow"): 1.0,
    ("across gRPC", "4 MiB", "TensorFlow"): 1.0,
    ("across gRPC", "1 MiB", "TensorFlow"): 1.0,
    ("scheduling", "empty step", "TensorFlow"): 4.0,
    ("training", "2 shards", "TensorFlow"): 2.5,
}
"""By race, size and peer: the target for our speed relative to the peer's."""


@dataclass(frozen=True)
class Row:
    """A comparison of two contestants."""

    # race, size: the operation.
    race: str
    size: str
    # ours, peer: the contestants: our transport or setting, and the peer.
    ours: str
    # ours_ms, peer_ms: medians over the rounds, in milliseconds.
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float  # `peer_ms / ours_ms`: how many times faster we are
    # ratio_low, ratio_high: range of the ratios of single rounds.
    ratio_low: float
    ratio_high: float
    rounds: int  # number of rounds
    target: float | None  # target of `ratio`
    reached: bool | None  # whether `ratio` reaches it


def compared(
    race: str, size: str, ours: tuple[str, Sequence[float]], peer: tuple[str, Sequence[float]], case: str = ""
) -> Row:
    """Return the row of two contestants who took turns.

    Parameters
    ----------
    race, size : str
        The operation; with the peer's name, the key of the target.
    ours, peer : (name, sequence of float)
        Name, and the milliseconds of each round: equally many; equal positions were measured next to each other.
    case : str
        Shown after the size in the table; targets do not depend on it.
    """
    (our_name, our_ms), (peer_name, peer_ms) = ours, peer
    single = [theirs / mine for mine, theirs in zip(our_ms, peer_ms, strict=True)]
    ratio = statistics.median(peer_ms) / statistics.median(our_ms)
    target = TARGETS.get((race, size, peer_name))
    return Row(
        race,
        f"{size}, {case}" if case else size,
        our_name,
        statistics.median(our_ms),
        peer_name,
        statistics.median(peer_ms),
        ratio,
        min(single),
        max(single),
        len(single),
        target,
        None if target is None else ratio >= target,
    )


def markdown(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table."""
    header = ["race", "size", "ours", "ms", "peer", "ms", "ratio (single rounds)", "target", "reached"]
    lines = [
        [
            row.race,
            row.size,
            row.ours,
            milliseconds(row.ours_ms),
            row.peer,
            milliseconds(row.peer_ms),
            f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})",
            "" if row.target is None else f"{row.target:g}",
            "" if row.reached is None else "yes" if row.reached else "no",
        ]
        for row in rows
    ]
    return table(header, lines)


def milliseconds(value_ms: float) -> str:
    """Return milliseconds with three significant digits."""
    return f"{value_ms:.3g}" if value_ms < 1000 else f"{value_ms:,.0f}"


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows for a JSON file, rounded to four significant digits."""
    return [{key: _rounded(value) for key, value in asdict(row).items()} for row in rows]


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
