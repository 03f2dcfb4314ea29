"""A headless Chromium for tests, over its debugging pipe: no driver, no package, no port.

The browser reads commands from file descriptor 3 and writes answers and events to 4, as JSON ended
by a zero byte (--remote-debugging-pipe). A page keeps what its console complained about and what
it asked the network for.

    python tests/browser.py report.html pictures/    wide and narrow, light and dark, to look at
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds; a test machine may be busy
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Other descriptors may be in the way of 3 and 4, so both ends move up first.
_LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(reads, 3), os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "PageUp": 33, "PageDown": 34}
_KEYS |= {"Escape": 27}


def find() -> str | None:
    """The browser's executable, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running browser; use it in a with statement."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update"]
        options += ["--disable-dev-shm-usage", "--disable-sync", "--remote-debugging-pipe"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCH, str(theirs_in), str(theirs_out), executable]
            + [*options, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._unread, self._id = ours_in, ours_out, b"", 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> "Page":
        """Open a file and wait until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = self._pages[answer["sessionId"]] = Page(self, answer["sessionId"], target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.look(width, height, dark)
        page.send("Page.navigate", url=path.resolve().as_uri())
        loaded = "document.readyState === 'complete' && location.protocol === 'file:'"
        page.wait(loaded, despite_errors=True)
        return page

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile goes to the pages."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(f"an answer to {method}")
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            page = self._pages.get(answer.get("sessionId", ""))
            if page is not None and "method" in answer:
                page.note(answer["method"], answer["params"])

    def _receive(self, what: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            content = os.read(self._in, 1 << 20) if ready else b""
            if not content:
                raise TimeoutError(f"the browser did not give {what}")
            self._unread += content
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)


class Page:
    """An open page: what it did so far, and what a user can do with it.

    Attributes:
        errors: what its console was told, and what its scripts raised.
        requests: addresses that it asked for, the page's own first; not those inside it (data:).
    """

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.errors: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self._browser.send(method, self._session, **parameters)

    def note(self, event: str, found: dict[str, Any]) -> None:
        """Keep what is worth keeping of an event."""
        if event == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif event == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value", a)) for a in found["args"]))
        elif event == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            address = found["request"]["url"]
            self.requests += [] if address.startswith(("data:", "about:")) else [address]

    def evaluate(self, script: str) -> Any:
        """The value of a script, waited for if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, despite_errors: bool = False) -> None:
        """Wait until a condition holds; what the page complains about ends it, unless told."""
        until = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if self.errors and not despite_errors:
                raise RuntimeError(f"while waiting for {condition}: {self.errors}")
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} does not come true. Errors: {self.errors}")
            self.frame()

    def frame(self) -> None:
        """Wait until the browser has drawn twice."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Change the window's size and the colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=_KEYS[key],
            )
        self.frame()

    def screenshot(self, path: Path, selector: str = "html") -> None:
        """Write a picture of what a selector finds, all of it, to a PNG."""
        self.frame()
        box = self.evaluate(
            f"(b => ({{x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        answer = self.send(
            "Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """Close it."""
        self._browser.send("Target.closeTarget", targetId=self._target)


def main(page: Path, out: Path) -> None:
    """Take pictures of a page as a desktop and a phone show it, in both colour schemes."""
    executable = find()
    if executable is None:
        sys.exit(f"No browser: none of {', '.join(NAMES)} is installed")
    out.mkdir(parents=True, exist_ok=True)
    with Browser(executable) as running:
        for width in (1200, 360):
            for dark in (False, True):
                opened = running.open(page, width, dark=dark)
                opened.wait("!document.querySelector('[data-slider]:not([data-ready])')")
                opened.screenshot(out / f"{width}-{'dark' if dark else 'light'}.png")
                print(width, "dark" if dark else "light", opened.errors, opened.requests)
                opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
