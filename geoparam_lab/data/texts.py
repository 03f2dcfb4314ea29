"""Texts as bytes: a file, plain or .xz, or the sources of Python's standard library.

The standard library needs no file and no network. It differs by Python's version, so that numbers
on it can be compared only where the fingerprint is the same.
"""

import hashlib
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VALIDATION_SHARE = 0.1  # the end of a text, where no other text is given
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on, and bytes to validate on."""

    train: np.ndarray
    val: np.ndarray
    name: str

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What tells this text from others."""
        digest = hashlib.sha256(self.train.data)
        digest.update(self.val.data)
        sizes = {"train": len(self.train), "val": len(self.val)}
        return {"name": self.name, **sizes, "sha256": digest.hexdigest()}

    def check_length(self, context: int) -> None:
        """Raise ValueError where a part is shorter than one window and the byte after it."""
        for part, content in (("training", self.train), ("validation", self.val)):
            if len(content) <= context:
                raise ValueError(
                    f"the {part} text must be longer than the context of {context:,} bytes; got "
                    f"{len(content):,} bytes. Give a longer text, or a smaller --context."
                )


def load_text(data: str | Path | None = None, validation: str | Path | None = None) -> Text:
    """Return a text from files, or Python's standard library where there are none.

    Without a file for validation, that is the last tenth of the text.
    """
    if data is None and validation is not None:
        raise ValueError(f"--validation goes with --data; got {str(validation)!r} alone.")
    content = _read_standard_library() if data is None else _read(Path(data), "--data")
    name = "Python's standard library" if data is None else Path(data).name
    train = np.frombuffer(content, np.uint8)
    if validation is not None:
        content = _read(Path(validation), "--validation")
        return Text(train, np.frombuffer(content, np.uint8), name)
    kept = len(train) - int(len(train) * VALIDATION_SHARE)
    return Text(train[:kept], train[kept:], name)


def _read(path: Path, option: str) -> bytes:
    """Return the bytes of the file that an option names, decompressed if it ends in .xz."""
    if not path.is_file():
        raise FileNotFoundError(f"the text {str(path)!r} is not a file. Give a file as {option}.")
    open_file: Any = lzma.open if path.suffix == ".xz" else open
    try:
        with open_file(path, "rb") as file:
            content = file.read()
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .xz file ({error}). Compress it anew.") from error
    if not content:
        raise ValueError(f"the text {path} is empty. Give a file with some text as {option}.")
    return content


def _read_standard_library() -> bytes:
    """Return the sources of Python's standard library without its tests, in order of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    kept = [files[name] for name in sorted(files) if not _LEFT_OUT & set(name.split("/"))]
    if not kept:
        raise ValueError("this Python has no sources of its standard library: give a --data file.")
    return b"\n".join(path.read_bytes() for path in kept)
