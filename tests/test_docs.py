"""The pages: every public name is in the reference, and links lead somewhere."""

import re
from pathlib import Path

import pytest

import geoparam
from geoparam import analysis

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "notebooks", "results")
PAGES = [*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("module", [geoparam, analysis], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module) -> None:  # noqa: ANN001
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = set(
        re.findall(r"auto(?:class|function|data):: geoparam\.(?:\w+\.)*(\w+)$", page, re.M)
    )
    assert set(module.__all__) - documented == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", page.read_text("utf-8"))
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert missing == []


def test_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text("utf-8").split()
    assert len(words) <= 700
