"""Take the status page's pictures for docs/pictures: on a desktop, in the dark and on a phone.

    python tools/status_pictures.py [--output FOLDER]

Runs the digits job with three workers in a folder of its own, kills a worker and then a shard, and photographs the page
of its coordinator (Playwright and an installed Chromium).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
PARASHARD = Path(sys.executable).parent / "parashard"
SETTINGS = ("job.epochs=4000", "optimizer.learning_rate=0.00002", "checkpoint.every_s=5", "evaluation.every_epochs=100")
KILLS = ((40.0, "worker-1"), (75.0, "shard-0"))  # seconds after the page answers
SHOWN_AFTER_S = 90.0
DEADLINE_S = 60.0
COLOURS = 96  # of a picture: a third of the bytes, without a visible difference


class View(NamedTuple):
    """A browser's window."""

    name: str
    width: int
    height: int
    scheme: Any
    scale: float = 1.0


VIEWS = (
    View("desktop", 1280, 900, "light"),
    View("dark", 1280, 900, "dark"),
    View("phone", 390, 844, "light", 2.0),
)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run the job while the block runs; yields the address of its page."""
    shutil.copy(ROOT / "examples" / "digits.toml", folder)
    run_dir = folder / "run"
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command: list[str | Path] = [PARASHARD, "run", "digits.toml", "--workers", "3", "--run-dir", run_dir, *settings]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _page_of(run_dir)
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)


def _page_of(run_dir: Path) -> str:
    address, until_s = run_dir / "coordinator.json", time.monotonic() + DEADLINE_S
    while not address.exists():
        if time.monotonic() > until_s:
            sys.exit(f"{address}: not there after {DEADLINE_S:g} s")
        time.sleep(0.1)
    return f"http://{json.loads(address.read_text())['http']}/"


def photograph(chromium: str, url: str, view: View, path: Path) -> None:
    """Write a picture of the whole page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        window: Any = {"width": view.width, "height": view.height}
        page = browser.new_page(viewport=window, color_scheme=view.scheme, device_scale_factor=view.scale)
        page.goto(url)
        page.get_by_role("img", name="plot of accuracy,").wait_for(timeout=1000 * DEADLINE_S)
        page.wait_for_timeout(3000)  # the first answer after the plots' own begins
        page.screenshot(path=path, full_page=True)
        browser.close()
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    """Run the job, kill the processes in KILLS, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    output = parser.parse_args().output
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as url:
        began_s = time.monotonic()
        for after_s, process in KILLS:
            time.sleep(max(0.0, began_s + after_s - time.monotonic()))
            kill: list[str | Path] = [PARASHARD, "kill", Path(folder) / "run", process]
            subprocess.run(kill, check=True, capture_output=True, timeout=DEADLINE_S)
        time.sleep(max(0.0, began_s + SHOWN_AFTER_S - time.monotonic()))
        for view in VIEWS:
            photograph(chromium, url, view, output / f"status-{view.name}.png")


if __name__ == "__main__":
    main()
