"""A headless Chromium for tests, driven with the DevTools protocol over a pipe: no dependency but the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
# The browser reads its file descriptor 3 and writes to 4: put the pipes there, then become the browser.
LAUNCH = """
import fcntl, os, sys
for end, place in [(fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10), 3 + i) for i, fd in enumerate(sys.argv[1:3])]:
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
TIMEOUT_S = 300.0  # for one answer of the browser: only a browser that hangs takes so long


class Browser:
    """One browser process; `page` opens a file or an address in a tab of its own."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        assert CHROMIUM is not None
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; events that come meanwhile are kept."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT_S)
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser has gone, or does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    @contextlib.contextmanager
    def page(self, path: Path | str, **media: str) -> Iterator[Page]:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            page = Page(self, session)
            page.size(1280, 900)
            if media:
                page.media(**media)
            page.open(path)
            yield page
        finally:
            self.send("Target.closeTarget", targetId=target)

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


class Page:
    """A tab: evaluate JavaScript, click and press keys as a person would, see what went wrong."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def open(self, path: Path | str) -> None:
        self.send("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        self.wait("document.readyState == 'complete' && 'ready' in document.documentElement.dataset")

    def js(self, expression: str) -> Any:
        """The value of an expression, as JSON has it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until it holds."""
        end = time.monotonic() + TIMEOUT_S
        while not self.js(condition):
            self.send("Page.captureScreenshot")  # draws a frame, which a browser without a screen may put off for good
            if time.monotonic() > end:
                raise TimeoutError(f"never came true: {condition}; the page said {self.problems()}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """As it is shown: nothing of what is hidden."""
        shown: str = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " return e.checkVisibility() ? e.innerText : ''; })()"
        )
        return shown

    def style(self, selector: str, name: str) -> str:
        value: str = self.js(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}")
        return value

    def hover(self, selector: str, x: float | None = None, y: float | None = None) -> dict[str, float]:
        """Move the mouse to the element's middle, or so many pixels from its left and top."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0];"
            " return [r.left, r.top, r.width, r.height]; })()"
        )
        left, top, width, height = box
        at = {"x": left + (width / 2 if x is None else x), "y": top + (height / 2 if y is None else y)}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        return at

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """With the mouse, where `hover` puts it."""
        at = self.hover(selector, x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "Home": 36, "End": 35}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        more: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        more |= {"modifiers": 8} if shift else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: object) -> None:
        """Of a select element's options."""
        self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(str(value))};"
            " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.wait(f"window.innerWidth === {width} && window.innerHeight === {height}")

    def media(self, **features: str) -> None:
        """Emulated, with _ for -: media(prefers_color_scheme="dark")."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=values)

    def frame(self) -> None:
        """Until what was changed is drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def screenshot(self, path: Path) -> None:
        self.frame()
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _events(self, method: str) -> list[dict[str, Any]]:
        events = self.browser.events
        return [e["params"] for e in events if e.get("sessionId") == self.session and e["method"] == method]

    def problems(self) -> list[Any]:
        """Exceptions, and what the console was told of as an error or a warning."""
        self.js("0")  # all events before this answer are in
        calls = [e for e in self._events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
        entries = [e for e in self._events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")]
        return [*self._events("Runtime.exceptionThrown"), *calls, *entries]

    def requests(self) -> list[str]:
        """The addresses that the page asked for, its own first."""
        self.js("0")
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]
