"""Record the live view of `parashard run` and write docs/pictures/live.svg, an animation, and two stills beside it.

    python tools/live_picture.py [--output FOLDER]

Runs the digits job in pseudo terminals of 80, 100 and 120 columns, kills a worker and then a shard, and records
their screens (pyte, of the extra `docs`). `animated` and `still` are pure: screens to SVG.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import pyte

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
COMMAND = "parashard run digits.toml --set job.epochs=150 --set checkpoint.every_s=2"  # long enough for two kills
KILLS = ((2.0, "worker-0"), (5.0, "shard-1"))  # seconds after both workers are up
ROWS = {80: 26, 100: 24, 120: 24}
FRAME_S = 0.4
FRAME_MAX_S = 1.2  # a start is not shown at its full length
LAST_FRAME_S = 6.0
RUN_MAX_S = 120.0

CELL_WIDTH, LINE_HEIGHT, MARGIN, BAR_HEIGHT = 8.4, 18, 14, 30
PAPER, INK, DIM = "#11151c", "#d7dde6", "#8592a3"
COLOURS = {
    "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff", "cyan": "#76e3ea",
    "magenta": "#d2a8ff", "brightblack": DIM,
}  # fmt: skip


class Run(NamedTuple):
    """Neighbouring characters of one style in a row."""

    column: int
    text: str
    colour: str
    bold: bool


Row = tuple[Run, ...]
Screen = tuple[Row, ...]


class Frame(NamedTuple):
    """A screen of the terminal, and how long it was shown."""

    screen: Screen
    duration_s: float


# --- the terminal ---


class Terminal(pyte.Screen):
    """A screen of pyte that shows faint text (SGR 2), unknown to pyte, in grey."""

    def select_graphic_rendition(self, *attributes: int, **more: bool) -> None:
        super().select_graphic_rendition(*(90 if attribute == 2 else attribute for attribute in attributes), **more)


def screen_of(terminal: pyte.Screen) -> Screen:
    """Return the screen of a terminal."""
    rows = []
    for number in range(terminal.lines):
        cells = [terminal.buffer[number][column] for column in range(terminal.columns)]
        runs: list[Run] = []
        column = 0
        for (colour, bold), group in itertools.groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            text = "".join(cell.data for cell in group)
            if text.strip():
                runs.append(Run(column, text.rstrip(), COLOURS.get(colour, INK), bold))
            column += len(text)
        rows.append(tuple(runs))
    return tuple(rows)


def recorded(columns: int, folder: Path) -> list[Frame]:
    """Run the job in a terminal of this width, kill the processes in KILLS, and return the frames."""
    terminal = Terminal(columns, ROWS[columns])
    stream = pyte.ByteStream(terminal)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS[columns], columns, 0, 0))
    shutil.copy(ROOT / "examples" / "digits.toml", folder)
    parashard = Path(sys.executable).parent / "parashard"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(
        [parashard, *COMMAND.split()[1:]], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    frames: list[Frame] = []
    kills = list(KILLS)
    began_s = time.monotonic()
    up_s = None
    while _feed(stream, ours, FRAME_S):
        now_s = time.monotonic()
        if now_s - began_s > RUN_MAX_S:
            process.kill()
            sys.exit(f"{COMMAND}: not done after {RUN_MAX_S:g} s")
        frames.append(Frame(screen_of(terminal), FRAME_S))
        if up_s is None and all(any(line.startswith(f"worker-{n}") for line in terminal.display) for n in (0, 1)):
            up_s = now_s
        if kills and up_s is not None and now_s - up_s >= kills[0][0]:
            subprocess.run(
                [parashard, "kill", kills.pop(0)[1]], cwd=folder, check=True, capture_output=True, timeout=30
            )
    if process.wait(timeout=RUN_MAX_S) or kills:
        sys.exit(f"{COMMAND}: exit code {process.returncode}, kills left: {kills}")
    *shown, last = joined(frame for frame in frames if any(frame.screen))
    return [Frame(screen, min(duration_s, FRAME_MAX_S)) for screen, duration_s in shown] + [
        Frame(last.screen, LAST_FRAME_S)
    ]


def _feed(stream: pyte.ByteStream, source: int, duration_s: float) -> bool:
    """Feed a terminal the input of some time; return False if the other side has closed."""
    until_s = time.monotonic() + duration_s
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([source], [], [], left_s)[0]:
            break
        try:
            stream.feed(os.read(source, 1 << 16))
        except OSError:  # Linux's answer when the other side of a pseudo terminal has closed
            return False
    return True


def joined(frames: Iterable[Frame]) -> list[Frame]:
    """Return the frames with neighbours of the same screen merged."""
    return [
        Frame(screen, sum(frame.duration_s for frame in same))
        for screen, same in itertools.groupby(frames, key=lambda frame: frame.screen)
    ]


# --- the pictures ---


def still(screen: Screen, columns: int) -> str:
    """Return an SVG of one screen."""
    rows = "\n".join(_row(row, number * LINE_HEIGHT) for number, row in enumerate(screen) if row)
    return _page(columns, len(screen), "", rows)


def animated(frames: Sequence[Frame], columns: int, shown: int) -> str:
    """Return an SVG that loops over all frames; without animation it shows frame `shown`.

    The frames form a vertical strip that moves up by one frame at a time. Each distinct row is contained once.
    """
    height = len(frames[0].screen) * LINE_HEIGHT
    names: dict[Row, str] = {}
    places = []
    for number, (screen, _) in enumerate(frames):
        for line, row in enumerate(screen):
            if row:
                name = names.setdefault(row, f"r{len(names)}")
                places.append(f'<use href="#{name}" y="{number * height + line * LINE_HEIGHT}"/>')
    defined = "\n".join(f'<g id="{name}">{_row(row, 0)}</g>' for row, name in names.items())
    style = (
        f"#strip {{ animation: play {sum(frame.duration_s for frame in frames):g}s step-end infinite }}\n"
        f"@keyframes play {{ {' '.join(_stops(frames, height))} }}\n"
        "@media (prefers-reduced-motion: reduce) { #strip { animation: none } }"
    )
    strip = f'<g id="strip" transform="translate(0 {-shown * height})">\n{"".join(places)}\n</g>'
    return _page(columns, len(frames[0].screen), style, f"<defs>\n{defined}\n</defs>\n{strip}")


def _stops(frames: Sequence[Frame], height: int) -> Iterator[str]:
    total_s = sum(frame.duration_s for frame in frames)
    begins_s = 0.0
    for number, frame in enumerate(frames):
        yield f"{100 * begins_s / total_s:.3f}% {{ transform: translateY({-number * height}px) }}"
        begins_s += frame.duration_s


def _row(row: Row, top: int) -> str:
    texts = []
    for run in row:
        look = "" if run.colour == INK else f' fill="{run.colour}"'
        look += ' font-weight="bold"' if run.bold else ""
        place = (
            f'x="{run.column * CELL_WIDTH:g}" y="{top + LINE_HEIGHT - 5}" textLength="{len(run.text) * CELL_WIDTH:g}"'
        )
        texts.append(f"<text {place}{look}>{escape(run.text)}</text>")
    return "".join(texts)


def _page(columns: int, rows: int, style: str, content: str) -> str:
    inner_width, inner_height = columns * CELL_WIDTH, rows * LINE_HEIGHT
    width, height = inner_width + 2 * MARGIN, inner_height + BAR_HEIGHT + MARGIN
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"
  role="img">
<title>A terminal: the live view of {COMMAND}, while a worker and a shard are killed</title>
<style>
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
{style}
</style>
<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>
<text x="{MARGIN}" y="20" fill="{DIM}">$ {COMMAND}</text>
<svg x="{MARGIN}" y="{BAR_HEIGHT}" width="{inner_width:g}" height="{inner_height}" fill="{INK}">
{content}
</svg>
</svg>
"""


def telling(frames: Sequence[Frame]) -> int:
    """Return the index of the fullest frame among those with red text, which marks a process that is down."""
    red = [
        n for n, frame in enumerate(frames) if any(run.colour == COLOURS["red"] for row in frame.screen for run in row)
    ]
    if not red:
        sys.exit("no frame shows that a process is down: run it again")
    return max(red, key=lambda n: sum(map(bool, frames[n].screen)))


def main() -> None:
    """Record three runs, and write the pictures."""
    parser = argparse.ArgumentParser(description="Record the live view as pictures.")
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    output = parser.parse_args().output
    for columns in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            frames = recorded(columns, Path(folder))
            shown = telling(frames)
            name = "live.svg" if columns == 100 else f"live-{columns}.svg"
            picture = animated(frames, columns, shown) if columns == 100 else still(frames[shown].screen, columns)
            (output / name).write_text(picture)


if __name__ == "__main__":
    main()
