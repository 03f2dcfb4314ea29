"""The report: one page that holds everything; test_report_browser.py opens it."""

import base64
import html.parser
import os
import re
import zlib
from collections.abc import Callable
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

MARKUP = "</script><script>alert('x')</script>\"'&<b onload=y>{{ title }}"
TAGS_WITHOUT_AN_END = ("meta", "link", "img", "input")

Attributes = dict[str, str | None]


class Parsed(html.parser.HTMLParser):
    """A page's elements and text; tags that do not match are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Attributes]] = []
        self.text = ""
        self._open = [""]
        self.feed(page)
        self.close()
        assert self._open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in TAGS_WITHOUT_AN_END:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[Attributes]:
        """The attributes of every element of this tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def values(self, attribute: str) -> list[str]:
        """The values of an attribute, of any element."""
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]

    def image_names(self) -> list[str | None]:
        return [image["alt"] for image in self.all("img")]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    return report.write(run_folders.demo(base), base / "report.html", command="geoparam report *")


@pytest.fixture(scope="module")
def page(page_file: Path) -> Parsed:
    return Parsed(page_file.read_text())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of Levy without records."""
    return Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")


def page_of(run: Run) -> Parsed:
    return Parsed(report.make_page([run]))


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_the_page_says(page: Parsed, text: str) -> None:
    assert text in page.text


def test_the_page_has_a_title_tables_and_sliders(page: Parsed) -> None:
    sliders = [attributes for attributes in page.all("input") if attributes["type"] == "range"]

    assert len(page.all("h1")) == 1
    assert len(page.all("table")) == 5
    assert len(sliders) == 2
    assert page.all("html")[0]["lang"] == "en"


def test_the_page_loads_nothing_from_outside(page_file: Path, page: Parsed) -> None:
    links = page.values("src") + page.values("href")

    assert links
    for link in links:
        assert link.startswith(("data:", "#"))
    loads = r"@import|url\(|fetch\(|XMLHttpRequest|https?://"
    assert not re.search(loads, page_file.read_text())


def test_links_within_the_page_have_a_target(page: Parsed) -> None:
    links = {link for link in page.values("href") if link.startswith("#")}

    assert links <= {f"#{id}" for id in page.values("id")}


def test_every_control_and_picture_has_a_name(page: Parsed) -> None:
    labelled = page.values("for")

    for control in page.all("input"):
        assert control["id"] in labelled
    for image in page.all("img"):
        assert image["alt"]
    for canvas in page.all("canvas"):
        assert canvas["aria-label"]


def test_no_two_elements_have_one_id(page: Parsed) -> None:
    ids = page.values("id")

    assert len(ids) == len(set(ids))


def test_the_content_of_files_is_text_and_never_markup(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "levy", {MARKUP: MARKUP, "methods": [MARKUP]}, MARKUP)
    run.append({"method": MARKUP, "seed": 0, "test_rmse": 1.0})
    slider = run_folders.add_seeds(run_folders.levy_slider(5))
    slider["methods"] = np.array([MARKUP] * 4)
    run.save_curves("slider_levy", **slider)
    run_folders.picture(run.folder / "figures", "a&b", caption=MARKUP)

    text = report.make_page([run], command=MARKUP)

    page = Parsed(text)
    assert page.text.count(MARKUP) >= 6
    assert "<script>alert" not in text
    assert "</script><script>" not in text
    assert len(page.all("script")) == 2
    assert not page.values("onload")


def test_an_empty_run_is_said_to_be_so(run: Run) -> None:
    page = page_of(run)

    assert "is finished yet" in page.text
    assert "geoparam run levy" in page.text


def test_figures_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "perturbation", {}, "geoparam run perturbation")
    for name in ("figure1-units", "seeds", "figure1", "figure2a-b"):
        run_folders.picture(run.folder / "figures", name)

    assert page_of(run).image_names() == ["Figure1", "Figure1 units", "Figure2a b", "Seeds"]


def test_the_page_has_the_configuration(page_file: Path) -> None:
    _, _, section = page_file.read_text().partition("UCI regression: fair</h2>")
    _, _, configuration = section.partition("What was run")
    configuration, _, _ = configuration.partition("</dl>")

    assert "<dt>seeds</dt><dd>10</dd>" in configuration
    assert "<dd>boston, concrete, energy" in configuration


def test_a_slider_without_an_array_is_left_out_with_a_word(run: Run) -> None:
    slider = run_folders.add_seeds(run_folders.levy_slider(5))
    slider.pop("steps")
    run.save_curves("slider_levy", **slider)

    assert "levy cannot be drawn: 'steps'" in page_of(run).text


def test_a_damaged_slider_is_left_out_with_a_word(run: Run) -> None:
    run.save_curves("slider_levy", **run_folders.levy_slider(5))
    (run.folder / "curves" / "slider_levy.npz").write_bytes(b"no archive")

    page = page_of(run)

    assert "slider_levy cannot be drawn" in page.text
    assert not page.all("canvas")


def test_a_figure_that_is_no_png_is_left_out_with_a_word(run: Run) -> None:
    run_folders.picture(run.folder / "figures", "good")
    (run.folder / "figures" / "bad.png").write_bytes(b"GIF89a")

    page = page_of(run)

    assert page.image_names() == ["Good"]
    assert "bad.png cannot be shown: it is not a PNG" in page.text


def test_a_caption_that_is_a_link_is_not_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("a private key")
    run_folders.picture(run.folder / "figures", "figure")
    (run.folder / "figures" / "figure.txt").symlink_to(tmp_path / "private")

    page = page_of(run)

    assert page.image_names() == ["Figure"]
    assert "a private key" not in page.text


def make_link(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere.png"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def make_large(path: Path) -> None:
    os.truncate(path, report_page.LARGEST_FIGURE + 1)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("replace", "reason"),
    [(make_link, "is a link"), (make_large, "at most"), (make_pipe, "not a regular")],
)
def test_only_figures_that_are_files_of_the_folder_are_shown(
    run: Run, replace: Callable[[Path], None], reason: str
) -> None:
    run_folders.picture(run.folder / "figures", "bad")
    replace(run.folder / "figures" / "bad.png")

    page = page_of(run)

    assert page.image_names() == []
    assert re.search(f"bad.png cannot be shown: .*{reason}", page.text)


def test_a_page_shows_no_linked_folder(run: Run, tmp_path: Path) -> None:
    run_folders.picture(tmp_path / "pictures", "private")
    (run.folder / "figures").symlink_to(tmp_path / "pictures")

    assert page_of(run).image_names() == []


@pytest.mark.parametrize("experiment", ENTRIES)
def test_any_experiment_has_a_page_before_its_first_record(
    experiment: str, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", experiment, {}, f"geoparam run {experiment}")

    assert "is finished yet" in page_of(run).text


def test_the_commands_of_all_sessions_are_listed_once(tmp_path: Path) -> None:
    command = "geoparam run levy --out x"
    run = Run.create(tmp_path / "run", "levy", {}, command)
    run.close()
    for later in (command, f"{command} --resume"):
        Run.create(tmp_path / "run", "levy", {}, later, resume=True).close()

    assert report_page.list_commands(run) == [command, f"{command} --resume"]


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """What the page's script makes of a packed array."""
    content = zlib.decompress(base64.b64decode(packed["data"]))
    if packed["type"] == "f4":
        return np.frombuffer(content, "<f4").reshape(packed["shape"])
    differences = np.frombuffer(content, np.uint8).reshape(packed["shape"])
    return differences.cumsum(axis=-3, dtype=np.uint8)


def test_floats_keep_12_bits() -> None:
    values = np.array([[1.0, -1 / 3, 1e30, 0.0, 65535.9]])

    np.testing.assert_allclose(unpack(report_page.pack(values)), values, rtol=2**-13)


def test_floats_that_are_not_finite_are_kept() -> None:
    values = np.array([[1.0, np.inf, -np.inf, np.nan]])

    np.testing.assert_array_equal(unpack(report_page.pack(values)), values)


def test_bytes_come_back_exactly() -> None:
    values = np.random.default_rng(0).integers(0, 256, (2, 5, 3, 4), dtype=np.uint8)

    np.testing.assert_array_equal(unpack(report_page.pack(values)), values)


def test_only_lists_in_cells_may_break(run: Run) -> None:
    for seed, lr in enumerate((0.01, 0.1, 0.1)):
        run.append({"method": "sp", "seed": seed, "lr": lr, "test_rmse": 1.5e-7 * seed})
        run.append({"method": "wn", "seed": seed, "lr": lr, "test_rmse": -2e9})

    text = report.make_page([run])

    assert "<td>-2.00e+09 ± 0</td>" in text
    assert '<td class="long">0.01\xa0(1), 0.1\xa0(2)</td>' in text


def test_numbers_do_not_break_from_their_words() -> None:
    assert unbroken("SP, rate 0.1") == "SP, rate\xa00.1"
