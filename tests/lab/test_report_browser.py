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
    return report.make_page(run_folders.demo(tmp_path_factory.mktemp("runs")), command="geoparam")


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Return what a script finds in a page that neither complains nor asks for anything."""

    def find(page: str, script: str, width: int = 1280, dark: bool = False) -> Any:
        value, errors, requests = browser.look(page, script, tmp_path, width, dark)
        assert errors == [] and requests == []
        return value

    return find


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_the_page_opens_and_fits(look: Look, page: str, width: int, dark: bool) -> None:
    script = """return [document.documentElement.scrollWidth,
        document.images[0].naturalWidth, all("[data-slider]")[0].getBoundingClientRect().top,
        getComputedStyle(document.body).backgroundColor]"""
    wide, picture, top, paper = look(page, script, width, dark)
    assert wide == width and picture == 1500
    assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert top < (600 if width > 600 else 900)  # the first slider is on the first screen


@pytest.mark.parametrize(("width", "expected"), [(1280, [960, 1200, 1280]), (500, [960, 1500])])
def test_full_size_fits_a_screen_and_keeps_all_pixels_on_a_phone(
    look: Look, page: str, width: int, expected: list[int]
) -> None:
    """1500 pixels: on the page 960, in the dialog what a screen has, on a phone all of them."""
    script = """all(".picture img")[0].click();
        const sizes = all(".picture img, dialog img").map((image) => image.clientWidth);
        all("dialog button")[0].click();
        await frame();
        return [...sizes, all("dialog").length]"""
    shown, large, dialogs = look(page, script, width)
    assert shown == expected[0] and expected[1] <= large <= expected[-1] and dialogs == 0


def test_wide_tables_scroll_by_themselves_and_methods_stay_in_sight(look: Look, page: str) -> None:
    script = """const box = all(".table .scroll").find((box) => box.scrollWidth > 800);
        box.scrollLeft = 300;
        const left = (element) => element.getBoundingClientRect().left;
        return [all(".scroll").every((box) => box.clientWidth <= innerWidth), box.scrollLeft,
            ...[...box.querySelectorAll("tr > :first-child")].map((e) => left(e) - left(box))]"""
    fits, scrolled, *shifts = look(page, script, 500)
    assert fits and scrolled == 300 and shifts and max(map(abs, shifts)) < 1


def test_a_seed_can_be_chosen(look: Look, page: str) -> None:
    script = """await set(all("#slider-0 select")[0], 0);
        const before = drawn("#slider-0 canvas");
        await set(all("#slider-0 select")[0], 1);
        return drawn("#slider-0 canvas").map((picture, i) => picture !== before[i])"""
    assert look(page, script) == [True] * 6


def test_sliders_open_at_the_largest_motion_of_the_first_method(look: Look, page: str) -> None:
    script = """return all("[data-slider]").map((slider) =>
        ["select", "input"].map((name) => Number(slider.querySelector(name).value)))"""
    for kind, opened in zip(("levy", "banana"), look(page, script), strict=True):
        arrays = run_folders.add_seeds(getattr(run_folders, f"{kind}_slider")(24))
        motion = arrays["moves" if kind == "levy" else "rotation"][:, 0]
        seed, frame = np.argwhere(motion == motion[np.isfinite(motion)].max())[0]
        assert opened == [seed, frame]


def test_on_a_phone_wide_figures_scroll_and_the_page_does_not(look: Look, page: str) -> None:
    script = """const box = all(".picture .scroll")[0];
        box.scrollLeft = 200;
        return [box.scrollLeft, box.clientWidth, document.documentElement.scrollWidth]"""
    scrolled, wide, whole = look(page, script, 390)
    assert scrolled == 200 and wide <= whole <= 500  # Chromium's windows are at least 500 wide


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
    for seen, spoken in look(page, script):
        epochs = [text for text, *_ in seen]
        assert epochs[:2] == ["0", "1"] and epochs[3] == f"{run_folders.epochs(24)[-1]:,.0f}"
        assert all(len(set(pictures)) == 4 for pictures in zip(*seen, strict=True))  # each canvas
        assert spoken == f"epoch {epochs[3]}"


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
    *played, copied = look(page, script)
    assert played == ["Pause", "Play", "3"] and "geoparam run levy" in copied


def test_readings_are_those_of_the_arrays(look: Look, page: str) -> None:
    script = """await set(all("select")[0], 0);
        await set(all("input")[0], 0);
        return texts("#slider-0 .panels figcaption")"""
    arrays = run_folders.levy_slider(24)
    for m, text in enumerate(look(page, script)):
        inside = (np.abs(arrays["locations"][m, 0]) <= 10).sum()
        assert f"{inside} of 40 units in view" in text
        assert text.startswith(str(arrays["methods"][m]))
        assert float(re.findall(r"loss (\S+),", text)[0]) == pytest.approx(3.06, abs=0.01)


def one_slider(folder: Path, kind: str, arrays: dict[str, Any]) -> str:
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
    ink, caption = look(one_slider(tmp_path, "levy", arrays), script)
    assert ink == 0 and caption.endswith(f"at most {first} ")


@pytest.mark.parametrize("side", [1, -1])
def test_teeth_point_to_the_active_side_and_shades_to_the_class(
    look: Look, tmp_path: Path, side: int
) -> None:
    """One unit with its boundary at x = 0, and the upper half of the plane of class 1."""
    arrays = run_folders.banana_slider(3, units=1, side=40)
    arrays["direction"][:] = (side, 0.0)
    arrays["distance"][:] = 0.0
    arrays["score"][:, :, :20], arrays["score"][:, :, 20:] = 0, 255
    arrays |= {"x": arrays["x"][:1] * 0, "y": arrays["y"][:1]}
    script = """const canvas = all("canvas")[0], pen = canvas.getContext("2d");
        const middle = Math.round((42 + canvas.width - 6) / 2);  // of the frame
        return [...pen.getImageData(middle - 60, 0, 65, canvas.height).data]"""
    found = look(one_slider(tmp_path, "banana", arrays), script)
    image = np.array(found).reshape(-1, 65, 4)[..., :3]
    right, left, aside = image[:, 64], image[:, 56], image[:, 0]
    lines = [(((c - [0, 114, 178]) ** 2).sum(-1) < 3000).sum() for c in (right, left)]
    assert (lines[0] - lines[1]) * side > 10  # pixels in the first unit's colour
    upper, lower = aside[60], aside[-80]
    assert upper[0] > upper[2] and lower[2] > lower[0]  # class 1 is yellowish, class 0 bluish


def test_a_foreign_script_is_stopped_and_whatever_breaks_is_reported(
    page: str, tmp_path: Path
) -> None:
    foreign = "<script>document.title = 'taken'</script><main>"
    title, errors, _ = browser.look(
        page.replace("<main>", foreign, 1), "return document.title", tmp_path
    )
    assert title != "taken" and any("Content Security Policy" in error for error in errors)
    broken = "<title>x</title><img src='http://127.0.0.1:9/x.png'>"
    broken += "<script>console.error('bad')</script><script>throw Error('broken')</script>"
    _, errors, requests = browser.look(broken, "return 0", tmp_path)
    assert all(word in "".join(errors) for word in ("bad", "broken"))
    assert requests == ["http://127.0.0.1:9/x.png"]
