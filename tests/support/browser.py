"""A real browser without a window, spoken to over a pipe in the language of its developer tools."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AXE = "pytest-playwright-axe==4.14.0"
"""The package with the newest copy of axe-core, which judges whether everybody can use a page. Neither its own code nor
what it depends on is wanted: it is put where nobody imports from."""
AXE_HOME = Path(__file__).resolve().parents[2] / ".venv" / ".cache" / AXE
PATIENCE = 120.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it refuses to have one as root; nothing but our own pages is shown
    "--no-first-run",
    "--disable-gpu",
    "--hide-scrollbars",  # they come and go while a page is drawn anew, and change how wide it is
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Chromium:
    """One browser. Made by `chromium`."""

    def __init__(self, process: int, speak: int, hear: int) -> None:
        self._process, self._speak, self._hear = process, speak, hear
        self._numbers = itertools.count(1)
        self._heard = b""
        self._answers: dict[int, Any] = {}
        self.pages: dict[str, Page] = {}

    def page(self, *, width: int = 1280, dark: bool = False, script: bool = True) -> Page:
        """Open an empty page, as wide as a desk's or a hand's."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        phone = width < 600
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.ask("Emulation.setScriptExecutionDisabled", value=not script)
        return page

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Say something and wait for the answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._speak, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while number not in self._answers:
            self.listen(until - time.monotonic())
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, seconds: float) -> None:
        """Take in what it says next; fail when it says nothing for so long."""
        assert select.select([self._hear], [], [], max(0.0, seconds))[0], "the browser does not answer"
        more = os.read(self._hear, 1 << 20)
        assert more, "the browser has ended"
        *messages, self._heard = (self._heard + more).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif page := self.pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    def end(self) -> None:
        """End it, whatever it does."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._speak)
        os.close(self._hear)


class Page:
    """One page, in a profile of its own.

    Attributes:
        complaints: errors that it wrote to the console, among them whatever its policy refused.
        requested: all that it asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._loaded = 0

    def ask(self, method: str, **parameters: Any) -> Any:
        return self._browser.ask(method, self._session, **parameters)

    def hear(self, event: str, told: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded += 1
        elif event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning"}:
            self.complaints.append(str(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def go(self, address: str) -> None:
        """Load an address."""
        with self.loading():
            self.ask("Page.navigate", url=address)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wait, after the block, for a page that it caused to be loaded."""
        before = self._loaded
        yield
        until = time.monotonic() + PATIENCE
        while self._loaded == before:
            self._browser.listen(until - time.monotonic())

    def wait_for_request(self, path: str) -> None:
        """Wait until it has asked for something of its own server."""
        until = time.monotonic() + PATIENCE
        while path not in {urlsplit(address).path for address in self.requested}:
            self._browser.listen(until - time.monotonic())

    def see(self, expression: str) -> Any:
        """Return what a JavaScript expression, or its promise, is worth; our own, whether the page's may run or not."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not (found := self.see(expression)):
            assert time.monotonic() < end, f"{expression} did not come true: {self.text()}"
            time.sleep(0.05)
        return found

    def text(self) -> str:
        """Return what stands on it."""
        return self.see("document.body.innerText")

    def press(self, key: str, code: int = 0) -> None:
        """Press a key; one letter, or a name with its code, as Enter and 13."""
        text = {"text": key if len(key) == 1 else "\r"} if len(key) == 1 or key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click into the middle of an element, or of the first line of what runs over several."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.see(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = self.see(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place}.getClientRects()[0])")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path) -> None:
        """Write a picture of the whole of it."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def barriers(self) -> list[str]:
        """Return what axe finds that would keep somebody out."""
        self.see(_axe() + "; true")
        found = self.see("axe.run().then(found => found.violations)")
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


def _axe() -> str:
    """Return the script, which is fetched once."""
    if not AXE_HOME.exists():
        with tempfile.TemporaryDirectory(dir=AXE_HOME.parent) as directory:
            fetched = Path(directory) / "axe"
            options = ["-qq", "--no-deps", "--ignore-requires-python", "--no-compile", "--target", str(fetched)]
            subprocess.run([sys.executable, "-m", "pip", "install", *options, AXE], check=True)
            fetched.rename(AXE_HOME)
    return (AXE_HOME / "pytest_playwright_axe" / "resources" / "axe.min.js").read_text("utf-8")


@contextmanager
def chromium(directory: Path) -> Iterator[Chromium]:
    """Start a browser with its profile in a directory, and end it."""
    program = shutil.which("chromium")
    assert program is not None
    (its_ear, speak), (hear, its_mouth) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (its_ear, its_mouth)]  # none is 3 or 4 itself
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    process = os.posix_spawn(
        program,
        [program, *FLAGS, f"--user-data-dir={directory / 'profile'}"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ],
    )
    for end in (its_ear, its_mouth, *ends, log):
        os.close(end)
    browser = Chromium(process, speak, hear)
    try:
        yield browser
    finally:
        browser.end()
