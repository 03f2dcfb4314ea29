"""Tables from files and servers: every format gives the same numbers, nothing wrong gets in."""

import dataclasses
import io
import struct
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.cli import INSTALL
from geoparam_lab.data import table_files
from geoparam_lab.data.table_files import Table

NUMBERS = np.array([[0.1, -2.5, 3.0], [1e-7, 0.0, 61.887365759999994], [12.0, 7.25, 1 / 3]])
SURPLUS = np.column_stack([NUMBERS, [7.0, 8.0, 9.0]])
TABLE = Table(
    "toy",
    rows=3,
    columns=3,
    checksum=table_files.checksum(NUMBERS),
    files=("toy.data", "toy.xlsx", "toy.zip"),
    urls=("http://source.invalid/toy",),
    folder="toys",
    note="beware of copies",
)


@pytest.fixture(autouse=True)
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data, no cache and no proxy of the user's."""
    monkeypatch.delenv("GEOPARAM_DATA", raising=False)
    monkeypatch.setenv("GEOPARAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def text(numbers: np.ndarray, separator: str = ",", header: str = "x0,x1,y\n") -> bytes:
    lines = [separator.join(map(repr, row)) for row in numbers.tolist()]
    return (header + "\n".join(lines) + "\n").encode()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def xlsx_sheet(numbers: np.ndarray) -> bytes:
    """A header of text, the numbers, and cells and rows that are formatted but empty."""
    cell = '<c r="A{}" s="1"><v>{!r}</v></c>'
    rows = ['<row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c></row>']
    for n, row in enumerate(numbers.tolist(), start=2):
        cells = "".join(cell.format(n, value) for value in row)
        rows.append(f'<row r="{n}">{cells}<c r="Z{n}" s="1"/></row>')
    rows.append('<row r="99"><c r="A99" s="1"/></row>')
    space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    data = "".join(rows)
    return f'<worksheet xmlns="{space}"><sheetData>{data}</sheetData></worksheet>'.encode()


def xlsx(numbers: np.ndarray) -> bytes:
    """A workbook whose first sheet is not the first file."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    workbook = (
        f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet name="a" r:id="rId7"/>'
        '<sheet name="b" r:id="rId1"/></sheets></workbook>'
    )
    links = (
        f'<Relationships xmlns="{package}"><Relationship Id="rId1" Target="worksheets/s1.xml"/>'
        '<Relationship Id="rId7" Target="worksheets/s2.xml"/></Relationships>'
    )
    return zipped(
        {
            "xl/workbook.xml": workbook.encode(),
            "xl/_rels/workbook.xml.rels": links.encode(),
            "xl/worksheets/s1.xml": xlsx_sheet(numbers[::-1]),
            "xl/worksheets/s2.xml": xlsx_sheet(numbers),
        }
    )


def xls_record(kind: int, content: bytes = b"") -> bytes:
    return struct.pack("<HH", kind, len(content)) + content


def xls_beginning(kind: int) -> bytes:
    return xls_record(0x809, struct.pack("<HHHHII", 0x600, kind, 0, 0, 0, 0))


def xls_workbook(numbers: np.ndarray) -> bytes:
    """The records of a workbook of one sheet, with the numbers below a row that is left empty."""
    end = xls_record(0x0A)
    offset = len(xls_beginning(5)) + 4 + 8 + 1 + len(end)
    sheet = xls_record(0x85, struct.pack("<IHBB", offset, 0, 1, 0) + b"a")
    workbook = xls_beginning(5) + sheet + end + xls_beginning(0x10)
    for (i, j), value in np.ndenumerate(numbers):
        workbook += xls_record(0x203, struct.pack("<HHHd", i + 1, j, 0, value))
    return workbook + end


def compound_entry(name: str, kind: int, child: int, start: int, size: int) -> bytes:
    """An entry in the folder of a compound file."""
    entry = name.encode("utf-16le").ljust(64, b"\0")
    entry += struct.pack("<HBBiii", 2 * len(name) + 2, kind, 1, -1, -1, child)
    entry += bytes(36)
    entry += struct.pack("<iI", start, size)
    return entry.ljust(128, b"\0")


def xls(numbers: np.ndarray) -> bytes:
    """The smallest Excel 97 workbook: its records in eight sectors of a compound file."""
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    header += struct.pack("<HHHHH", 0x3E, 3, 0xFFFE, 9, 6) + bytes(10)
    header += struct.pack("<IiIIiIiI", 1, 1, 0, 4096, -2, 0, -2, 0)
    header += struct.pack("<109i", 0, *[-1] * 108)
    allocation = struct.pack("<128i", -3, -2, *range(3, 10), -2, *[-1] * 118)
    folder = compound_entry("Root Entry", 5, 1, -2, 0)
    folder += compound_entry("Workbook", 2, -1, 2, 4096)
    stream = xls_workbook(numbers).ljust(4096, b"\0")
    return header + allocation + folder.ljust(512, b"\0") + stream


FORMATS = {
    "csv": text(NUMBERS),
    "csv without header": text(NUMBERS, header=""),
    "csv of Windows": b"\xef\xbb\xbf" + text(NUMBERS).replace(b"\n", b"\r\n"),
    "semicolons": text(NUMBERS, ";", '"fixed acidity";"b";"c"\n'),
    "columns": b"  " + text(NUMBERS, "   ", "").replace(b"\n", b" \n  ") + b"\n\n",
    "keel": text(NUMBERS, ", ", "@relation toy\n@attribute a real [0, 1]\n@data\n"),
    "xlsx": xlsx(NUMBERS),
    "zip": zipped({"Readme.txt": b"1 2", "folder/toy.data": text(NUMBERS, " ", "")}),
    "zip of a workbook": zipped({"a/toy.xlsx": xlsx(NUMBERS)}),
    "zip in a zip": zipped({"toy.zip": zipped({"toy.data": text(NUMBERS)})}),
}


@pytest.mark.parametrize("content", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_numbers(content: bytes) -> None:
    numbers = table_files.parse(content, TABLE.files)

    np.testing.assert_array_equal(numbers, NUMBERS)
    assert numbers.dtype == np.float64
    assert table_files.checksum(numbers) == TABLE.checksum


def test_an_old_workbook_is_read_with_xlrd() -> None:
    pytest.importorskip("xlrd")

    np.testing.assert_array_equal(table_files.parse(xls(NUMBERS)), NUMBERS)


def test_a_damaged_old_workbook_is_refused() -> None:
    pytest.importorskip("xlrd")

    with pytest.raises(ValueError, match="it is damaged"):
        table_files.parse(xls(NUMBERS)[:900])


def test_an_old_workbook_needs_xlrd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xlrd", None)

    with pytest.raises(ModuleNotFoundError) as error:
        table_files.parse(xls(NUMBERS))

    assert error.value.name in INSTALL  # the command line says what to install


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no table of numbers"),
        (text(NUMBERS)[:-9], "are not the 3 .* \\(beware of copies\\)"),  # a number is cut
        (text(NUMBERS[::-1]), "3 of toy, or are in another order"),
        (text(NUMBERS[:2]), "its numbers, 2 rows of 3, are not the 3 rows of 3 of toy"),
        (text(NUMBERS)[:-22], "equally many in each row"),
        (text(NUMBERS).replace(b"7.25", b"7,25"), "equally many in each row"),
        (text(NUMBERS).replace(b"7.25", b"?"), "its line 4 is not of numbers: '12.0,\\?,"),
        (xlsx(NUMBERS)[:-30], "is damaged"),
        (zipped({"other.csv": b"1,2\n"}), "holds none of toy.data, .*, only other.csv"),
        (zipped({"toy.data": bytes(table_files.LARGEST + 1)}), "toy.data claims 16,777,217 bytes"),
        (b"1\n" * 100_000, "its numbers, 100000 rows of 1, are not the 3 rows of 3 of toy"),
        (b"1 " * 100_000, "its numbers, 1 rows of 3, are not the 3 rows of 3 of toy"),
        (zipped({"xl/workbook.xml": b'<?xml version="1.0" encoding="odd"?><w/>'}), "is damaged"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "toy.csv").write_bytes(content)

    with pytest.raises(ValueError, match=f"toy.csv cannot be used: .*{message}.*get it anew"):
        table_files.load(TABLE, tmp_path)


@pytest.mark.parametrize("place", ["toy.csv", "toys/toy.data"])
def test_files_are_found_by_each_name_and_in_each_folder(tmp_path: Path, place: str) -> None:
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(text(NUMBERS))

    assert table_files.find(TABLE, tmp_path / "data") == path
    np.testing.assert_array_equal(table_files.load(TABLE, tmp_path / "data"), NUMBERS)


def test_the_named_folder_comes_before_the_variable_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "data"
    variable = tmp_path / "variable"
    named = tmp_path / "named"
    for folder in (cache, variable, named):
        folder.mkdir(parents=True)
    monkeypatch.setenv("GEOPARAM_DATA", str(variable))

    for folder in (cache, variable, named):  # each comes before those that have the file already
        (folder / "toy.csv").write_bytes(text(NUMBERS))
        assert table_files.find(TABLE, named) == folder / "toy.csv"


def test_a_named_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the data folder is not a folder: .*nowhere"):
        table_files.find(TABLE, str(tmp_path / "nowhere"))


def test_a_folder_in_the_variable_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEOPARAM_DATA", str(tmp_path / "nowhere"))

    with pytest.raises(FileNotFoundError, match="GEOPARAM_DATA is not a folder: .*nowhere"):
        table_files.find(TABLE)


CONTENT_OF_PATH = {
    "/csv": text(NUMBERS),
    "/zip": FORMATS["zip"],
    "/surplus": text(SURPLUS),
    "/breaks": text(NUMBERS),
    "/altered": text(NUMBERS + 1e-6),
    "/login": b"<html>Please log in</html>",
}


class Handler(BaseHTTPRequestHandler):
    """Sends the content of a path, or half of it where the path breaks."""

    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path not in CONTENT_OF_PATH:
            return self.send_error(404)

        content = CONTENT_OF_PATH[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.path == "/breaks":
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that runs during the test."""
    monkeypatch.setattr(Handler, "requests", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def table_at(address: str, *paths: str) -> Table:
    return dataclasses.replace(TABLE, urls=tuple(address + path for path in paths))


def cached(base: Path) -> list[str]:
    """The files in the cache, hidden ones too."""
    cache = base / "cache"
    files = [path for path in cache.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(cache)) for path in files)


@pytest.mark.parametrize("path", ["/csv", "/zip", "/surplus"])
def test_a_download_is_checked_kept_and_not_repeated(
    tmp_path: Path, address: str, path: str
) -> None:
    first = table_files.load(table_at(address, path))
    second = table_files.load(table_at(address, path))

    np.testing.assert_array_equal(first, NUMBERS)
    np.testing.assert_array_equal(second, NUMBERS)
    assert Handler.requests == [path]
    assert cached(tmp_path) == ["data/toys/toy.csv"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nothing", "404"),
        ("/breaks", "bytes read, .* more expected"),
        ("/altered", "are not the 3 rows of 3 of toy"),
        ("/login", "no table of numbers"),
    ],
)
def test_a_bad_download_is_explained_and_leaves_nothing(
    tmp_path: Path, address: str, path: str, reason: str
) -> None:
    with pytest.raises(FileNotFoundError, match=f"(?s){path}: .*{reason}.*put it.*--data"):
        table_files.load(table_at(address, path))

    assert cached(tmp_path) == []


def test_the_next_source_serves_where_one_fails(address: str) -> None:
    table = table_at(address, "/nothing", "/breaks", "/altered", "/csv")

    np.testing.assert_array_equal(table_files.load(table), NUMBERS)
    assert Handler.requests == ["/nothing", "/breaks", "/altered", "/csv"]


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, address: str) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")

    np.testing.assert_array_equal(table_files.load(table_at(address, "/csv")), NUMBERS)
