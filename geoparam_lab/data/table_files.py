"""Tables of numbers that others made: found on disk or downloaded, read, and checked.

A table is looked for in the folder that the caller names (``--data``), in $GEOPARAM_DATA and in
the cache ($GEOPARAM_CACHE or ~/.cache/geoparam, folder ``data``), and downloaded when it is in
none. It may have any form in which people have it: CSV, text in columns, KEEL's .dat, an Excel
workbook, or a zip archive that holds one of these.

What is checked is therefore not the file but the numbers in it: their count, and a checksum of
their first twelve digits, which every form has in common and which survives printing and reading.
A file that was found and fails is an error, never skipped: the user meant it. A download is
checked before it is written, in plain CSV, beside its place in the cache, and renamed when it is
complete, so that nothing half-written is ever found.
"""

import hashlib
import http.client
import io
import itertools
import logging
import os
import urllib.request
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np

from geoparam.storage import list_few, open_zip
from geoparam.storage import replacing as replacing

_log = logging.getLogger(__name__)

TIMEOUT = 10  # seconds without an answer
LARGEST = 1 << 24  # bytes of a file, and of an archive's entry; Naval's 3.4 MB are the most
MOST_ROWS, MOST_COLUMNS = 100_000, 1_000  # Naval's 11,934 and 18 are the most
DEEPEST = 4  # archives in one another; Power's workbook, one itself, may be in a zip in a zip


@dataclass(frozen=True)
class Table:
    """A data set that is one table: what to look for, where it comes from and what it holds.

    Arguments:
        name: of the data set; ``NAME.csv`` is looked for first.
        rows: how many there are.
        columns: how many there are, the target included, which is the last.
        checksum: :func:`checksum` of the table.
        unordered: :func:`checksum` of its sorted rows, to tell another order from other numbers.
        files: names under which the original file is known.
        urls: where it can be downloaded, in order of preference.
        folder: a subfolder of the data folder that is searched, too.
        surplus: columns after the target that the original has and the table leaves out.
        header: of the CSV in the cache; x0, x1, ..., y where it is empty.
        note: what an error about the numbers should add.
    """

    name: str
    rows: int
    columns: int
    checksum: str
    unordered: str
    files: tuple[str, ...]
    urls: tuple[str, ...]
    folder: str = ""
    surplus: int = 0
    header: str = ""
    note: str = ""


def load(table: Table, data: str | Path | None = None, download: bool = True) -> np.ndarray:
    """Return the table (rows, columns) in float64, from disk or else from its source."""
    path = find(table, data)
    if path is not None:
        return read(table, path)
    if not download:
        raise FileNotFoundError(_missing(table, data))
    return _download(table, data)


def find(table: Table, data: str | Path | None = None) -> Path | None:
    """Return the first file of the table in ``data``, $GEOPARAM_DATA and the cache, if any."""
    names = (f"{table.name}.csv", *table.files)
    for folder in _folders(data):
        for path in (sub / name for sub in (folder, folder / table.folder) for name in names):
            if path.is_file():
                return path
    return None


def read(table: Table, path: Path) -> np.ndarray:
    """Read one file of the table; raise ValueError where it does not hold the table's numbers."""
    try:
        with path.open("rb") as file:
            return _numbers(table, file.read(LARGEST + 1))
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be used: {error}. Remove it to have it downloaded, or get it anew "
            f"from {' or '.join(table.urls) or 'its source'}"
        ) from error


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("GEOPARAM_CACHE") or Path.home() / ".cache" / "geoparam") / "data"


def _folders(data: str | Path | None) -> list[Path]:
    named = {"the data folder": data, "GEOPARAM_DATA": os.environ.get("GEOPARAM_DATA")}
    folders = []
    for name, folder in named.items():
        if folder and not Path(folder).is_dir():
            raise FileNotFoundError(f"{name} is not a folder: {folder}. Correct or omit it")
        if folder:
            folders.append(Path(folder))
    return [*folders, cache_folder()]


def _missing(table: Table, data: str | Path | None, attempts: Sequence[str] = ()) -> str:
    folders = ", ".join(map(str, _folders(data)))
    files = ", ".join((f"{table.name}.csv", *table.files))
    lines = [f"the data set {table.name} is in none of {folders}", *attempts]
    advice = f"Get it from {table.urls[0]}" if table.urls else "Get one of its files"
    return "\n  ".join(lines) + (
        f"\n{advice} and put it, under one of the names {files}, into a folder that --data or "
        "GEOPARAM_DATA names"
    )


# --- checking ---------------------------------------------------------------------------------


def checksum(table: np.ndarray) -> str:
    """Digest of a table's numbers to twelve digits, whatever file they were read from.

    Twelve are enough to notice any change, and few enough that no number in our sets is half way
    between two roundings, where the last bit of a float would decide.

    Example:
        >>> checksum(np.array([[0.1 + 0.2, -0.0]])) == checksum(np.array([[0.3, 0.0]]))
        True
        >>> checksum(np.array([[0.3, 0.0]])) == checksum(np.array([[0.3, 1e-9]]))
        False
    """
    return _digest(_lines(table))


def unordered_checksum(table: np.ndarray) -> str:
    """The same whatever the order of the rows.

    Example:
        >>> a = np.arange(6.0).reshape(3, 2)
        >>> unordered_checksum(a) == unordered_checksum(a[::-1]), checksum(a) == checksum(a[::-1])
        (True, False)
    """
    return _digest(sorted(_lines(table)))


def _lines(table: np.ndarray) -> list[str]:
    numbers = np.asarray(table, dtype=np.float64) + 0.0  # no -0
    return [",".join(map("{:.11e}".format, row)) for row in numbers.tolist()]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def problem(table: Table, numbers: np.ndarray) -> str:
    """What is wrong with numbers that should be the table's; nothing is the empty string."""
    rows, columns = numbers.shape
    if (rows, columns) != (table.rows, table.columns):
        return (
            f"it has {rows} rows of {columns} columns where {table.name} has {table.rows} of "
            f"{table.columns}: truncated, or another data set"
        )
    found = checksum(numbers)
    if found == table.checksum:
        return ""
    note = f" ({table.note})" if table.note else ""
    if unordered_checksum(numbers) == table.unordered:
        return f"it has the rows of {table.name} in another order, which changes the splits{note}"
    return (
        f"its numbers are not those of {table.name}: checksum {found} instead of "
        f"{table.checksum}{note}"
    )


def _numbers(table: Table, content: bytes) -> np.ndarray:
    """The table in a file's bytes; ValueError says what is wrong with them."""
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes, and no table here comes near")
    numbers = parse(content, table.files)
    if numbers.shape[1] == table.columns + table.surplus:
        numbers = np.ascontiguousarray(numbers[:, : table.columns])
    wrong = problem(table, numbers)
    if wrong:
        raise ValueError(wrong)
    return numbers


# --- downloading ------------------------------------------------------------------------------


def _download(table: Table, data: str | Path | None) -> np.ndarray:
    attempts = []
    for url in table.urls:
        _log.info("downloading %s from %s", table.name, url)
        try:
            numbers = _numbers(table, fetch(url))
        except (OSError, http.client.HTTPException, ValueError, ImportError) as error:
            attempts.append(f"{url}: {error or type(error).__name__}")
        else:
            _keep(table, numbers)
            return numbers
    raise FileNotFoundError(_missing(table, data, attempts))


def fetch(url: str) -> bytes:
    """Return all that a server sends; an answer that breaks off is an error."""
    request = urllib.request.Request(url, headers={"User-Agent": "geoparam"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        content: bytes = response.read(LARGEST + 1)
        expected = response.headers.get("Content-Length")
    if expected and len(content) != int(expected):
        raise ValueError(f"the download broke off after {len(content)} of {expected} bytes")
    return content


def _keep(table: Table, numbers: np.ndarray) -> None:
    """Write the table to the cache, where that is possible."""
    header = table.header or ",".join([f"x{i}" for i in range(table.columns - 1)] + ["y"])
    rows = [",".join(map(repr, row)) for row in numbers.tolist()]
    try:
        with replacing(cache_folder() / table.folder / f"{table.name}.csv") as unfinished:
            unfinished.write_text("\n".join([header, *rows, ""]))
    except OSError as error:
        _log.warning("%s will be downloaded again next time: %s", table.name, error)


# --- reading ----------------------------------------------------------------------------------


def parse(content: bytes, files: Sequence[str] = (), deepest: int = DEEPEST) -> np.ndarray:
    """Return the table of numbers in a file's bytes, of whatever kind the file is.

    Arguments:
        content: the whole file.
        files: names to look for where it is a zip archive.
        deepest: how many archives may be within one another.

    Example:
        >>> parse(b"a;b\\n1;2\\n3;4.5\\n").tolist()
        [[1.0, 2.0], [3.0, 4.5]]
        >>> parse(b"@relation r\\n@data\\n1.5, -1\\n").tolist()
        [[1.5, -1.0]]
    """
    if content.startswith(b"PK\x03\x04"):
        return _parse_zip(content, files, deepest)
    if content.startswith(b"\xd0\xcf\x11\xe0"):
        return _rectangle(_xls_rows(content))
    return _rectangle(_text_rows(content.decode("utf-8-sig", errors="replace")))


def _parse_zip(content: bytes, files: Sequence[str], deepest: int) -> np.ndarray:
    if deepest == 0:
        raise ValueError(f"archives are within one another, more than {DEEPEST} deep")
    wanted = {PurePosixPath(file).name for file in files}
    with open_zip(io.BytesIO(content), LARGEST) as archive:
        names = archive.namelist()
        if "xl/workbook.xml" in names:
            return _rectangle(_xlsx_rows(archive))
        for name in names:
            if PurePosixPath(name).name in wanted:
                return parse(archive.read(name), files, deepest - 1)
    raise ValueError(f"it holds none of {', '.join(sorted(wanted))}, only {list_few(names)}")


def _text_rows(text: str) -> list[list[float]]:
    """Rows of numbers between commas, semicolons or blanks; text may come before the first."""
    rows: list[list[float]] = []
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        fields = line.replace(",", " ").replace(";", " ").split(maxsplit=MOST_COLUMNS)
        if not fields or line.startswith(("@", "#", "%")):
            continue
        if len(rows) > MOST_ROWS:
            break
        try:
            rows.append(list(map(float, fields)))
        except ValueError as error:
            if rows:
                raise ValueError(f"its line {number} is not of numbers: {line[:40]!r}") from error
    return rows


def _xlsx_rows(archive: zipfile.ZipFile) -> list[list[float]]:
    """The numbers in each row of a workbook's first sheet; rows without any are left out."""
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
    return _keep_filled(_xlsx_numbers(row) for row in sheet.iterfind("{*}sheetData/{*}row"))


def _xlsx_numbers(row: ElementTree.Element) -> list[float]:
    cells = (cell for cell in row if cell.get("t", "n") == "n")
    values = (cell.findtext("{*}v") for cell in cells)
    return [float(value) for value in values if value]


def _xls_rows(content: bytes) -> list[list[float]]:
    """The same for a workbook of Excel 97, a binary format."""
    try:
        import xlrd
    except ModuleNotFoundError as error:
        message = "an .xls workbook is read with xlrd: pip install xlrd. Or save its sheet as CSV"
        raise ModuleNotFoundError(message, name="xlrd") from error
    try:
        sheet = xlrd.open_workbook(file_contents=content, logfile=io.StringIO()).sheet_by_index(0)
    except Exception as error:  # xlrd raises whatever its parsing stumbles over
        raise ValueError(f"it is damaged: {error}") from error
    number = xlrd.XL_CELL_NUMBER
    return _keep_filled(
        [cell.value for cell in row if cell.ctype == number] for row in sheet.get_rows()
    )


def _keep_filled(rows: Iterable[list[float]]) -> list[list[float]]:
    """Return the rows that have numbers, and one more than there may be at most."""
    return list(itertools.islice((row for row in rows if row), MOST_ROWS + 1))


def _rectangle(rows: list[list[float]]) -> np.ndarray:
    if not rows:
        raise ValueError("it holds no table of numbers")
    if len(rows) > MOST_ROWS:
        raise ValueError(f"it has more than {MOST_ROWS:,} rows, and no table here comes near")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"its row {number} has {len(row)} numbers where the first has {len(rows[0])}: "
                "truncated or altered"
            )
    return np.array(rows, dtype=np.float64)
