"""The report in a real browser: the slider moves, nothing complains, nothing leaves the page."""

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import numpy as np
import pytest
import run_folders
from browser import Browser, Page

from geoparam_lab import report
from geoparam_lab.run_folder import Run

READY = "document.querySelectorAll('[data-slider]:not([data-ready])').length === 0"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    return report.write(run_folders.demo(base), base / "report.html", command="geoparam report *")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium: install Debian's package chromium, or Chrome")
    with Browser(executable) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, page_file: Path) -> Iterator[Page]:
    opened = chromium.open(page_file)
    opened.wait(READY)
    yield opened
    assert opened.errors == []
    opened.close()


def pixels(page: Page, selector: str) -> list[str]:
    script = f"[...document.querySelectorAll('{selector}')].map(canvas => canvas.toDataURL())"
    return page.evaluate(script)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_without_complaint_or_request(
    chromium: Browser, page_file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = chromium.open(page_file, width, dark=dark)
    page.wait(READY)
    page.screenshot(tmp_path / "page.png")
    assert page.errors == [] and page.requests == [page_file.resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert (tmp_path / "page.png").stat().st_size > 50_000
    page.close()


def test_full_size_fits_a_screen_and_keeps_all_pixels_on_a_phone(page: Page) -> None:
    """1500 pixels: on the page 960, in the dialog what a screen has, on a phone all of them."""
    seen = []
    for width in (1280, 390):
        page.look(width)
        page.evaluate("document.querySelector('.picture img').click()")
        page.frame()
        seen.append(
            page.evaluate(
                "['.picture', 'dialog'].map(s => document.querySelector(s + ' img').clientWidth)"
            )
        )
        page.press("Escape")
        page.wait("!document.querySelector('dialog')")
    [[shown, large], phone] = seen
    assert shown == 960 and 1200 < large <= 1280 and phone == [960, 1500]


def test_the_first_slider_is_on_the_first_screen(page: Page) -> None:
    page.look(1280)
    assert (
        page.evaluate("document.querySelector('[data-slider]').getBoundingClientRect().top") < 600
    )


def test_a_seed_can_be_chosen_and_the_first_choice_is_each_methods_median(page: Page) -> None:
    def seeds() -> list[str]:
        return page.evaluate(
            "[...document.querySelectorAll('#slider-0 .panels figcaption span span')]"
            ".map(e => e.textContent.slice(0, 6))"
        )

    before = pixels(page, "#slider-0 canvas")
    assert seeds() == ["seed 0", "seed 3", "seed 0", "seed 0"]
    page.evaluate(
        "choice = document.querySelector('#slider-0 select'); choice.value = 2;"
        "choice.dispatchEvent(new Event('input')); 0"
    )
    page.frame()
    page.frame()
    after = pixels(page, "#slider-0 canvas")
    assert seeds() == ["seed 3"] * 4
    assert [a != b for a, b in zip(before, after, strict=True)] == [True, False, *[True] * 4]


@pytest.mark.parametrize(
    ("least", "most", "first"), [(3e-14, 5e5, "3.0·10⁻¹⁴"), (1e3, 9e5, "1,000")]
)
def test_labels_fit_beside_the_axis_and_powers_in_one_line(
    chromium: Browser, tmp_path: Path, least: float, most: float, first: str
) -> None:
    arrays = run_folders.levy_slider(6)
    arrays["moves"] = np.tile(np.geomspace(least, most, 6), (4, 1))
    run = Run.create(tmp_path / "run", "levy", {}, "geoparam run levy")
    run.save_curves("slider_levy", **arrays)
    page = chromium.open(report.write([run], tmp_path / "page.html"))
    page.wait(READY)
    ink = page.evaluate(
        "(c => [...c.getContext('2d').getImageData(0, 0, 2, c.height).data].some(v => v > 0))"
        "(document.querySelector('[data-what=moves]'))"
    )
    assert not ink
    page.evaluate("document.querySelector('input').focus()")
    page.press("Home")
    caption = page.evaluate("document.querySelector('.panels figcaption').textContent")
    assert caption.endswith(f"at most {first} ")
    assert page.errors == []
    page.close()


def test_wide_tables_scroll_by_themselves_on_a_phone(page: Page) -> None:
    """And the methods stay in sight."""
    page.look(390)
    page.frame()
    boxes = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map(b => [b.clientWidth, b.scrollWidth])"
    )
    assert all(shown <= 390 for shown, _ in boxes) and any(whole > 390 for _, whole in boxes)
    left = page.evaluate(
        "box = [...document.querySelectorAll('.table .scroll')].find(b => b.scrollWidth > 700);"
        "box.scrollLeft = 300;"
        "[...box.querySelectorAll('tr > :first-child')].map(e =>"
        " e.getBoundingClientRect().left - box.getBoundingClientRect().left)"
    )
    assert left and all(abs(each) < 1 for each in left)


@pytest.mark.parametrize("run", ["#slider-0", "#slider-1"], ids=["levy", "banana"])
def test_keys_move_the_slider_through_training(page: Page, run: str) -> None:
    page.evaluate(f"document.querySelector('{run} input').focus()")
    epoch = f"document.querySelector('{run} output').textContent"
    seen = []
    for key in ("Home", "ArrowRight", "PageUp", "End"):
        page.press(key)
        seen.append((page.evaluate(epoch), pixels(page, f"{run} canvas")))
    steps = run_folders.epochs(24)
    epochs = [text for text, _ in seen]
    assert epochs[:2] == ["0", "1"] and epochs[3] == f"{steps[-1]:,.0f}"
    assert len(set(epochs)) == 4
    for drawings in zip(*(images for _, images in seen), strict=True):  # of each canvas
        assert len(set(drawings)) == 4
    spoken = page.evaluate(f"document.querySelector('{run} input').getAttribute('aria-valuetext')")
    assert spoken == f"epoch {epochs[3]}"


def test_play_moves_on_and_pause_stops(page: Page) -> None:
    page.evaluate(
        "play = document.querySelector('#slider-1 [data-play]');"
        "moved = document.querySelector('#slider-1 input');"
        "paused = new Promise(done => moved.addEventListener('input', () => {"
        "  if (moved.value === '3') { words = play.textContent; play.click(); done(); } })); 0"
    )
    page.evaluate("play.click(), paused")
    assert page.evaluate("[words, play.textContent]") == ["Pause", "Play"]
    page.evaluate("new Promise(done => setTimeout(done, 300))")  # more than two frames' time
    assert page.evaluate("moved.value") == "3"


def test_readings_are_those_of_the_arrays(page: Page) -> None:
    page.evaluate("document.querySelector('#slider-0 input').focus()")
    page.press("Home")
    script = (
        "[...document.querySelectorAll('#slider-0 .panels figcaption')].map(c => c.textContent)"
    )
    arrays = run_folders.levy_slider(24)
    for m, text in enumerate(page.evaluate(script)):
        film = m - (m == 1)  # the second method's median seed has the film of the first
        inside = (np.abs(arrays["locations"][film, 0]) <= 10).sum()
        assert f"{inside} of 40 units in view" in text
        assert text.startswith(str(arrays["methods"][m]))
        assert float(re.findall(r"loss (\S+),", text)[0]) == pytest.approx(3.06, abs=0.01)


def test_copy_takes_the_command(page: Page) -> None:
    page.evaluate("document.querySelector('[data-copy]').click()")
    page.wait("document.querySelector('[data-copy]').textContent === 'Copied'")
    assert "geoparam run levy" in page.evaluate("getSelection().toString()")


def test_a_change_of_colours_redraws(page: Page) -> None:
    before = pixels(page, "#slider-0 canvas")
    page.look(1200, dark=True)
    page.frame()
    page.frame()
    after = pixels(page, "#slider-0 canvas")
    assert all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("side", [1, -1])
def test_teeth_point_to_the_active_side_and_shades_to_the_class(
    chromium: Browser, tmp_path: Path, side: int
) -> None:
    """One unit with its boundary at x = 0, and the upper half of the plane of class 1."""
    arrays = run_folders.banana_slider(3, units=1, side=40)
    arrays["direction"][:] = (side, 0.0)
    arrays["distance"][:] = 0.0
    arrays["score"][:, :, :20], arrays["score"][:, :, 20:] = 0, 255
    run = Run.create(tmp_path / "run", "banana", {}, "geoparam run banana")
    run.save_curves("slider_banana", **{**arrays, "x": arrays["x"][:1] * 0, "y": arrays["y"][:1]})
    page = chromium.open(report.write([run], tmp_path / "page.html"))
    page.wait(READY)
    width, flat = page.evaluate(
        "(c => [c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]])"
        "(document.querySelector('canvas'))"
    )
    image = np.array(flat).reshape(-1, width, 4)[..., :3]
    middle = round((42 + width - 6) / 2)  # of the frame
    blue = (image - [0, 114, 178]) ** 2  # the first unit's colour
    is_line = blue.sum(-1) < 3000
    right, left = is_line[:, middle + 4].sum(), is_line[:, middle - 4].sum()
    assert (right - left) * side > 10
    upper, lower = image[60, middle - 60], image[-80, middle - 60]
    assert upper[0] > upper[2] and lower[2] > lower[0]  # class 1 is yellowish, class 0 bluish
    assert page.errors == []
    page.close()


# --- the helper must be able to fail -----------------------------------------------------------


def test_a_broken_script_is_reported(chromium: Browser, tmp_path: Path) -> None:
    scripts = (
        "Promise.reject(new Error('later'))",
        "console.error('bad')",
        "throw Error('broken')",
    )
    path = tmp_path / "broken.html"
    body = "".join(f"<script>{script}</script>" for script in scripts)
    path.write_text(f"<!doctype html><title>broken</title>{body}")
    page = chromium.open(path)
    page.frame()
    assert all(word in "".join(page.errors) for word in ("later", "bad", "broken"))
    page.close()


def test_a_request_is_recorded(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "asking.html"
    path.write_text("<!doctype html><title>asks</title><img src='http://127.0.0.1:9/x.png'>")
    page = chromium.open(path)
    page.wait("document.images[0].complete", despite_errors=True)
    assert "http://127.0.0.1:9/x.png" in page.requests
    page.close()


def test_a_foreign_script_in_the_page_would_be_stopped_and_reported(
    chromium: Browser, page_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed.html"
    foreign = "<script>document.title = 'taken'</script><main>"
    path.write_text(page_file.read_text().replace("<main>", foreign, 1))
    page = chromium.open(path)
    page.wait(READY, despite_errors=True)
    assert page.evaluate("document.title") != "taken"
    assert any("Content Security Policy" in error for error in page.errors)
    page.close()
