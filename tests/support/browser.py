"""A headless Chromium for tests of the status page, as Debian has it; Playwright drives it and downloads none."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def skip_without_browser() -> str:
    """Return the browser's path; skip the module, with the reason, where it or Playwright is missing."""
    pytest.importorskip("playwright", reason="NO TEST OF THE STATUS PAGE: playwright is not installed (the dev extra)")
    if CHROMIUM is None:
        pytest.skip("NO TEST OF THE STATUS PAGE: chromium is not installed", allow_module_level=True)
    return CHROMIUM
