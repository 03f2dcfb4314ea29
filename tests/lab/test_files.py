"""Files that claim too much are refused in words."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.data.files import open_zip, read_json, read_npz


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"3",
        b'{"\xe9": 1}',
        b"\xff\xfe{\x00}\x00",
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda content: repr(content[:10]),
)
def test_json_that_cannot_be_read_is_named(content: bytes) -> None:
    with pytest.raises(ValueError, match="a.json is damaged: "):
        read_json(content, "a.json")


def test_json_is_read() -> None:
    value = {"a": [{"b": None}], "c": "é"}
    byte_order_mark = b"\xef\xbb\xbf"

    content = byte_order_mark + json.dumps(value).encode()

    assert read_json(content, "a.json") == value


def write_npy(shape: tuple[int, ...], dtype: str = "|u1", content: bytes = b"\1\2") -> bytes:
    """Return an npy file with this header; the content may be too short for the shape."""
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def write_zip(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive with these entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"PK\3\4",
        b"no archive",
        write_zip({"a.npy": write_npy((2**43,))}),
        write_zip({"a.npy": write_npy((-1,))}),
        write_zip({"a.npy": write_npy((1,), "|O")}),
        write_zip({"a.npy": b"\x93NUMPY\3\0"}),
        write_zip({"a.npy": b""}),
        write_zip({"a.npy": b"\x93NUMPY\1\0\1\0{"}),
        write_zip({"a.npy": write_npy((2,))})[:-30],
    ],
    ids=range(9),
)
def test_arrays_that_cannot_be_read_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)

    with pytest.raises(ValueError, match="a.npz is truncated or damaged"):
        read_npz(path)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A file with the arrays a and b."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.arange(6.0).reshape(2, 3), b=np.array("levy"))
    return path


def test_all_arrays_are_read(arrays: Path) -> None:
    values = read_npz(arrays)

    assert values.keys() == {"a", "b"}
    np.testing.assert_array_equal(values["a"], [[0, 1, 2], [3, 4, 5]])
    assert values["b"] == "levy"


def test_one_array_is_read_where_it_is_named(arrays: Path) -> None:
    assert read_npz(arrays, "b")["b"] == "levy"


def test_an_array_that_is_not_there_is_a_key_error(arrays: Path) -> None:
    with pytest.raises(KeyError):
        read_npz(arrays, "c")


def test_an_archive_may_hold_as_much_as_allowed() -> None:
    content = write_zip({"a": bytes(1000)}, zipfile.ZIP_DEFLATED)

    with open_zip(io.BytesIO(content), 1000) as archive:
        assert len(archive.read("a")) == 1000


def test_an_archive_may_not_hold_more_than_allowed() -> None:
    content = write_zip({"a": bytes(1000)}, zipfile.ZIP_DEFLATED)

    with pytest.raises(ValueError, match="its entry a claims 1,000 bytes, and may have 999"):
        with open_zip(io.BytesIO(content), 999):
            pass
