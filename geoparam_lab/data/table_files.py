"""Tables of numbers that others made: found on disk or downloaded, read, and checked.

A table is looked for in the folder that the caller names (``--data``), in $GEOPARAM_DATA and in
the cache ($GEOPARAM_CACHE or ~/.cache/geoparam, folder ``data``), and downloaded when it is in
none. It may be CSV, text in columns, KEEL's .dat, an Excel workbook, or a zip archive of these.

The numbers are checked, not the file: their count, and a checksum of their first twelve digits,
which is the same for every format. A file that fails the check is an error and never skipped.
"""

import contextlib
import hashlib
import http.client
import io
import os
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np

from geoparam.storage import list_few, replacing
from geoparam_lab.data.files import open_zip

TIMEOUT = 10  # seconds without an answer
LARGEST = 1 << 24  # bytes of an archive's entry; Naval's 3.4 MB are the most


@dataclass(frozen=True)
class Table:
    """A data set that is one table."""

    name: str  # `NAME.csv` is looked for first
    rows: int
    columns: int  # with the target, which is the last; further ones in a file are left out
    checksum: str  # `checksum` of the table
    files: tuple[str, ...]  # names of the original file
    urls: tuple[str, ...]  # where it can be downloaded, in order of preference
    folder: str = ""  # a subfolder of the data folder that is searched, too
    note: str = ""  # a hint for the error about wrong numbers


def load(table: Table, data: str | Path | None = None) -> np.ndarray:
    """Return the table (rows, columns) in float64, from disk or else from its source."""
    path = find(table, data)
    if path is None:
        return _download(table, data)
    try:
        return _read_table(table, path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be used: {error}. Remove it to have it downloaded, or get it anew "
            f"from {' or '.join(table.urls)}"
        ) from error


def find(table: Table, data: str | Path | None = None) -> Path | None:
    """Return the first file of the table in ``data``, $GEOPARAM_DATA and the cache, if any."""
    for folder in _list_folders(data):
        for sub in (folder, folder / table.folder):
            for name in (f"{table.name}.csv", *table.files):
                if (sub / name).is_file():
                    return sub / name
    return None


def _list_folders(data: str | Path | None) -> list[Path]:
    named = {"the data folder": data, "GEOPARAM_DATA": os.environ.get("GEOPARAM_DATA")}
    for name, folder in named.items():
        if folder and not Path(folder).is_dir():
            raise FileNotFoundError(f"{name} is not a folder: {folder}. Correct or omit it")
    return [*(Path(folder) for folder in named.values() if folder), _cache_folder()]


def _cache_folder() -> Path:
    return Path(os.environ.get("GEOPARAM_CACHE") or Path.home() / ".cache" / "geoparam") / "data"


def checksum(table: np.ndarray) -> str:
    """Digest of a table's numbers to twelve digits, whatever file they were read from.

    Twelve notice any change, and no number in our sets is half way between two roundings.
    """
    numbers = np.asarray(table, dtype=np.float64) + 0.0  # no -0
    lines = [",".join(map("{:.11e}".format, row)) for row in numbers.tolist()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _read_table(table: Table, content: bytes) -> np.ndarray:
    """Return the table in a file's bytes; raise ValueError where it has other numbers."""
    numbers = np.ascontiguousarray(parse(content, table.files)[:, : table.columns])
    if checksum(numbers) != table.checksum:
        rows, columns = numbers.shape
        raise ValueError(
            f"its numbers, {rows} rows of {columns}, are not the {table.rows} rows of "
            f"{table.columns} of {table.name}, or are in another order: checksum "
            f"{checksum(numbers)} instead of {table.checksum}"
            + (f" ({table.note})" if table.note else "")
        )
    return numbers


def _download(table: Table, data: str | Path | None) -> np.ndarray:
    attempts = []
    for url in table.urls:
        try:
            numbers = _read_table(table, fetch(url))
        except (OSError, http.client.HTTPException, ValueError, ImportError) as error:
            attempts.append(f"{url}: {error or type(error).__name__}")
        else:
            rows = [",".join(map(repr, row)) for row in numbers.tolist()]
            cached = _cache_folder() / table.folder / f"{table.name}.csv"
            # Where it cannot be written, it is downloaded again next time.
            with contextlib.suppress(OSError), replacing(cached) as unfinished:
                unfinished.write_text("\n".join([*rows, ""]))
            return numbers
    folders = ", ".join(map(str, _list_folders(data)))
    files = ", ".join((f"{table.name}.csv", *table.files))
    lines = [f"the data set {table.name} is in none of {folders}", *attempts]
    raise FileNotFoundError(
        "\n  ".join(lines) + f"\nGet it from {table.urls[0]} and put it, under one of the names "
        f"{files}, into a folder that --data or GEOPARAM_DATA names"
    )


def fetch(url: str) -> bytes:
    """Return what a server sends."""
    request = urllib.request.Request(url, headers={"User-Agent": "geoparam"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return response.read()


def parse(content: bytes, files: Sequence[str] = ()) -> np.ndarray:
    """Return the table of numbers in a file's bytes; in a zip archive, in one of these files."""
    wanted = {PurePosixPath(file).name for file in files}
    for _ in range(4):  # an archive may hold another, and a workbook is one
        if not content.startswith(b"PK\x03\x04"):
            break
        with open_zip(io.BytesIO(content), LARGEST) as archive:
            names = archive.namelist()
            if "xl/workbook.xml" in names:
                return _stack_rows(_read_xlsx(archive))
            matches = [name for name in names if PurePosixPath(name).name in wanted]
            if not matches:
                held = f"none of {', '.join(sorted(wanted))}, only {list_few(names)}"
                raise ValueError(f"it holds {held}")
            content = archive.read(matches[0])
    if content.startswith(b"\xd0\xcf\x11\xe0"):
        return _stack_rows(_read_xls(content))
    return _stack_rows(_read_text(content.decode("utf-8-sig", errors="replace")))


def _read_text(text: str) -> list[list[float]]:
    """Read numbers between commas, semicolons or blanks; text may come before the first row."""
    rows: list[list[float]] = []
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        fields = line.replace(",", " ").replace(";", " ").split()
        if not fields or line.startswith(("@", "#", "%")):
            continue
        try:
            rows.append(list(map(float, fields)))
        except ValueError as error:
            if rows:
                raise ValueError(f"its line {number} is not of numbers: {line[:40]!r}") from error
    return rows


def _read_xlsx(archive: zipfile.ZipFile) -> list[list[float]]:
    """Read the numbers in each row of a workbook's first sheet."""
    try:
        workbook = ElementTree.fromstring(archive.read("xl/workbook.xml"))
        links = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))
        first = next(workbook.iterfind("{*}sheets/{*}sheet"))
        key = next(value for name, value in first.attrib.items() if name.endswith("}id"))
        target = next(link.attrib["Target"] for link in links if link.attrib["Id"] == key)
        path = target[1:] if target.startswith("/") else f"xl/{target}"
        sheet = ElementTree.fromstring(archive.read(path))
    except (LookupError, StopIteration, ElementTree.ParseError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__} {error}") from error
    rows = (
        [cell.findtext("{*}v") for cell in row if cell.get("t", "n") == "n"]
        for row in sheet.iterfind("{*}sheetData/{*}row")
    )
    return [filled for row in rows if (filled := [float(value) for value in row if value])]


def _read_xls(content: bytes) -> list[list[float]]:
    """The same for a workbook of Excel 97, a binary format."""
    import xlrd

    try:
        sheet = xlrd.open_workbook(file_contents=content, logfile=io.StringIO()).sheet_by_index(0)
    except Exception as error:  # xlrd raises anything for a damaged file
        raise ValueError(f"it is damaged: {error}") from error
    number = xlrd.XL_CELL_NUMBER
    rows = ([cell.value for cell in row if cell.ctype == number] for row in sheet.get_rows())
    return [row for row in rows if row]


def _stack_rows(rows: list[list[float]]) -> np.ndarray:
    if len({len(row) for row in rows}) != 1:
        raise ValueError("it holds no table of numbers, with equally many in each row")
    return np.array(rows, dtype=np.float64)
