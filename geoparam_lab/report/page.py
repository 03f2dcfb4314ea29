"""The page: what it is, then each run with its tables, slider, figures and command.

It is one file. Pictures are data URIs, style and script are inside, and a content security policy
forbids everything else: no request leaves the page, and no script runs but its own, whose checksum
the policy names. What is missing from a folder is left out with a word.
"""

import base64
import contextlib
import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import geoparam as gp
from geoparam.storage import replacing
from geoparam_lab.report import html, run_text, slider
from geoparam_lab.report.html import Html, element, join
from geoparam_lab.run_folder import Run
from geoparam_lab.tables import reference, tables

MARK = b'<meta name="generator" content="geoparam">'  # by which we know a page of ours
SCRIPTS = ("drawing.js", "panels.js", "page.js")
PRINTED = 96 / 150  # a picture's size on the page: Run.figure has 150 pixels to the inch, CSS 96

_EXPLAINED = {
    "levy": (
        "Move the slider to see the networks at any epoch of one seed; frames are closer at "
        "first, when most happens. Dots are the training data, the dashed line is the true "
        "function and the solid one the network. Each tick at the bottom is a point where a unit "
        "switches.",
        (("loss", "Training loss"), ("moves", "Largest move of a unit since the frame before")),
    ),
    "banana": (
        "Move the slider to see the networks at any epoch of one seed. Circles and triangles are "
        "the two classes; the shade is what the network decides, the "
        "thick line is where it changes its mind. A unit is off on one side of its thin line and "
        "on where the teeth point; the star is its location φ, the line's nearest point to "
        "the origin (+).",
        (
            ("accuracy", "Test accuracy"),
            ("rotation", "Largest turn of a unit since the frame before (°)"),
        ),
    ),
}


def write(
    runs: Iterable[Run | str | Path], out: str | Path, baseline: str = "sp", command: str = ""
) -> Path:
    """Write the page of some runs to a file, whole or not at all, and return its path.

    Args:
        runs: the runs or their folders.
        out: the HTML file.
        baseline: the method that others are compared with on the same seeds or splits.
        command: what was typed to make the page, to be shown in it.
    """
    text = page(runs, baseline, command)
    with replacing(Path(out)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Path(out)


def page(runs: Iterable[Run | str | Path], baseline: str = "sp", command: str = "") -> str:
    """Return the page of some runs, as HTML.

    Args:
        runs: the runs or their folders.
        baseline: the method that others are compared with on the same seeds or splits.
        command: what was typed to make the page, to be shown in it.
    """
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not opened:
        raise ValueError("a report is of one run or more; got none. Name their folders.")
    sections = [_section(run, f"run-{i}", baseline) for i, run in enumerate(opened)]
    body = join(_opening(opened), *sections, _closing(command))
    return _filled(_title(opened), body)


def _filled(title: str, body: Html) -> str:
    """Put title and body into the template, with style, script and their checksums."""
    style, script = _resource("page.css"), "\n" + "\n".join(map(_resource, SCRIPTS))
    parts = {
        "style-checksum": _checksum(style),
        "script-checksum": _checksum(script),
        "style": style,
        "script": script,
        "title": join(title),
        "body": body,
    }
    return re.sub("@([a-z-]+)@", lambda name: parts[name[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return files("geoparam_lab.report").joinpath("template", name).read_text(encoding="utf-8")


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- the page's parts --------------------------------------------------------------------------


def _title(runs: Sequence[Run]) -> str:
    found = list(dict.fromkeys(run_text.title(run) for run in runs))
    return ", ".join(found) if len(found) <= 3 else "Experiments with geometric units"


def _opening(runs: Sequence[Run]) -> Html:
    entries = [
        element("li", element("a", run_text.heading(run), href=f"#run-{i}"))
        for i, run in enumerate(runs)
    ]
    return element(
        "header",
        element("h1", _title(runs)),
        element(
            "p",
            "This page shows what came out when geoparam trained ReLU networks whose units are "
            "parameterised in different ways: standard (SP), with weight normalisation (WN) or "
            "batch normalisation (BN), or geometric, by the angles (GmP) or the intrinsic "
            "coordinates (Intrinsic) of each unit's direction. A unit is on at one side of its "
            "boundary and off at the other; the question is how training moves these boundaries.",
        ),
        element(
            "p",
            "Numbers are means over seeds, which draw the initial weights, or over splits of the "
            "data, ± their standard errors. What the two papers behind GmP print (v1 and v2, "
            "named at the end) stands beside ours: ≈ says that both are within two combined "
            "standard errors, ≠ that they are not. “Rate” is the learning rate; for small "
            "networks the papers give GmP 0.1 and the others 0.01. RMSE is the root of the mean "
            "squared error. Each run ends with the command that makes it again.",
        ),
        element("nav", element("ul", *entries), aria_label="Runs") if len(runs) > 1 else None,
    )


def _section(run: Run, name: str, baseline: str) -> Html:
    about = run_text.about(run)
    return element(
        "section",
        element("h2", run_text.heading(run)),
        element("p", about) if about else None,
        element("h3", "What was run"),
        _what_was_run(run),
        element("h3", "Results"),
        _tables(run, baseline),
        *_sliders(run, name),
        *_figures(run),
        element("h3", "How to run it again"),
        *_again(run),
        id=name,
        class_="run",
    )


def _what_was_run(run: Run) -> Html:
    experiment = str(run.info.get("experiment"))
    asked = run_text.configuration(run.config, experiment)
    return join(html.facts(asked), html.facts(run_text.circumstances(run)))


def _tables(run: Run, baseline: str) -> Html:
    found = tables.tables(run, baseline)
    if not found:
        return element("p", "No piece of work that a table can show is finished yet.")
    return join(*map(html.table, found))


def _again(run: Run) -> Iterable[Html]:
    for command in run_text.commands(run):
        button = element("button", "Copy", type="button", data_copy="")
        code = element("pre", element("code", command), tabindex="0")
        yield element("div", code, button, class_="command")
    yield element(
        "p",
        "With the same versions on the same hardware the numbers come again; elsewhere the last "
        "digits differ, and thousands of steps can make much of a last digit.",
        class_="notes",
    )


def _closing(command: str) -> Html:
    typed = element("p", "This page: ", element("code", command)) if command else None
    made = element("p", f"Made with geoparam {gp.__version__}.")
    return element("footer", element("p", reference.WHICH), typed, made)


# --- sliders and figures -----------------------------------------------------------------------


def _sliders(run: Run, name: str) -> Iterable[Html]:
    for curve in run.curve_names():
        if curve.startswith("slider"):
            yield element("h3", "Through training")
            try:
                yield _slider(slider.payload(run.curves(curve)), f"{name}-{curve}")
            except (ValueError, OSError, KeyError, EOFError) as error:
                yield element("p", f"The slider {curve} cannot be drawn: {error}")


def _slider(payload: dict[str, Any], name: str) -> Html:
    """Return a slider's controls and empty panels, with the numbers that the script draws."""
    explanation, strips = _EXPLAINED[payload["kind"]]
    last = len(payload["steps"]) - 1
    controls = element(
        "div",
        element("button", "Play", type="button", data_play=""),
        element("label", "Epoch ", element("output", for_=name), for_=name),
        element("input", type="range", id=name, min=0, max=last, value=last, step=1),
        class_="controls",
    )
    panels = [_panel(title, "method") for title in payload["methods"]]
    below = [_panel(title, array) for array, title in strips]
    return element(
        "div",
        element("p", explanation),
        element("noscript", element("p", "The slider needs JavaScript.")),
        controls,
        element("div", *panels, class_=f"panels {payload['kind']}"),
        element("div", *below, class_="strips"),
        html.data(payload),
        class_="slider",
        data_slider="",
    )


def _panel(title: str, what: str) -> Html:
    caption = element("figcaption", element("strong", title), " ", element("span"))
    canvas = element("canvas", role="img", aria_label=title, data_what=what)
    return element("figure", caption, canvas)


def _figures(run: Run) -> Iterable[Html]:
    # By stem: "figure1" comes before "figure1-units", but "figure1.png" would come after.
    paths = sorted((run.folder / "figures").glob("*.png"), key=lambda path: path.stem)
    if paths:
        yield element("h3", "Figures")
    yield from map(_figure, paths)


def _figure(path: Path) -> Html:
    """Return a picture with its caption: the text beside it, or else its name."""
    caption = path.stem.replace("_", " ").replace("-", " ").capitalize()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip() or caption
    try:
        content = path.read_bytes()
        width, height = _size(content)
    except (OSError, ValueError) as error:
        return element("p", f"The figure {path.name} cannot be shown: {error}")
    image = element(
        "img",
        src="data:image/png;base64," + base64.b64encode(content).decode(),
        width=round(width * PRINTED),
        height=round(height * PRINTED),
        alt=caption,
    )
    button = element("button", "Full size", type="button", aria_label=f"Full size: {path.stem}")
    below = element("figcaption", caption, " ", button)
    return element("figure", image, below, class_="picture", data_full="")


def _size(content: bytes) -> tuple[int, int]:
    """Return width and height of a PNG."""
    if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) < 24:
        raise ValueError("it is not a PNG.")
    width, height = struct.unpack(">II", content[16:24])
    return width, height
