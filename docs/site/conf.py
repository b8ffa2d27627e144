"""The documentation site: the Markdown files of this repository as they are, and parts made of the code.

The whole repository is the source, so that a link from file to file means the same here and on a git host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "docs" / "site")]

import generated  # noqa: E402

from gpuserve.core.version import VERSION  # noqa: E402

project = "gpuserve"
release = version = VERSION
author = "the gpuserve authors"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/**.md", "docs/**.md", "examples/**.md",
]  # fmt: skip
exclude_patterns = [
    ".*", "**/__pycache__", "*.egg-info", "benchmarks", "build", "dist", "docs/site", "gpuserve",
    "gpuserve_worker", "tests",
]  # fmt: skip

myst_heading_anchors = 4
#: Blocks of code leave things out (…), which no lexer takes; they are coloured as far as it goes.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "gpuserve"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["style"]
html_css_files = ["site.css"]
html_extra_path = ["front"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6f4f", "color-brand-content": "#2f6f4f"},
    "dark_css_variables": {"color-brand-primary": "#7fd1a5", "color-brand-content": "#7fd1a5"},
}


def setup(app: Sphinx) -> None:
    app.connect("source-read", generated.on_source_read)
    app.connect("autodoc-process-docstring", generated.on_docstring, priority=1)  # before napoleon
