"""Nothing is written over."""

from pathlib import Path

import pytest

from geoparam.storage import refuse_overwrite


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


def test_a_new_file_may_be_written(page: Path) -> None:
    refuse_overwrite(page)


@pytest.mark.parametrize("mark", [b"", b"ours"])
def test_a_file_without_our_mark_is_not_written_over(page: Path, mark: bytes) -> None:
    page.write_text("precious")

    with pytest.raises(FileExistsError, match="page.html exists: .*--force"):
        refuse_overwrite(page, mark=mark)


def test_a_file_with_our_mark_is_written_over(page: Path) -> None:
    page.write_text("<!-- ours -->")

    refuse_overwrite(page, mark=b"ours")


def test_any_file_is_written_over_by_force(page: Path) -> None:
    page.write_text("precious")

    refuse_overwrite(page, force=True)
