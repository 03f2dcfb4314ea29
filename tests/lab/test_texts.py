"""Texts: files, plain or compressed, the standard library, and what is refused."""

import hashlib
import lzma
from pathlib import Path

import pytest

from geoparam_lab.data import texts

CONTENT = bytes(range(200)) * 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    return path


def test_a_tenth_of_a_file_validates(file: Path) -> None:
    text = texts.load_text(file)

    assert bytes(text.train) + bytes(text.val) == CONTENT
    assert len(text.val) == len(CONTENT) // 10


def test_the_fingerprint_is_the_hash_of_the_content(file: Path) -> None:
    text = texts.load_text(file)

    assert text.fingerprint["sha256"] == hashlib.sha256(CONTENT).hexdigest()


def test_a_file_and_its_xz_are_one_text(file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(CONTENT))

    plain, compressed = texts.load_text(file), texts.load_text(tmp_path / "a.txt.xz")

    assert plain.fingerprint["sha256"] == compressed.fingerprint["sha256"]


def test_another_file_may_validate(file: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"other")

    text = texts.load_text(file, tmp_path / "b.txt")

    assert bytes(text.train) == CONTENT
    assert bytes(text.val) == b"other"


def test_the_standard_library_needs_no_file() -> None:
    text = texts.load_text()

    assert len(text.train) > 1_000_000
    assert b"import " in bytes(text.train[:100_000])
    assert text.fingerprint == texts.load_text().fingerprint


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no.txt' is not a file"):
        texts.load_text(tmp_path / "no.txt")


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()

    with pytest.raises(ValueError, match="empty.txt is empty"):
        texts.load_text(tmp_path / "empty.txt")


@pytest.mark.parametrize(
    "content", [b"plain", lzma.compress(CONTENT)[:-10]], ids=["not xz", "truncated"]
)
def test_a_broken_xz_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(content)

    with pytest.raises(ValueError, match="a.xz is not a whole .xz file"):
        texts.load_text(tmp_path / "a.xz")


def test_each_part_is_longer_than_the_context(file: Path) -> None:
    text = texts.load_text(file)

    text.check_length(99)
    with pytest.raises(ValueError, match="validation text must be longer .* 100 bytes; got 100"):
        text.check_length(100)


@pytest.mark.parametrize("name", ["no.txt", "empty.txt"])
def test_a_wrong_validation_text_is_said_to_be_that(name: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()

    with pytest.raises((ValueError, FileNotFoundError), match=f"{name}.*as --validation"):
        texts.load_text(file, tmp_path / name)


def test_validation_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--validation goes with --data"):
        texts.load_text(None, tmp_path / "b.txt")
