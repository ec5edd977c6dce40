"""Sphinx configuration for `make docs`.

Sphinx reads the Markdown files of the repository in place. Links therefore work on the site and in
the plain files.
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
default_role = "code"  # docstrings contain single backticks
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"GroupLike": "GroupLike"}
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    # Types in signatures: inventories of torch and Python would need the network.
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
# The front page needs no sidebar.
html_sidebars = {"docs/index": []}


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _hide_readme)
    app.connect("autodoc-process-docstring", _end_literals)


def _hide_readme(app: Sphinx, _: nodes.document) -> None:
    """Keep the README out of the navigation. Sphinx still checks its links."""
    app.env.metadata["README"]["orphan"] = True


def _end_literals(
    _: Sphinx, kind: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Insert a backslash between a literal and a letter, as in ``Plan``s.

    reStructuredText would otherwise miss the end of the literal.
    """
    docstring = re.sub(r"(``.+?``)(\w)?", _escape_literal_end, "\n".join(lines), flags=re.DOTALL)
    lines[:] = docstring.split("\n")


def _escape_literal_end(literal: re.Match[str]) -> str:
    return literal[1] + (f"\\ {literal[2]}" if literal[2] else "")
