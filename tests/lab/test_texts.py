"""Texts: files, plain or compressed, the standard library, and what is refused."""

import hashlib
import lzma
from pathlib import Path

import pytest

from geoparam_lab.data import texts

CONTENT = bytes(range(200)) * 5


def test_a_file_and_its_xz_are_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(CONTENT))
    plain, packed = (texts.load_text(tmp_path / name) for name in ("a.txt", "a.txt.xz"))
    assert bytes(plain.train) + bytes(plain.val) == CONTENT and len(plain.val) == 100
    assert plain.fingerprint["sha256"] == packed.fingerprint["sha256"]
    assert plain.fingerprint["sha256"] == hashlib.sha256(CONTENT).hexdigest()


def test_another_file_may_validate(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "b.txt").write_bytes(b"other")
    text = texts.load_text(tmp_path / "a.txt", tmp_path / "b.txt")
    assert bytes(text.train) == CONTENT and bytes(text.val) == b"other"


def test_the_standard_library_needs_no_file() -> None:
    text = texts.load_text()
    assert len(text.train) > 1_000_000 and b"import " in bytes(text.train[:100_000])
    assert text.fingerprint == texts.load_text().fingerprint


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no.txt' is not a file"):
        texts.load_text(tmp_path / "no.txt")


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="empty.txt is empty"):
        texts.load_text(tmp_path / "empty.txt")


@pytest.mark.parametrize("content", [b"plain", lzma.compress(CONTENT)[:-10]])
def test_a_broken_xz_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(content)
    with pytest.raises(ValueError, match="a.xz is not a whole .xz file"):
        texts.load_text(tmp_path / "a.xz")


def test_each_part_is_longer_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    text = texts.load_text(tmp_path / "a.txt")
    text.check_length(99)
    with pytest.raises(ValueError, match="validation text must be longer .* 100 bytes; got 100"):
        text.check_length(100)


@pytest.mark.parametrize("name", ["no.txt", "empty.txt"])
def test_a_wrong_validation_text_is_said_to_be_that(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "empty.txt").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=f"{name}.*as --validation"):
        texts.load_text(tmp_path / "a.txt", tmp_path / name)


def test_validation_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--validation goes with --data"):
        texts.load_text(None, tmp_path / "b.txt")
