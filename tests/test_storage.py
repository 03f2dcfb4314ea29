"""Nothing is written over."""

from pathlib import Path

import pytest

from geoparam.storage import refuse_overwrite


def test_only_what_carries_our_mark_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    refuse_overwrite(path)
    path.write_text("precious")
    refuse_overwrite(path, force=True)
    for mark in (b"", b"ours"):
        with pytest.raises(FileExistsError, match="page.html exists: .*--force"):
            refuse_overwrite(path, mark=mark)
    path.write_text("<!-- ours -->")
    refuse_overwrite(path, mark=b"ours")
