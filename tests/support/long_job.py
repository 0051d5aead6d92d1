"""LongJob: an example as a job that is not over before a test lets it end, however quick the machine.

What a test does to a running job must find it running. So the steps after the first ones take a second each
(`long_model.py`), and there are so many of them that the test itself is over first, until it says that they may be
quick. Weights, steps and reports are those of the example.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = Path(__file__).with_name("long_model.py")


class LongJob:
    """A job file in a folder, its model beside it, and how far its steps are quick.

    Parameters
    ----------
    folder : Path
        Where both are written.
    example : str
        ledger.toml, row_ledger.toml or digits.toml.
    quick_until : int
        This step and those after it take a second each.
    text : str, optional
        The example, with whatever a test has changed in it.
    """

    def __init__(self, folder: Path, example: str, quick_until: int, text: str | None = None) -> None:
        text = text or (EXAMPLES / example).read_text()
        text, found = re.subn(r'^kind = "(ledger|mlp|row_ledger)"', r'kind = "long_model:\1"', text, flags=re.M)
        assert found == 1
        self.file = str(folder / example)
        self._quick_until = folder / "quick-until"
        self.quick_until(quick_until)
        shutil.copyfile(MODEL, folder / MODEL.name)
        Path(self.file).write_text(text.replace("learning_rate = -1.0", "learning_rate = 1.0"))

    def quick_until(self, step: int) -> None:
        """Let steps before this one be quick, from now on."""
        written = self._quick_until.with_suffix(".new")
        written.write_text(str(step))
        os.replace(written, self._quick_until)

    def let_end(self) -> None:
        """Let all steps be quick."""
        self.quick_until(sys.maxsize)
