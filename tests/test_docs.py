"""The pages: every public name is in the reference, and links lead somewhere."""

import importlib
import re
from pathlib import Path

import pytest

import geoparam

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "notebooks", "results")
PAGES = [*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
DOCUMENTED = re.compile(r"auto(?:class|function|data):: (geoparam\.[\w.]+)$", re.M)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")


def list_public_names(module: str) -> set[str]:
    """Return what `__all__` has; without it, the classes and functions defined there."""
    if module == "geoparam.functional":
        return {"weight"}  # the package's own helpers beside it are not for users

    members = vars(importlib.import_module(module))
    if "__all__" in members:
        return set(members["__all__"])
    return {
        name
        for name, value in members.items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    }


@pytest.mark.parametrize(
    "module",
    [
        "geoparam",
        "geoparam.analysis",
        "geoparam.checkpoints",
        "geoparam.functional",
        "geoparam.integrations.lightning",
        "geoparam.integrations.transformers",
        "geoparam.optim",
        "geoparam.plots",
    ],
)
def test_the_reference_has_exactly_the_public_names(module: str) -> None:
    extra = {"lightning": "lightning", "transformers": "transformers", "plots": "matplotlib"}
    pytest.importorskip(extra.get(module.rpartition(".")[2], "torch"))
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = {
        name.rpartition(".")[2]
        for name in DOCUMENTED.findall(page)
        if name.rpartition(".")[0] == module
    }
    public = list_public_names(module)
    if module != "geoparam":
        public -= set(geoparam.__all__)  # documented under their short names
    assert documented == public


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", page.read_text("utf-8"))

    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target


def test_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text("utf-8").split()
    assert len(words) <= 700
