"""The pages: links lead to files and headings that exist, the README is short, the site builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for page in ROOT.glob("docs/**/*.md") if page.parent != ROOT / "docs" / "root")]
)
README_LINES_MAX = 150
SITE_MAX_S = 100.0
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
DOTTED = re.compile(r"`(parashard(?:_server|_worker|_coordinator)?(?:\.[A-Za-z_]\w*)+)")
PACKAGE_FOLDERS = (ROOT, ROOT / "ps_server", ROOT / "worker", ROOT / "coordinator")
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*$", re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the heading of each relative link of a page, outside its code."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            yield path, heading


def headings_of(page: Path) -> set[str]:
    """Return the headings of a page as GitHub names them in links."""
    titles = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for path, heading in links_of(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not heading or heading in headings_of(target), f"{path}#{heading}"


def test_links_are_found():
    assert ("docs/guarantees.md", "") in set(links_of(ROOT / "README.md"))
    assert "exit-codes" in headings_of(ROOT / "docs" / "guarantees.md")


def test_dotted_names_in_pages_are_in_the_code():
    """A module, a name in one, or a text of the code such as a span's attribute."""
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for folder in PACKAGE_FOLDERS
        for path in folder.glob("parashard*/**/*.py")
    }

    def is_there(name: str) -> bool:
        module, _, last = name.rpartition(".")
        defined = name in modules or re.search(rf"\b{last}\b", modules.get(module, ""))
        return bool(defined) or any(name in text for text in modules.values())

    names = {(name, page.name) for page in PAGES for name in DOTTED.findall(page.read_text())}
    assert "parashard_worker.worker.Worker" in {name for name, _ in names}
    assert sorted(named for named in names if not is_there(named[0])) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs `make docs-site` once: NOT CHECKED")
@pytest.mark.timeout(SITE_MAX_S + 20)
def test_the_site_builds_without_a_warning(tmp_path):
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-b", "html", "-d", tmp_path / "trees"]
    ran = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=SITE_MAX_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    security = (tmp_path / "site" / "runbooks" / "ParashardCertificateExpiresSoon.html").read_text()
    assert 'href="../root/security.html#renewal"' in security  # a link to a page outside docs/ stays in the site
    results = (tmp_path / "site" / "tracing.html").read_text()
    assert re.search(r'href="_downloads/\w+/tracing\.md"', results)
    assert "loss_and_gradients" in (tmp_path / "site" / "api.html").read_text()
