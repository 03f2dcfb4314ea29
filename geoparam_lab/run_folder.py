"""A run is a folder: what was asked for, what came out, and what is needed to do it again.

    config.json      experiment, configuration, key; and of the first session: command, versions,
                     commit, hardware, start
    sessions.jsonl   the same of every later session, when a run was resumed
    metrics.jsonl    one record per finished piece of work, appended as it is finished
    curves/*.npz     arrays
    figures/*.png    pictures

A piece of work has a key: the values of some fields of its record, such as method, data set and
seed. Save a piece's curves first and append its record last: a record then says that all of it is
there, and a resumed run leaves it out. Of several records with one key the first counts.

One process writes to a folder: it locks `.lock` from :meth:`Run.create` until :meth:`Run.close`.
The operating system drops the lock when that process ends, however it ends.

A folder may come from somebody else. Only regular files of its own are read, up to a size: no
links, pipes or devices.

A record is one line. A line without its end is what a kill or a full disk left: readers leave it
out, and a resumed run removes it. JSON has no NaN and no infinities: they are written as the
strings "NaN", "Infinity", "-Infinity", and these strings come back as numbers.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from geoparam.storage import replacing
from geoparam_lab.data.files import open_zip, read_json, read_npz
from geoparam_lab.session import describe_session

Record = dict[str, Any]

_SESSION = ("config", "command", "versions", "commit", "hardware", "started")
_RUN = ("experiment", "key", *_SESSION)
_PLAIN = (str, int, float, type(None))
_TYPES: dict[str, Any] = dict.fromkeys(("config", "versions", "hardware"), dict)
_TYPES |= {"key": list, "commit": (dict, *_PLAIN)}  # other fields are plain
_OWN = ("metrics.jsonl", "sessions.jsonl", "curves", "figures", "checkpoints", "weights")
LOCK = ".lock"
LOCK_SECONDS = 10.0  # worker processes of a killed run notice its end within 5
LARGEST = 1 << 30  # bytes that are read of a file, or unpacked from curves
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Run:
    """One run's folder; use :meth:`create` to write to it and :meth:`open` to read it.

    Example:
        >>> import tempfile
        >>> temporary = tempfile.TemporaryDirectory()
        >>> folder = Path(temporary.name, "run")
        >>> with Run.create(folder, "uci", {"epochs": 5}, "geoparam run", key=("seed",)) as run:
        ...     for seed in range(3):
        ...         run.append({"seed": seed, "test_rmse": 0.5 / (seed + 1)})
        >>> Run.open(folder).records()[1]
        {'seed': 1, 'test_rmse': 0.25}
        >>> temporary.cleanup()
    """

    def __init__(self, folder: Path, info: Record, lock: FileLock | None = None) -> None:
        self.folder = folder
        self.info = info  # what its config.json holds
        self._lock = lock  # None while this object has not written

    @classmethod
    def create(
        cls,
        folder: str | Path,
        experiment: str,
        config: Mapping[str, Any],
        command: str | None = None,
        *,
        key: Sequence[str] = (),
        resume: bool = False,
        may_change: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Start a run in a folder, or go on with the one that is there.

        Args:
            folder: made if need be.
            experiment: its name.
            config: all that decides the numbers, as JSON can hold it.
            command: what a user types to do it again; by default, what was typed now.
            key: the fields whose values tell one piece of work from another; without them every
                record counts.
            resume: go on where there is a run; without it, that is an error.
            may_change: entries of the configuration that say how much is done, not how.
            defaults: of options that an older run did not have.
        """
        folder = _check_folder(Path(folder))
        wanted = {"experiment": experiment, "config": dict(config), "key": list(key)}
        now = describe_session(command)
        lock = _lock_folder(folder)
        try:
            if not (folder / "config.json").exists():
                with replacing(folder / "config.json") as unfinished:
                    text = json.dumps(_to_json({"format": 1, **wanted, **now}), indent=2)
                    unfinished.write_text(text + "\n")
                return cls(folder, cls.open(folder).info, lock)

            run = cls(folder, cls.open(folder).info, lock)
            if not resume:
                raise FileExistsError(
                    f"{folder} already holds a run ({run.info['experiment']}, started "
                    f"{run.info['started']}). Continue it with --resume, or choose another folder"
                )
            before = {**run.info, "config": {**(defaults or {}), **run.info["config"]}}
            _check_same(folder, before, wanted, may_change)
            for name in ("metrics.jsonl", "sessions.jsonl"):
                _remove_unfinished_line(folder, name)
            _append(folder / "sessions.jsonl", {**now, "config": wanted["config"]})
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """The run in a folder, to read it."""
        folder = Path(folder)
        if not folder.exists():
            raise FileNotFoundError(
                f"{folder} does not exist. Name a folder that was --out of geoparam run"
            )
        if not os.path.lexists(folder / "config.json"):
            raise FileNotFoundError(
                f"{folder} holds no run: there is no config.json in it. Name a folder that was "
                "--out of geoparam run"
            )
        content = read_file(folder, "config.json")
        where = str(folder / "config.json")
        return cls(folder, _decode(content, where, _RUN, "Start the run anew"))

    def close(self) -> None:
        """Let other processes write to the folder; this object can still read it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self) -> None:
        """Keep other processes from writing to the folder."""
        if self._lock is None:
            self._lock = _lock_folder(self.folder)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of a finished piece of work."""
        missing = [field for field in self.info["key"] if field not in record]
        if missing:
            raise ValueError(
                f"a record of this run needs {', '.join(self.info['key'])}, its key; "
                f"{', '.join(missing)} not in {sorted(record)}"
            )
        self._hold()
        _append(self.folder / "metrics.jsonl", dict(record))

    def append_missing(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the records whose keys are not there yet."""
        there = set(map(self.key_of, self.records()))
        for record in records:
            if self.key_of(record) not in there:
                self.append(record)

    def records(self) -> list[Record]:
        """The records, the first for each key, in the order in which they were finished."""
        first: dict[Any, Record] = {}
        lines = _read_lines(self.folder, "metrics.jsonl", self.info["key"])
        for number, record in enumerate(lines):
            first.setdefault(self.key_of(record) or number, record)
        return list(first.values())

    def key_of(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the values that tell a record from others."""
        return tuple(record[name] for name in self.info["key"])

    @property
    def config(self) -> Record:
        """The configuration, as the last session had it."""
        return self.sessions()[-1]["config"]

    @contextlib.contextmanager
    def explain_damage(self) -> Iterator[None]:
        """Name the folder where its contents raise an error of Python's."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self.folder} is damaged, or another version's ({what})."
            ) from error

    def sessions(self) -> list[Record]:
        """Command, versions, commit, hardware and start of each session, the first one first."""
        lines = _read_lines(self.folder, "sessions.jsonl", _SESSION)
        return [{name: self.info[name] for name in _SESSION}, *lines]

    def save_curves(self, name: str, **arrays: Any) -> Path:
        """Write arrays to curves/NAME.npz, whole or not at all."""
        self._hold()
        path = self.folder / "curves" / f"{name}.npz"
        with replacing(path) as unfinished:
            np.savez_compressed(unfinished, **arrays)
        return path

    def curves(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of curves/NAME.npz."""
        path = self.folder / "curves" / f"{name}.npz"
        if not os.path.lexists(path):
            raise ValueError(
                f"{path} is missing: remove its line from metrics.jsonl, and --resume makes both."
            )
        check_file(self.folder, f"curves/{name}.npz")
        _check_unpacked_size(path)
        return read_npz(path)

    def curve_names(self) -> list[str]:
        """Names under which there are curves."""
        return sorted(path.stem for path in (self.folder / "curves").glob("*.npz"))

    def figure(self, name: str, figure: Any, caption: str = "") -> Path:
        """Write a matplotlib figure to figures/NAME.png and its caption to NAME.txt."""
        self._hold()
        path = self.folder / "figures" / f"{name}.png"
        with replacing(path) as unfinished:
            figure.savefig(unfinished, dpi=150)
        if caption:
            with replacing(path.with_suffix(".txt")) as unfinished:
                unfinished.write_text(" ".join(caption.split()) + "\n", encoding="utf-8")
        return path


def group_records(records: Iterable[Record], *fields: str) -> dict[tuple[Any, ...], list[Record]]:
    """Return the records by their values in some fields, in the order in which these occur."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[field] for field in fields), []).append(record)
    return groups


def select_records(records: Iterable[Record], **fields: Any) -> list[Record]:
    """Return the records that have these values."""
    return [r for r in records if all(r[name] == value for name, value in fields.items())]


def _check_folder(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"a run is a folder, and {folder} is a file. Choose another name")
    contents = [name for name in _OWN if (folder / name).exists()]
    if contents and not (folder / "config.json").exists():
        raise FileExistsError(
            f"{folder} holds {', '.join(contents)} without config.json, so it is of something "
            "else and would be written over. Choose another folder"
        )
    return folder


def _check_same(folder: Path, info: Record, wanted: Record, may_change: Sequence[str]) -> None:
    """Raise ValueError that names what a resumed run would do otherwise."""
    old = {**info["config"], "experiment": info["experiment"], "key": info["key"]}
    new = {**wanted["config"], "experiment": wanted["experiment"], "key": wanted["key"]}
    changes = [
        f"{name}={old.get(name)!r}, now {new.get(name)!r}"
        for name in {**old, **new}
        if name not in may_change and _to_json(old.get(name)) != _to_json(new.get(name))
    ]
    if changes:
        raise ValueError(
            f"{folder} holds a run with {'; '.join(changes)}. A resumed run must do what it was "
            "started for: give the same options, or another folder"
        )


def _lock_folder(folder: Path) -> FileLock:
    """Return the lock of a folder, acquired; it is released when the object is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{folder} is in use: another process, on this machine or on one that shares its "
            "file system, is writing to it. Wait until it ends, or choose another folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise OSError(
            f"{folder} cannot be locked, so two processes could write to it at once ({error}). "
            "Choose a folder that you may write to, on a file system with locks."
        ) from error
    return lock


def check_file(folder: Path, name: str, most: int = LARGEST) -> Path:
    """Return the path of a run's file; ValueError unless it is a regular file of up to `most`."""
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise ValueError(f"{path} is a link, or in a linked folder; it must be in the run's own.")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file.")
    if status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes; at most {most:,} are read.")
    return path


def read_file(folder: Path, name: str, most: int = LARGEST) -> bytes:
    """Return the content of a run's file; see `check_file`."""
    return check_file(folder, name, most).read_bytes()


def _check_unpacked_size(path: Path) -> None:
    try:
        with open_zip(path, LARGEST) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if size > LARGEST:
        raise ValueError(f"{path} unpacks to {size:,} bytes; at most {LARGEST:,} are read.")


def _remove_unfinished_line(folder: Path, name: str) -> None:
    """Remove what a kill or a full disk left of a file's last line."""
    path = folder / name
    if path.exists():
        os.truncate(path, read_file(folder, name).rfind(b"\n") + 1)


def _append(path: Path, record: Record) -> None:
    """Add a line to a file, whole or not at all."""
    line = json.dumps(_to_json(record), allow_nan=False) + "\n"
    left = line.encode()
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            while left:
                left = left[file.write(left) :]  # fewer bytes on a disk that is almost full
        except OSError:
            file.truncate(end)
            raise


def _read_lines(folder: Path, name: str, fields: Iterable[str]) -> list[Record]:
    """The records in a file's complete lines."""
    path = folder / name
    if not os.path.lexists(path):
        return []
    content = read_file(folder, name)
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [_decode(line, f"{path}, line {n}", fields) for n, line in enumerate(lines, start=1)]


def _to_json(value: Any) -> Any:
    """The value in JSON's types: arrays as lists, numbers that JSON lacks as strings."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def _from_json(value: Any) -> Any:
    """The inverse: strings that name numbers become these."""
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _decode(
    content: bytes,
    where: str,
    fields: Iterable[str],
    advice: str = "Remove that line and do its work again",
) -> Record:
    """Return the object in a piece of JSON, which must have these fields."""
    try:
        record: Record = _from_json(read_json(content, where))
    except RecursionError as error:
        raise ValueError(f"{where} is damaged: nested too deeply. {advice}") from error
    except ValueError as error:
        raise ValueError(f"{error}. {advice}") from error
    wrong = [n for n in fields if not isinstance(record.get(n, ...), _TYPES.get(n, _PLAIN))]
    if wrong:
        names = ", ".join(map(str, wrong))
        raise ValueError(f"{where} is damaged: it has no {names}, or a wrong one. {advice}")
    return record
