"""A headless Chromium for tests: opens a page, runs a script in it, and returns what that found.

The script stands in the page's head, with a checksum of its own in the page's policy. It begins
when all sliders are ready, and writes its result to the console, which Chromium logs. Whatever
else is in that log is a complaint.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

PATIENCE = 60.0  # seconds; a test machine may be busy
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ("--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync")
OPTIONS += ("--disable-background-networking", "--disable-dev-shm-usage")
_LOGGED = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*)", source: ')
_HARNESS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((element) => element.textContent);
const drawn = (selector) => all(selector).map((canvas) => canvas.toDataURL());
const paint = () => new Promise((done) => requestAnimationFrame(done));
const frame = () => paint().then(paint);
async function set(control, value) {
  control.value = value;
  control.dispatchEvent(new Event("input"));
  await frame();
}
addEventListener("load", async () => {
  for (let i = 0; i < 500 && all("[data-slider]:not([data-ready])").length; i++) await frame();
  const value = await (async () => {%s})();
  const requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  console.log("FOUND" + encodeURIComponent(JSON.stringify({ value, requests })));
});
"""


class Found(NamedTuple):
    """What a script returned, what else was logged, and which addresses the page asked for."""

    value: Any
    errors: list[str]
    requests: list[str]


def find() -> str | None:
    """The browser's executable, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look(page: str, script: str, folder: Path, width: int = 1280, dark: bool = False) -> Found:
    """Open a page's text, run a script in it, and return what it found."""
    code = _HARNESS % script
    checksum = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{checksum}' ")
    path = folder / "looked-at.html"
    path.write_text(page.replace("<title>", f"<script>{code}</script>\n<title>", 1))
    options = [*OPTIONS, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(find()), *options, "--enable-logging=stderr", path.resolve().as_uri()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    watch = threading.Timer(PATIENCE, process.kill)
    watch.start()
    errors = []
    with process:
        for line in process.stderr or ():
            logged = _LOGGED.search(line)
            if logged and logged[1].startswith("FOUND"):
                process.kill()
                watch.cancel()
                found = json.loads(unquote(logged[1].removeprefix("FOUND")))
                return Found(found.get("value"), errors, found["requests"])
            errors += [logged[1]] if logged else []
    raise TimeoutError(f"the browser found nothing; it logged {errors}")
