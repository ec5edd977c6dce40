"""Sphinx for `make docs`.

The sources are the repository's Markdown files where they lie, so a link works here and where the
files are read as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import tpkernels

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "tpkernels"
author = "The tpkernels authors"
copyright = author
release = version = tpkernels.__version__

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/**"]
exclude_patterns = [".*", "build", "dist", "csrc", "examples", "tests", "tpkernels", "*.egg-info"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
myst_heading_anchors = 3
default_role = "code"  # docstrings use single backticks, too
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"GroupLike": "GroupLike"}
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    # Types in signatures: inventories of other projects would need the network.
    (r"py:.*", r"(?!tpkernels\.).*"),
    (r"py:class", r"tpkernels\.(_C|nn\.(linear|packing|sharding)|planning)\..*"),
]

html_theme = "pydata_sphinx_theme"
html_title = "tpkernels"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
# Pages of one section need no sidebar of their own.
html_sidebars = {"docs/index": []}


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _leave_out_readme)
    app.connect("autodoc-process-docstring", _end_literals)


def _leave_out_readme(app: Sphinx, _: nodes.document) -> None:
    """Its links are checked; the site has a front page of its own."""
    app.env.metadata["README"]["orphan"] = True


def _end_literals(
    _: Sphinx, kind: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """``Plan``s: without a backslash reStructuredText does not see the end of that literal."""
    text = re.sub(r"(``.+?``)(\w)?", _ended, "\n".join(lines), flags=re.DOTALL)
    lines[:] = text.split("\n")


def _ended(literal: re.Match[str]) -> str:
    return literal[1] + (f"\\ {literal[2]}" if literal[2] else "")
