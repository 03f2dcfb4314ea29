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
    assert read_json(b"\xef\xbb\xbf" + json.dumps(value).encode(), "a.json") == value


def array(shape: tuple[int, ...], kind: str = "|u1", content: bytes = b"\1\2") -> bytes:
    """An array as npy files hold it; the content may be too short for the shape."""
    file = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
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
        zipped({"a.npy": array((2**43,))}),
        zipped({"a.npy": array((-1,))}),
        zipped({"a.npy": array((1,), "|O")}),
        zipped({"a.npy": b"\x93NUMPY\3\0"}),
        zipped({"a.npy": b""}),
        zipped({"a.npy": b"\x93NUMPY\1\0\1\0{"}),
        zipped({"a.npy": array((2,))})[:-30],
    ],
    ids=range(9),
)
def test_arrays_that_cannot_be_read_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.npz is truncated or damaged"):
        read_npz(path)


def test_arrays_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array("levy")}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    assert read_npz(tmp_path / "a.npz").keys() == arrays.keys()
    assert read_npz(tmp_path / "a.npz", "b")["b"] == "levy"
    with pytest.raises(KeyError):
        read_npz(tmp_path / "a.npz", "c")


def test_an_archive_holds_no_more_than_allowed() -> None:
    content = zipped({"a": bytes(1000)}, zipfile.ZIP_DEFLATED)
    with open_zip(io.BytesIO(content), 1000) as archive:
        assert len(archive.read("a")) == 1000
    with pytest.raises(ValueError, match="its entry a claims 1,000 bytes, and may have 999"):
        with open_zip(io.BytesIO(content), 999):
            pass
