"""A browser watches a real run whose coordinator hangs and is replaced: the page says so, and goes on with the next."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.browser import skip_without_browser
from support.cluster_run import DEADLINE_S, ClusterRun, sets
from support.long_job import LongJob

CHROMIUM = skip_without_browser()

from playwright.sync_api import expect, sync_playwright  # noqa: E402  # after the skip

QUICK = 150
PATIENCE_MS = 1000 * DEADLINE_S


def told(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=DEADLINE_S) as answer:
        return json.loads(answer.read())


def test_a_page_outlives_the_coordinator(start_run: Callable[..., ClusterRun], tmp_path: Path) -> None:
    job = LongJob(tmp_path, "digits.toml", QUICK)
    run = start_run(job.file, *sets(cluster__silence_s=8.0, evaluation__every_epochs=1))
    status = run.until(lambda status: status.steps_complete > QUICK, "steps are slow")
    url = f"http://{status.http_address}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page()
        expect.set_options(timeout=PATIENCE_MS)
        page.goto(url)
        expect(page.locator("#heading")).to_have_text("digits: running")
        steps = page.get_by_role("img", name="plot of steps,")
        expect(steps).to_have_accessible_name(re.compile("steps complete 1[0-9][0-9]$"))
        expect(page.get_by_role("img", name="plot of accuracy,")).to_be_visible()
        before = told(url, "history.json")

        run.kill("coordinator", "coordinator", signal.SIGSTOP)  # its launcher kills it for its silence
        expect(page.locator("#contact")).to_contain_text("has not answered since")
        expect(steps).to_be_visible()
        expect(page.locator("#contact")).to_be_hidden()
        expect(page.locator("#incomplete")).to_be_hidden()
        after = told(url, "history.json")
        assert after["coordinator"] == before["coordinator"] + 1
        first = before["columns"]["elapsed_s"][:2]
        assert after["columns"]["elapsed_s"][: len(first)] == first, "from history.jsonl"

        job.let_end()
        assert run.report()["coordinator_restarts"] == 1
        expect(page.locator("#contact")).to_contain_text("below is what it said last")
        expect(steps).to_be_visible()
        browser.close()
