"""Headless Chromium over its DevTools protocol, on a pipe: no driver and no further package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
DEADLINE_S = 60.0
"""Seconds, because the machine may be busy."""
_FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--no-proxy-server",
]
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": ("Space", 32, " "),
    "Escape": ("Escape", 27, ""),
}


_EXEC = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for own, pipe in zip((3, 4), pipes):
    os.dup2(pipe, own)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts the browser, which reads file 3 and writes file 4."""


class BrowserError(AssertionError):
    """A command or a script of the page failed."""


@dataclass
class Page:
    """One tab. Every method waits for the browser's answer."""

    _read: int
    _write: int
    _session: str = ""
    _count: int = 0
    _rest: bytes = b""
    problems: list[str] = field(default_factory=list)
    """Errors of the console, of scripts and of the content security policy."""
    requested: list[str] = field(default_factory=list)
    """Addresses of all requests."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a command of the DevTools protocol."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            answer = self._receive(end - time.monotonic())
            if answer is None:
                raise BrowserError(f"{method}: no answer within {DEADLINE_S:g} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, timeout_s))
            if not ready:
                return None
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise BrowserError("the browser has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
            self.problems.append(f"console: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and params["issue"]["code"] != "GenericIssue":
            self.problems.append(f"issue: {params['issue']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    # -- what a user does -------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", details).get("description", script))
        return found["result"].get("value")

    def wait(self, script: str, deadline_s: float = DEADLINE_S) -> Any:
        """Evaluate an expression until it is true, and return its value."""
        end = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(BrowserError):  # a page that loads has no scripts yet
                if value := self.js(script):
                    return value
            if time.monotonic() > end:
                text = self.js("document.body.innerText")
                raise BrowserError(f"not within {deadline_s:g} s: {script}\n{text}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        script = (
            "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        x, y = self.js(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key: Tab, Enter, Space or Escape."""
        code, number, text = _KEYS[key]
        common = {
            "key": " " if key == "Space" else key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    # -- looks ------------------------------------------------------------------------------------

    def resize(self, width: int, height: int = 800) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """Prefer ``light`` or ``dark`` colors."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": name},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options["clip"] = area
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start a browser with an empty profile; end it with all its processes."""
    assert PROGRAM is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    profile = tempfile.mkdtemp(prefix="kvd-chromium-")
    flags = [*_FLAGS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    # Preloaded libraries may start threads, with which Chromium's first process cannot fork.
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    process = subprocess.Popen(
        [sys.executable, "-SIc", _EXEC, str(to_browser), str(from_browser), PROGRAM, *flags],
        pass_fds=(to_browser, from_browser),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    page = Page(to_us, from_us)
    try:
        page.attach()
        yield page
    finally:
        with contextlib.suppress(BrowserError, OSError):
            page._session = ""
            page.call("Browser.close")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_us)
        os.close(from_us)
        shutil.rmtree(profile, ignore_errors=True)
