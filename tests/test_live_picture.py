"""The recorded terminal as SVG: what was shown, each frame for its time."""

import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyte", reason="needs `make docs-site` once: NOT CHECKED")
from tools.live_picture import DIM, INK, Frame, Run, Terminal, animated, joined, screen_of, still, telling

SVG = "{http://www.w3.org/2000/svg}"
TITLE = (Run(0, "digits <running>", INK, True),)
DOWN = (Run(0, "shard-1", "#ff7b72", False), Run(9, "down", "#ff7b72", False))
UP = (Run(0, "shard-1", INK, False),)


def texts(svg):
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_still_has_every_run_of_characters_at_its_column():
    svg = still((TITLE, (), DOWN), 80)
    assert texts(svg)[1:] == ["digits <running>", "shard-1", "down"]
    assert 'x="75.6"' in svg  # nine cells of 8.4


def test_the_strip_stands_at_each_frame_for_its_time_and_has_each_row_once():
    frames = [Frame((TITLE, UP), 1.0), Frame((TITLE, DOWN), 3.0)]
    svg = animated(frames, 80, telling(frames))
    assert "play 4s step-end infinite" in svg
    assert re.findall(r"([\d.]+)% \{ transform: translateY\((-?\d+)px\)", svg) == [("0.000", "0"), ("25.000", "-36")]
    assert texts(svg)[1:] == ["digits <running>", "shard-1", "shard-1", "down"]
    assert "translate(0 -36)" in svg  # where nothing moves, the frame that tells most


def test_frames_that_show_the_same_become_one():
    assert joined([Frame((UP,), 0.4), Frame((UP,), 0.4), Frame((DOWN,), 0.4)]) == [
        Frame((UP,), 0.8),
        Frame((DOWN,), 0.4),
    ]


def test_faint_text_of_a_terminal_is_grey():
    terminal = Terminal(20, 2)
    for character in "ab":
        terminal.draw(character)
    terminal.select_graphic_rendition(2)
    terminal.draw("c")
    assert screen_of(terminal) == ((Run(0, "ab", INK, False), Run(2, "c", DIM, False)), ())
