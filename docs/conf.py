"""The site: `make docs` builds it from the Markdown pages, the notebooks and the docstrings.

The source folder is the repository itself, so links between pages are the same here and in a
checkout. Nothing is fetched: fonts, scripts and the search index are files of the site.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "geoparam/__init__.py").read_text(), re.M)

project = "geoparam"
author = copyright = "the geoparam authors"
version = release = VERSION[1] if VERSION else ""

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.md",
    "results/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".venv", ".git", "build", "dist", "demo", "results/runs", "tests", "geoparam*"]

highlight_language = "none"  # blocks without a language are commands, output and formulas

html_theme = "furo"
html_title = f"geoparam {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_sphinx = False

# Docstrings have Google's sections, and code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False  # torch's words about forward are not ours
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 72

myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

# Marks that reStructuredText would take for its own, outside of code: |x| and convert_.
MARK = re.compile(r"(`[^`]*`)|\||(?<=\w)_(?!\w)")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)\)")


def unlink_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders, which a checkout has and the site has not, by their paths."""
    here = (ROOT / page).parent

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (here / target).resolve()
        return f"`{path.relative_to(ROOT)}`" if path.is_dir() else link[0]

    source[0] = LINK.sub(replace, source[0])


def clean_docstring(app: Sphinx, what: str, name: str, value: object, *about: object) -> None:
    """Escape bars and trailing underscores, and keep the columns of formulas and tables.

    `about` ends with the docstring's lines. A constant has those of its type: they are dropped.
    In a property's "X: Y" napoleon has taken X for a type: it is a sentence again.
    """
    lines = about[-1]
    assert isinstance(lines, list)
    if what == "data":
        lines.clear()
    for line in [line for line in lines if what == "property" and line.startswith(":type: ")]:
        lines.remove(line)
        lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"

    cleaned: list[str] = []
    is_literal = False
    for before, line in zip(["", *lines], lines, strict=False):
        starts_block = line.startswith("    ") and not before.strip()
        if starts_block and not is_literal:
            cleaned += ["::", ""]
            is_literal = True
        is_literal = is_literal and (line.startswith("    ") or not line.strip())
        if not is_literal and not line.lstrip().startswith((">>>", "...")):
            line = MARK.sub(lambda mark: mark[1] or "\\" + mark[0], line)
        cleaned.append(line)
    lines[:] = cleaned


def skip_field(app: Sphinx, what: str, name: str, value: object, *about: object) -> bool | None:
    """Leave out a named tuple's field: the signature has it."""
    return True if (value.__doc__ or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    app.connect("source-read", unlink_folders)
    app.connect("autodoc-process-docstring", clean_docstring)
    app.connect("autodoc-skip-member", skip_field)
