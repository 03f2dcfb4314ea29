"""The report in a real browser: the slider moves, nothing complains, nothing leaves the page."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import run_folders

from geoparam_lab import report
from geoparam_lab.run_folder import Run

Look = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    browser.find() is None, reason="no Chromium: install Debian's package chromium, or Chrome"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folders = run_folders.demo(tmp_path_factory.mktemp("runs"))
    return report.make_page(folders, command="geoparam")


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Return what a script finds in a page that neither complains nor asks for anything."""

    def find(page: str, script: str, width: int = 1280, dark: bool = False) -> Any:
        value, errors, requests = browser.look(page, script, tmp_path, width, dark)
        assert errors == []
        assert requests == []
        return value

    return find


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_the_page_opens_and_fits(look: Look, page: str, width: int, dark: bool) -> None:
    script = """return [document.documentElement.scrollWidth,
        document.images[0].naturalWidth, all("[data-slider]")[0].getBoundingClientRect().top,
        getComputedStyle(document.body).backgroundColor]"""

    page_width, picture_width, slider_top, background = look(page, script, width, dark)

    assert page_width == width
    assert picture_width == 1500
    assert background == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    screen_height = 600 if width > 600 else 900
    assert slider_top < screen_height


@pytest.mark.parametrize(("width", "least", "most"), [(1280, 1200, 1280), (500, 1500, 1500)])
def test_full_size_fits_a_screen_and_keeps_all_pixels_on_a_phone(
    look: Look, page: str, width: int, least: int, most: int
) -> None:
    """1500 pixels: on the page 960, in the dialog what a screen has, on a phone all of them."""
    script = """all(".picture img")[0].click();
        const sizes = all(".picture img, dialog img").map((image) => image.clientWidth);
        all("dialog button")[0].click();
        await frame();
        return [...sizes, all("dialog").length]"""

    on_the_page, in_the_dialog, open_dialogs = look(page, script, width)

    assert on_the_page == 960
    assert least <= in_the_dialog <= most
    assert open_dialogs == 0


def test_wide_tables_scroll_by_themselves_and_methods_stay_in_sight(look: Look, page: str) -> None:
    script = """const box = all(".table .scroll").find((box) => box.scrollWidth > 800);
        box.scrollLeft = 300;
        const left = (element) => element.getBoundingClientRect().left;
        return [all(".scroll").every((box) => box.clientWidth <= innerWidth), box.scrollLeft,
            ...[...box.querySelectorAll("tr > :first-child")].map((e) => left(e) - left(box))]"""

    fits, scrolled, *shifts_of_methods = look(page, script, 500)

    assert fits
    assert scrolled == 300
    assert shifts_of_methods == pytest.approx([0] * len(shifts_of_methods), abs=1)
    assert shifts_of_methods


def test_a_seed_can_be_chosen(look: Look, page: str) -> None:
    script = """await set(all("#slider-0 select")[0], 0);
        const before = drawn("#slider-0 canvas");
        await set(all("#slider-0 select")[0], 1);
        return drawn("#slider-0 canvas").map((picture, i) => picture !== before[i])"""

    has_changed = look(page, script)

    assert has_changed == [True] * 6


def test_sliders_open_at_the_largest_motion_of_the_first_method(look: Look, page: str) -> None:
    script = """return all("[data-slider]").map((slider) =>
        ["select", "input"].map((name) => Number(slider.querySelector(name).value)))"""

    opened_levy, opened_banana = look(page, script)

    levy = run_folders.add_seeds(run_folders.levy_slider(24))
    banana = run_folders.add_seeds(run_folders.banana_slider(24))
    assert opened_levy == find_largest(levy["moves"][:, 0])
    assert opened_banana == find_largest(banana["rotation"][:, 0])


def find_largest(motion: np.ndarray) -> list[int]:
    """The seed and the frame of the largest finite motion."""
    is_largest = motion == motion[np.isfinite(motion)].max()
    seed, frame = np.argwhere(is_largest)[0]
    return [seed, frame]


def test_on_a_phone_wide_figures_scroll_and_the_page_does_not(look: Look, page: str) -> None:
    script = """const box = all(".picture .scroll")[0];
        box.scrollLeft = 200;
        return [box.scrollLeft, box.clientWidth, document.documentElement.scrollWidth]"""

    scrolled, box_width, page_width = look(page, script, 390)

    assert scrolled == 200
    assert box_width <= page_width
    assert page_width <= 500  # Chromium's windows are at least 500 wide


def test_the_sliders_move_through_training(look: Look, page: str) -> None:
    script = """const move = async (id) => {
          const input = all(`${id} input`)[0], seen = [];
          for (const frame of [0, 1, 12, 23]) {
            await set(input, frame);
            seen.push([texts(`${id} output`)[0], ...drawn(`${id} canvas`)]);
          }
          return [seen, input.getAttribute("aria-valuetext")];
        };
        return [await move("#slider-0"), await move("#slider-1")]"""

    last_epoch = f"{run_folders.epochs(24)[-1]:,.0f}"
    for frames, spoken in look(page, script):
        epochs, *canvases = zip(*frames, strict=True)
        assert epochs[0] == "0"
        assert epochs[1] == "1"
        assert epochs[3] == last_epoch
        assert len(set(epochs)) == 4
        for pictures in canvases:
            assert len(set(pictures)) == 4
        assert spoken == f"epoch {last_epoch}"


def test_play_moves_on_and_pause_stops_and_copy_takes_the_command(look: Look, page: str) -> None:
    script = """const play = all("#slider-1 [data-play]")[0], input = all("#slider-1 input")[0];
        const wait = (time) => new Promise((done) => setTimeout(done, time));
        await set(input, 0);
        play.click();
        while (input.value !== "3") await wait(5);
        const said = play.textContent;
        play.click();
        await wait(300);  // more than two frames' time
        all("[data-copy]")[0].click();
        while (texts("[data-copy]")[0] !== "Copied") await wait(5);
        return [said, play.textContent, input.value, getSelection().toString()]"""

    while_playing, while_paused, frame, copied = look(page, script)

    assert while_playing == "Pause"
    assert while_paused == "Play"
    assert frame == "3"
    assert "geoparam run levy" in copied


def test_readings_are_those_of_the_arrays(look: Look, page: str) -> None:
    script = """await set(all("select")[0], 0);
        await set(all("input")[0], 0);
        return texts("#slider-0 .panels figcaption")"""

    captions = look(page, script)

    arrays = run_folders.levy_slider(24)
    for method, caption in enumerate(captions):
        in_view = (np.abs(arrays["locations"][method, 0]) <= 10).sum()
        loss, *_ = re.findall(r"loss (\S+),", caption)
        assert caption.startswith(str(arrays["methods"][method]))
        assert f"{in_view} of 40 units in view" in caption
        assert float(loss) == pytest.approx(3.06, abs=0.01)


def one_slider(folder: Path, kind: str, arrays: dict[str, Any]) -> str:
    """The page of a run that has this slider alone."""
    run = Run.create(folder / "run", kind, {}, f"geoparam run {kind}")
    run.save_curves(f"slider_{kind}", **run_folders.add_seeds(arrays))
    return report.make_page([run])


@pytest.mark.parametrize(
    ("least", "most", "first"), [(3e-14, 5e5, "3.0·10⁻¹⁴"), (1e3, 9e5, "1,000")]
)
def test_labels_fit_beside_the_axis_and_powers_in_one_line(
    look: Look, tmp_path: Path, least: float, most: float, first: str
) -> None:
    arrays = run_folders.levy_slider(6)
    arrays["moves"] = np.tile(np.geomspace(least, most, 6), (4, 1))
    script = """const canvas = all("[data-what=moves]")[0];
        const edge = canvas.getContext("2d").getImageData(0, 0, 2, canvas.height).data;
        await set(all("input")[0], 0);
        return [Math.max(...edge), texts(".panels figcaption")[0]]"""

    ink_at_the_edge, caption = look(one_slider(tmp_path, "levy", arrays), script)

    assert ink_at_the_edge == 0
    assert caption.endswith(f"at most {first} ")


@pytest.mark.parametrize("side", [1, -1])
def test_teeth_point_to_the_active_side_and_shades_to_the_class(
    look: Look, tmp_path: Path, side: int
) -> None:
    """One unit with its boundary at x = 0, and the upper half of the plane of class 1."""
    arrays = run_folders.banana_slider(3, units=1, side=40)
    arrays["direction"][:] = (side, 0.0)
    arrays["distance"][:] = 0.0
    arrays["score"][:, :, :20] = 0
    arrays["score"][:, :, 20:] = 255
    arrays["x"] = np.zeros((1, 2))
    arrays["y"] = arrays["y"][:1]
    script = """const canvas = all("canvas")[0], pen = canvas.getContext("2d");
        const middle = Math.round((42 + canvas.width - 6) / 2);  // of the frame
        return [...pen.getImageData(middle - 60, 0, 65, canvas.height).data]"""

    pixels = look(one_slider(tmp_path, "banana", arrays), script)

    image = np.array(pixels).reshape(-1, 65, 4)[..., :3]
    right, left, aside = image[:, 64], image[:, 56], image[:, 0]
    assert (count_unit_pixels(right) - count_unit_pixels(left)) * side > 10
    upper_red, _, upper_blue = aside[60]
    assert upper_red > upper_blue  # class 1 is yellowish
    lower_red, _, lower_blue = aside[-80]
    assert lower_blue > lower_red  # class 0 is bluish


def count_unit_pixels(column: np.ndarray) -> int:
    """How many pixels are about the first unit's colour."""
    distance = ((column - [0, 114, 178]) ** 2).sum(-1)
    return int((distance < 3000).sum())


def test_a_foreign_script_is_stopped(page: str, tmp_path: Path) -> None:
    script = "<script>document.title = 'changed'</script>"
    with_script = page.replace("<main>", f"{script}<main>", 1)

    title, errors, _ = browser.look(with_script, "return document.title", tmp_path)

    assert title != "changed"
    assert any("Content Security Policy" in error for error in errors)


def test_errors_and_requests_of_a_page_are_reported(tmp_path: Path) -> None:
    broken = """<title>x</title><img src='http://127.0.0.1:9/x.png'>
        <script>console.error('bad')</script><script>throw Error('broken')</script>"""

    _, errors, requests = browser.look(broken, "return 0", tmp_path)

    assert any("bad" in error for error in errors)
    assert any("broken" in error for error in errors)
    assert requests == ["http://127.0.0.1:9/x.png"]
