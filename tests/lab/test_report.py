"""The report: one page that holds everything; test_report_browser.py opens it."""

import base64
import html.parser
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders

from geoparam_lab import report
from geoparam_lab.experiments import ENTRIES
from geoparam_lab.report import page as report_page
from geoparam_lab.report.page import unbroken
from geoparam_lab.run_folder import Run

Array = np.ndarray

EVIL = "</script><script>alert('x')</script>\"'&<b onload=y>{{ title }}"
VOID = ("meta", "link", "img", "input")


class Parsed(html.parser.HTMLParser):
    """A page's elements and text; tags that do not match are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", [""]
        self.feed(page)
        self.close()
        assert self._open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self._open[-1] in ("script", "style") else data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    return report.write(run_folders.demo(base), base / "report.html", command="geoparam report *")


def test_the_page_holds_what_was_promised(page_file: Path) -> None:
    page = Parsed(page_file.read_text())
    for text in (
        "Levy regression",
        "UCI regression: fair",
        "sp, wn, bn, gmp",
        "1.104",
        "3.057 ± 0.144",
        "minus SP (k = 21)",
        "0.01\xa0(4), 0.1\xa0(6)",
        "Figure 2c. How far units move.",
        "geoparam run levy --seeds 5",
        "What this does not show",
        "geoparam report *",
        "NeurIPS 2024",
    ):
        assert text in page.text, text
    assert len(page.all("h1")) == 1 and len(page.all("table")) == 5
    assert len([a for a in page.all("input") if a["type"] == "range"]) == 2
    assert [a["lang"] for a in page.all("html")] == ["en"]


def test_the_page_refers_to_nothing_outside(page_file: Path) -> None:
    text = page_file.read_text()
    page = Parsed(text)
    links = [a[name] or "" for _, a in page.tags for name in ("src", "href") if name in a]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://", text)
    anchors = {a["id"] for _, a in page.tags if "id" in a}
    assert {link[1:] for link in links if link.startswith("#")} <= anchors


def test_every_control_and_picture_has_a_name(page_file: Path) -> None:
    page = Parsed(page_file.read_text())
    labels = {a.get("for") for a in page.all("label")}
    assert all(a["id"] in labels for a in page.all("input"))
    assert all(a["alt"] for a in page.all("img")) and all(
        a["aria-label"] for a in page.all("canvas")
    )
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_what_files_hold_is_text_and_never_markup(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {EVIL: EVIL, "methods": [EVIL]}, EVIL)
    run.append({"method": EVIL, "seed": 0, "test_rmse": 1.0})
    arrays = run_folders.add_seeds(run_folders.levy_slider(5))
    run.save_curves("slider_levy", **{**arrays, "methods": np.array([EVIL] * 4)})
    run_folders.picture(run.folder / "figures", "a&b", caption=EVIL)
    text = report.make_page([run], command=EVIL)
    page = Parsed(text)
    assert page.text.count(EVIL) >= 6
    assert "<script>alert" not in text and "</script><script>" not in text
    assert len(page.all("script")) == 2 and not any("onload" in a for _, a in page.tags)


def test_an_empty_run_is_said_to_be_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "uci", {}, "geoparam run uci")
    page = Parsed(report.make_page([run]))
    assert "is finished yet" in page.text and "geoparam run uci" in page.text


def test_figures_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "perturbation", {}, "geoparam run perturbation")
    for name in ("figure1-units", "seeds", "figure1", "figure2a-b"):
        run_folders.picture(run.folder / "figures", name)
    found = [a["alt"] for a in Parsed(report.make_page([run])).all("img")]
    assert found == ["Figure1", "Figure1 units", "Figure2a b", "Seeds"]


def test_the_page_has_the_configuration(page_file: Path) -> None:
    section = page_file.read_text().partition("UCI regression: fair</h2>")[2]
    facts = section.partition("What was run")[2].partition("</dl>")[0]
    assert "<dt>seeds</dt><dd>10</dd>" in facts
    assert "<dd>boston, concrete, energy" in facts


def test_damaged_files_are_left_out_with_a_word(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    arrays = run_folders.add_seeds(run_folders.levy_slider(5))
    run.save_curves("slider_levy", **{k: v for k, v in arrays.items() if k != "steps"})
    assert "levy cannot be drawn: &#39;steps&#39;" in report.make_page([run])
    (run.folder / "curves" / "slider_levy.npz").write_bytes(b"no archive")
    run_folders.picture(run.folder / "figures", "good")
    (run.folder / "figures" / "bad.png").write_bytes(b"GIF89a")
    page = Parsed(report.make_page([run]))
    assert "slider_levy cannot be drawn" in page.text
    assert "bad.png cannot be shown: it is not a PNG" in page.text
    assert [a["alt"] for a in page.all("img")] == ["Good"] and not page.all("canvas")


def test_a_page_shows_files_of_its_folder_alone(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    figures = run.folder / "figures"
    (tmp_path / "private").write_text("a private key")
    for name in ("caption", "link", "large"):
        run_folders.picture(figures, name)
    (figures / "caption.txt").unlink(missing_ok=True)
    (figures / "caption.txt").symlink_to(tmp_path / "private")
    (figures / "link.png").rename(tmp_path / "elsewhere.png")
    (figures / "link.png").symlink_to(tmp_path / "elsewhere.png")
    os.truncate(figures / "large.png", report_page.LARGEST_FIGURE + 1)
    os.mkfifo(figures / "pipe.png")
    page = Parsed(report.make_page([run]))
    assert "a private key" not in page.text
    assert [a["alt"] for a in page.all("img")] == ["Caption"]
    for name, reason in (("link", "is a link"), ("pipe", "not a regular"), ("large", "at most")):
        assert f"{name}.png cannot be shown: " in page.text and reason in page.text


def test_a_page_shows_no_linked_folder(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    run_folders.picture(tmp_path / "pictures", "private")
    (run.folder / "figures").symlink_to(tmp_path / "pictures")
    assert not Parsed(report.make_page([run])).all("img")


@pytest.mark.parametrize("experiment", ENTRIES)
def test_any_experiment_has_a_page_before_its_first_record(
    experiment: str, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", experiment, {}, f"geoparam run {experiment}")
    assert "is finished yet" in Parsed(report.make_page([run])).text


def test_the_commands_of_all_sessions_are_listed_once(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy --out x")
    run.close()
    for more in ("geoparam run levy --out x", "geoparam run levy --out x --resume"):
        Run.create(tmp_path / "run", "levy", {}, more, resume=True).close()
    assert report_page.list_commands(run) == [
        "geoparam run levy --out x",
        "geoparam run levy --out x --resume",
    ]


def unpack(packed: dict[str, Any]) -> Array:
    content = zlib.decompress(base64.b64decode(packed["data"]))
    if packed["type"] == "f4":
        return np.frombuffer(content, "<f4").reshape(packed["shape"])
    differences = np.frombuffer(content, np.uint8).reshape(packed["shape"])
    return differences.cumsum(axis=-3, dtype=np.uint8)


def test_floats_keep_12_bits_and_what_is_not_finite() -> None:
    values = np.array([[1.0, -1 / 3, 1e30, 0.0], [np.inf, -np.inf, np.nan, 65535.9]])
    found = unpack(report_page.pack(values))
    known = np.isfinite(values)
    np.testing.assert_allclose(found[known], values[known], rtol=2**-13)
    np.testing.assert_array_equal(found[~known], values[~known])


def test_bytes_come_back_exactly() -> None:
    values = np.random.default_rng(0).integers(0, 256, (2, 5, 3, 4), dtype=np.uint8)
    np.testing.assert_array_equal(unpack(report_page.pack(values)), values)


def test_only_lists_in_cells_may_break(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    for seed, lr in enumerate((0.01, 0.1, 0.1)):
        run.append({"method": "sp", "seed": seed, "lr": lr, "test_rmse": 1.5e-7 * seed})
        run.append({"method": "wn", "seed": seed, "lr": lr, "test_rmse": -2e9})
    found = report.make_page([run])
    assert "<td>-2.00e+09 ± 0</td>" in found
    assert '<td class="long">0.01\xa0(1), 0.1\xa0(2)</td>' in found
    assert unbroken("SP, rate 0.1") == "SP, rate\xa00.1"
