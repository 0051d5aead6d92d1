"""How Sphinx makes a site of these pages: `make docs-site` writes it to build/docs, and any warning fails it.

The pages are read on GitHub, too, so their links are plain relative paths. Two kinds of them leave this folder, and
`adapt_links` adapts both: a page such as SECURITY.md is included by a page in `root/`; any other Markdown file, such as
a table of results, is offered as a download. Files that are not Markdown need no help: MyST offers them as downloads.
"""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INCLUDED = {f"{page.stem.upper()}.md": f"/root/{page.name}" for page in sorted((HERE / "root").glob("*.md"))}
LINK_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([\w./-]+\.md)(#[^)]*)?\)")
"""Text, the way up, the path from there, the heading."""

project = "parashard"
version = release = version_of("parashard")
project_copyright = "the parashard contributors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links to headings are written as GitHub names them

html_theme = "pydata_sphinx_theme"
html_title = "parashard"
html_show_sourcelink = False
html_sidebars: dict[str, list[str]] = {"getting-started": []}  # a section of one page
html_theme_options: dict[str, Any] = {"navbar_align": "left", "show_toc_level": 2, "navigation_with_keys": False}

default_role = "code"  # docstrings write code between single backticks
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "jax", "keras"]  # a build needs no framework
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = False
napoleon_use_param = False  # types of numpydoc are prose ("array of float32, shape (n,)"), not names to link
napoleon_use_rtype = False

nitpicky = True
nitpick_ignore_regex = [
    # Names of Python, NumPy and pydantic in annotations: their inventories lie on the network, which a build needs not.
    (r"py:.*", r"(?!parashard\.).*"),
    # Annotations name types of modules that are no part of the reference for Python.
    (
        r"py:.*",
        r"parashard\.(checkpoints\.encoding|data\.columns|frozen_model|models\.due_rows|models\.evaluation|plan\.embedding|plan\.row_rules|plan\.schedules|security\.credentials|store)\..*",
    ),
    (r"py:.*", r"parashard\..*\._\w+"),
]


def adapt_links(app: Any, name: str, source: list[str]) -> None:
    """Rewrite links from a page of this folder to Markdown files outside it."""

    def adapted(link: re.Match[str]) -> str:
        text, up, path, heading = link[1], link[2], link[3], link[4] or ""
        target = ((HERE / f"{name}.md").parent / up / path).resolve()
        if target.is_relative_to(HERE):
            return link[0]
        if target.parent == HERE.parent and target.name in INCLUDED:
            return f"[{text}]({INCLUDED[target.name]}{heading})"
        return f"{{download}}`{text} <{up}{path}>`"

    source[0] = LINK_OUTSIDE.sub(adapted, source[0])


def escape_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep the star of `(n, *input_shape)` or "stats/*" in a docstring from beginning emphasis; before napoleon."""
    lines[:] = [re.sub(r"(?<![\w`*\\])\*(?=[\w/\"])", r"\\*", line) for line in lines]


def setup(app: Any) -> None:
    """Register the hooks."""
    app.connect("source-read", adapt_links)
    app.connect("autodoc-process-docstring", escape_stars, priority=400)
