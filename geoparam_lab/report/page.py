"""The page: what was found, the sliders, what that does not show; then each run in detail.

It is one file, filled in by Jinja, which escapes whatever comes from folders. Pictures are data
URIs, style and script are inside, and a content security policy forbids everything else: no
request leaves the page, and no script runs but its own, whose checksum the policy names. What is
missing from a folder is left out with a word.
"""

import base64
import contextlib
import functools
import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import geoparam as gp
from geoparam.storage import replacing
from geoparam_lab import experiments
from geoparam_lab.experiments import papers
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.plots import CYCLE, curve_styles
from geoparam_lab.run_folder import Run, read_file
from geoparam_lab.tables import tables

Array = np.ndarray

MARK = b'<meta name="generator" content="geoparam">'  # by which we know a page of ours
SCRIPTS = ("drawing.js", "panels.js", "page.js")
LARGEST_FIGURE, LONGEST_CAPTION = 1 << 26, 1 << 16  # in bytes
PRINTED = 96 / 150  # a picture's size on the page: Run.figure has 150 pixels to the inch, CSS 96


def write(runs: Iterable[Run | str | Path], out: str | Path, command: str = "") -> Path:
    """Write the page of some runs to a file, whole or not at all, and return its path."""
    text = make_page(runs, command)
    with replacing(Path(out)) as unfinished:
        # The name of a folder may be no Unicode.
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(out)


def make_page(runs: Iterable[Run | str | Path], command: str = "") -> str:
    """Return the page of some runs, or of their folders, as HTML; it shows the command."""
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not opened:
        raise ValueError("a report is of one run or more; got none. Name their folders.")
    titles = list(dict.fromkeys(find_experiment(r).make_title(r.config) for r in opened))
    return _load_template().render(
        title=", ".join(titles) if len(titles) <= 3 else f"{len(titles)} experiments",
        findings=_say_each(opened, lambda run: find_experiment(run).finding(run)),
        limits=_say_each(opened, lambda run: find_experiment(run).describe_limits(run)),
        runs=[_describe(run, number) for number, run in enumerate(opened)],
        command=command,
        papers=papers.CITATION,
        version=gp.__version__,
        style=_read("page.css"),
        script="\n" + "\n".join(map(_read, SCRIPTS)),
    )


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"checksum": _checksum, "unbroken": unbroken}
    return environment.get_template("page.html")


def _read(name: str) -> str:
    return files("geoparam_lab.report").joinpath("template", name).read_text(encoding="utf-8")


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def unbroken(text: str) -> str:
    """Return a text such as "GmP, init Glorot, rate 0.1" that breaks after commas only."""
    return re.sub("(?<!,) ", "\u00a0", text)


def _say_each(runs: Sequence[Run], what: Callable[[Run], str]) -> list[str]:
    """Return what experiments say of runs, once each; nothing where a run lacks what it needs.

    With several runs of one experiment, the folders are named.
    """
    by_sentence: dict[str, list[str]] = {}
    for run in runs:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):
            if sentence := what(run):
                by_sentence.setdefault(sentence, []).append(run.folder.resolve().name)
    names = [run.info["experiment"] for run in runs]
    if len(set(names)) == len(names):
        return list(by_sentence)
    return [f"{said} ({', '.join(folders)})" for said, folders in by_sentence.items()]


def _describe(run: Run, number: int) -> dict[str, Any]:
    with run.explain_damage():
        # By stem: "figure1" comes before "figure1-a", but "figure1.png" would come after.
        pictures = sorted((run.folder / "figures").glob("*.png"), key=lambda path: path.stem)
        return {
            "number": number,
            "heading": tables.make_heading(run),
            "about": find_experiment(run).about,
            "slider": _find_slider(run),
            "tables": tables.make_tables(run),
            "figures": [_read_figure(run.folder, path) for path in pictures],
            "commands": list_commands(run),
            "facts": describe_run(run),
        }


def _find_slider(run: Run) -> dict[str, Any] | None:
    """Return a slider's text and numbers, or why it cannot be drawn; None without a slider."""
    curve, shown = f"slider_{run.info['experiment']}", find_experiment(run).slider
    if shown is None or curve not in run.curve_names():
        return None
    try:
        arrays = run.curves(curve)
        start = find_largest(arrays[[*shown.strips][-1]])
        film = pack_slider(arrays)
    except (ValueError, OSError, KeyError, EOFError, IndexError) as error:
        return {"curve": curve, "error": str(error)}
    return {"film": film, "shown": shown, "start": start, "error": None}


def find_largest(motions: Array) -> tuple[int, int]:
    """Return the seed and the frame of the first method's largest motion: a slider opens there.

    Example:
        >>> find_largest(np.array([[[0.1, 0.2]], [[0.1, 9.0]], [[0.3, np.nan]]]))
        (1, 1)
    """
    finite = np.nan_to_num(motions[:, 0], nan=0.0, posinf=0.0)
    seed, frame = np.unravel_index(finite.argmax(), finite.shape)
    return int(seed), int(frame)


def _read_figure(folder: Path, path: Path) -> dict[str, Any]:
    """Return a picture with its caption: the text beside it, or else its name."""
    caption = path.stem.replace("_", " ").replace("-", " ").capitalize()
    with contextlib.suppress(OSError, ValueError):
        text = read_file(folder, f"figures/{path.stem}.txt", LONGEST_CAPTION).decode()
        caption = text.strip() or caption
    try:
        content = read_file(folder, f"figures/{path.name}", LARGEST_FIGURE)
        if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) < 24:
            raise ValueError("it is not a PNG.")
    except (OSError, ValueError) as error:
        return {"path": path, "error": str(error)}
    width, height = struct.unpack(">II", content[16:24])
    return {
        "path": path,
        "error": None,
        "caption": caption,
        "data": base64.b64encode(content).decode(),
        "width": round(width * PRINTED),
        "height": round(height * PRINTED),
    }


_ABOUT = ("kind", "methods", "seeds", "steps")  # what is shown; the rest is numbers


def pack_slider(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return what the page's script needs to draw a slider, from curves/slider_NAME.npz.

    Arrays over training have the axes seeds, methods, frames, and more.
    """
    about = {name: arrays[name].tolist() for name in _ABOUT}
    about["rate"] = arrays["rate"].item() if "rate" in arrays else None  # of older runs: unknown
    styles = curve_styles(about["methods"])
    dashes = []  # in widths of the line; none for a solid line
    for style in styles:
        dashes.append([] if isinstance(style.dash, str) else [2 * n for n in style.dash[1]])
    return about | {
        "colours": [style.colour for style in styles],
        "dashes": dashes,
        "units": list(CYCLE),
        "arrays": {name: pack(array) for name, array in arrays.items() if name not in about},
    }


def pack(array: Array) -> dict[str, Any]:
    """Return an array as its shape, its type and its zlib-compressed bytes in base64.

    Browsers unpack these by themselves (DecompressionStream). Floats have 12 bits of mantissa,
    which is finer than a pixel, and compress to half. Bytes, whose last axes are frames, rows and
    columns, become differences between frames, since little changes between two.
    """
    if array.dtype == np.uint8:
        kind = "u1"
        content = np.diff(array, axis=-3, prepend=array[..., :1, :, :] * 0)
    else:
        kind = "f4"
        half = np.uint32(0x400) * np.isfinite(array)  # of the last bit that is kept, to round
        content = (array.astype("<f4").view("<u4") + half) & np.uint32(0xFFFFF800)
    compressed = zlib.compress(np.ascontiguousarray(content).tobytes(), 9)
    data = base64.b64encode(compressed).decode()
    return {"shape": list(array.shape), "type": kind, "data": data}


def find_experiment(run: Run) -> Experiment:
    """Return a run's experiment."""
    return experiments.find(run.info["experiment"])


def describe_run(run: Run) -> dict[str, str]:
    """Return a run's options, and with what it was made; what is not known is left out."""
    sessions = run.sessions()
    facts = {key.replace("_", " "): _write(value) for key, value in run.config.items()}
    facts["started"] = _write(sessions[0]["started"])
    for name in ("hardware", "versions", "commit"):  # a run may be resumed on another machine
        different = dict.fromkeys(_write(s[name]) for s in sessions if s.get(name))
        if different:
            facts[name] = "; then ".join(different)
    return facts


def _write(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_write(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_write, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not given" if value is None else str(value)


def list_commands(run: Run) -> list[str]:
    """Return the commands that made a run; those of later sessions end with --resume."""
    return list(dict.fromkeys(session["command"] for session in run.sessions()))
