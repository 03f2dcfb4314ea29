"""The page: what was found, the sliders, what that does not show; then each run in detail.

It is one file. Pictures are data URIs, style and script are inside, and a content security policy
forbids everything else: no request leaves the page, and no script runs but its own, whose checksum
the policy names. What is missing from a folder is left out with a word.
"""

import base64
import contextlib
import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import geoparam as gp
from geoparam.storage import replacing
from geoparam_lab.experiments import papers
from geoparam_lab.report import html, run_text, slider
from geoparam_lab.report.html import Html, element, join
from geoparam_lab.run_folder import Run
from geoparam_lab.tables import tables

MARK = b'<meta name="generator" content="geoparam">'  # by which we know a page of ours
SCRIPTS = ("drawing.js", "panels.js", "page.js")
PRINTED = 96 / 150  # a picture's size on the page: Run.figure has 150 pixels to the inch, CSS 96


def write(
    runs: Iterable[Run | str | Path], out: str | Path, baseline: str = "", command: str = ""
) -> Path:
    """Write the page of some runs to a file, whole or not at all, and return its path."""
    text = make_page(runs, baseline, command)
    with replacing(Path(out)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Path(out)


def make_page(runs: Iterable[Run | str | Path], baseline: str = "", command: str = "") -> str:
    """Return the page of some runs, as HTML.

    Args:
        runs: the runs or their folders.
        baseline: the method that others are compared with; by default each experiment's.
        command: what was typed to make the page, to be shown in it.
    """
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    if not opened:
        raise ValueError("a report is of one run or more; got none. Name their folders.")
    sections = [_make_section(run, f"run-{i}", baseline) for i, run in enumerate(opened)]
    body = join(
        _make_opening(opened),
        *(part for i, run in enumerate(opened) for part in _make_sliders(run, f"slider-{i}")),
        *_list_limits(opened),
        _explain_numbers(opened),
        *sections,
        _make_closing(command),
    )
    return _fill_template(_make_title(opened), body)


def _fill_template(title: str, body: Html) -> str:
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


def _make_title(runs: Sequence[Run]) -> str:
    found = list(dict.fromkeys(run_text.make_title(run) for run in runs))
    return ", ".join(found) if len(found) <= 3 else "Experiments with geometric units"


def _make_opening(runs: Sequence[Run]) -> Html:
    """Return the title and a sentence for each run on what was found."""
    found = _say_each(runs, lambda run: run_text.find_experiment(run).finding(run))
    about = element(
        "p",
        "A ReLU unit is on at one side of its boundary and off at the other. Training changes the "
        "boundary through the unit's parameters: weight and bias (SP), a normalised weight (WN, "
        "BN), or the boundary's direction and distance themselves (GmP, Intrinsic).",
    )
    findings = element("ul", *(element("li", text) for text in found), class_="findings")
    return element("header", element("h1", _make_title(runs)), findings if found else None, about)


def _list_limits(runs: Sequence[Run]) -> Iterable[Html]:
    said = _say_each(runs, lambda run: run_text.find_experiment(run).limits(run))
    if said:
        yield element("h2", "What this does not show")
        yield element("p", "That GmP is always better.")
        yield element("ul", *(element("li", text) for text in said), class_="findings")


def _say_each(runs: Sequence[Run], what: Callable[[Run], str]) -> list[str]:
    return [text for run in runs if (text := run_text.say(what, run))]


def _explain_numbers(runs: Sequence[Run]) -> Html:
    entries = [
        element("li", element("a", run_text.make_heading(run), href=f"#run-{i}"))
        for i, run in enumerate(runs)
    ]
    return element(
        "section",
        element("h2", "In detail"),
        element("nav", element("ul", *entries), aria_label="Runs") if len(runs) > 1 else None,
        element(
            "p",
            "Numbers are means over seeds, which draw the initial weights, or over splits of the "
            "data, ± their standard errors. What the two papers behind GmP print (v1 and v2, "
            "named at the end) stands beside ours: ≈ says that both means are within two combined "
            "standard errors, ≠ that they are not. A number that the papers have from one seed is "
            "in or outside the range of our seeds, which is no agreement. “Rate” is the learning "
            "rate; for small networks the papers give GmP 0.1 and the others 0.01. RMSE is the "
            "root of the mean squared error.",
        ),
    )


def _make_section(run: Run, name: str, baseline: str) -> Html:
    about = run_text.describe(run)
    settings = run_text.describe_config(run.config, run_text.find_experiment(run))
    return element(
        "section",
        element("h2", run_text.make_heading(run)),
        element("p", about) if about else None,
        element("h3", "Results"),
        _make_tables(run, baseline),
        *_make_figures(run),
        element("h3", "How to run it again"),
        *_show_commands(run),
        element("h3", "What was run"),
        html.facts(settings),
        html.facts(run_text.describe_sessions(run)),
        id=name,
        class_="run",
    )


def _make_tables(run: Run, baseline: str) -> Html:
    found = tables.make_tables(run, baseline)
    if not found:
        return element("p", "No piece of work that a table can show is finished yet.")
    return join(*map(html.table, found))


def _show_commands(run: Run) -> Iterable[Html]:
    for command in run_text.list_commands(run):
        button = element("button", "Copy", type="button", data_copy="")
        code = element("pre", element("code", command), tabindex="0")
        yield element("div", code, button, class_="command")
    yield element(
        "p",
        "With the same versions on the same hardware the numbers are the same; elsewhere the last "
        "digits differ, and thousands of steps can make much of a last digit.",
        class_="notes",
    )


def _make_closing(command: str) -> Html:
    typed = element("p", "This page: ", element("code", command)) if command else None
    made = element("p", f"Made with geoparam {gp.__version__}.")
    return element("footer", element("p", papers.WHICH), typed, made)


# --- sliders and figures -----------------------------------------------------------------------


def _make_sliders(run: Run, name: str) -> Iterable[Html]:
    curve = f"slider_{run.info['experiment']}"
    if curve in run.curve_names():
        yield element("h2", f"{run_text.make_heading(run)}, epoch by epoch")
        try:
            yield _make_slider(slider.pack_slider(run.curves(curve)), name)
        except (ValueError, OSError, KeyError, EOFError) as error:
            yield element("p", f"The slider {curve} cannot be drawn: {error}")


def _make_slider(payload: dict[str, Any], name: str) -> Html:
    """Return a slider's controls and empty panels, with the numbers that the script draws."""
    shown = slider.find_slider(payload["kind"])
    last = len(payload["steps"]) - 1
    seeds = ["each method's median", *payload["seeds"]]
    options = [element("option", str(seed), value=i) for i, seed in enumerate(seeds)]
    controls = element(
        "div",
        element("button", "Play", type="button", data_play=""),
        element("label", "Epoch ", element("output", for_=f"{name}-epoch"), for_=f"{name}-epoch"),
        element("input", type="range", id=f"{name}-epoch", min=0, max=last, value=last, step=1),
        element("label", "Seed ", element("select", *options), class_="seed"),
        class_="controls",
    )
    panels = [_make_panel(title, "method") for title in payload["methods"]]
    below = [_make_panel(title, array) for array, title in shown.strips.items()]
    return element(
        "div",
        element("noscript", element("p", "The slider needs JavaScript.")),
        controls,
        element("div", *panels, class_="panels"),
        element("div", *below, class_="strips"),
        element("p", shown.text),
        html.data(payload),
        class_="slider",
        data_slider="",
        id=name,
    )


def _make_panel(title: str, what: str) -> Html:
    caption = element("figcaption", element("strong", title), " ", element("span"))
    canvas = element("canvas", role="img", aria_label=title, data_what=what)
    return element("figure", caption, canvas)


def _make_figures(run: Run) -> Iterable[Html]:
    # By stem: "figure1" comes before "figure1-units", but "figure1.png" would come after.
    paths = sorted((run.folder / "figures").glob("*.png"), key=lambda path: path.stem)
    if paths:
        yield element("h3", "Figures")
    yield from map(_make_figure, paths)


def _make_figure(path: Path) -> Html:
    """Return a picture with its caption: the text beside it, or else its name."""
    caption = path.stem.replace("_", " ").replace("-", " ").capitalize()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip() or caption
    try:
        content = path.read_bytes()
        width, height = _read_size(content)
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
    return element(
        "figure", html.scroll_box(image, path.stem), below, class_="picture", data_full=""
    )


def _read_size(content: bytes) -> tuple[int, int]:
    """Return width and height of a PNG."""
    if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) < 24:
        raise ValueError("it is not a PNG.")
    width, height = struct.unpack(">II", content[16:24])
    return width, height
