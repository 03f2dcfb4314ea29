"""Write files without losing what is there; show names that others wrote."""

import contextlib
import os
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "list_few",
    "printable",
    "refuse_overwrite",
    "replacing",
]


def list_few(names: Iterable[str], most: int = 12) -> str:
    """Return the first of some names, for an error that stays readable.

    Example:
        >>> list_few("abcd", most=2)
        'a, b and 2 more'
    """
    shortened = [name if len(name) < 200 else f"{name[:200]}..." for name in names]
    text = ", ".join(shortened[:most])
    if len(shortened) > most:
        text += f" and {len(shortened) - most} more"
    return text


def printable(text: str) -> str:
    """Return text for the terminal, with control characters written out: names may hold any.

    Example:
        >>> printable("a\\x1b]0;title\\x07")
        'a\\\\x1b]0;title\\\\x07'
    """
    return "".join(ascii(c)[1:-1] if _is_control(c) else c for c in text)


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` at the end, and is removed after an error.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "sub", "a.txt")) as unfinished:
        ...         _ = unfinished.write_text("complete")
        ...     Path(folder, "sub", "a.txt").read_text()
        'complete'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        unfinished.replace(path)


def refuse_overwrite(path: Path, force: bool = False, mark: bytes = b"") -> None:
    """Raise if a file exists, unless it begins with the `mark` of our own."""
    if force or not os.path.lexists(path):  # a link that leads nowhere exists, too
        return
    if mark and path.is_file():
        with path.open("rb") as file:
            if mark in file.read(1024):
                return
    raise FileExistsError(f"{path} exists: overwrite it with --force, or write to another file.")
