"""A headless Chromium for tests of pages, driven over its DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = (
    "a report is looked at in a real browser, and none is installed; `make test` installs Chromium "
    "where it may (ops/test-tools.sh), otherwise: apt-get install --no-install-recommends chromium"
)
_SECONDS = 240.0


def find_browser() -> str:
    """Path of a browser; fails the test, saying what to install, where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(INSTALL)
    return found


@dataclass
class Page:
    """One tab. `problems` are console errors, exceptions and refused loads; `requests` every URL
    that was asked for."""

    connection: Any
    session: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(100))
    _loaded: bool = False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, "sessionId": self.session}
        self.connection.send(json.dumps(message))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path) -> None:
        """Load a file, wait until it is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._receive()

    def view(self, *, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        """Set window size (CSS pixels), pixels per CSS pixel, and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """A PNG of what is in the window."""
        result = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(result["data"]))

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=_SECONDS))
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.problems.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(parameters["entry"]["text"])
            case _:
                pass
        return message


@contextmanager
def browser_page(browser: str) -> Iterator[Page]:
    """An empty page of a new browser, which ends with the block."""
    from websockets.sync.client import connect

    # its helpers write into the profile for a moment after the browser has ended
    with tempfile.TemporaryDirectory(prefix="dora-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-background-networking",
                "--hide-scrollbars",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            address = _address(process, Path(profile) / "DevToolsActivePort")
            with connect(address, max_size=None, open_timeout=_SECONDS) as connection:
                yield _attach(connection)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(30)


def _address(process: "subprocess.Popen[bytes]", port_file: Path) -> str:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError(f"the browser was not ready within {_SECONDS:g} s")


def _attach(connection: Any) -> Page:
    def call(number: int, method: str, **parameters: Any) -> Any:
        connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(connection.recv(timeout=_SECONDS))
            if answer.get("id") == number:
                return answer["result"]

    target = call(1, "Target.createTarget", url="about:blank")["targetId"]
    session = call(2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(connection, session)
    for domain in ("Page", "Runtime", "Log", "Network"):
        page.call(f"{domain}.enable")
    return page
