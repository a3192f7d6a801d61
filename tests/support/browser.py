"""A real Chromium, driven through chromedriver with the WebDriver protocol (JSON over HTTP)."""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.debian_programs import find_program

WHY_NOT = "needs Debian's chromium and chromium-driver (tools/install_programs.sh installs them)"
START_S = 120.0
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
}
"""WebDriver codes of keys without a character."""


def find_programs() -> tuple[str, str] | None:
    """Return the paths of Chromium and its driver. Waits for a running installation."""
    chromium = find_program("chromium", "chromium-browser")
    driver = find_program("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Browser:
    """One browser window. Every command is a request to the driver."""

    def __init__(self, port: int, session: str) -> None:
        self._base = f"http://127.0.0.1:{port}/session/{session}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return _request(method, self._base + path, body)

    def open(self, page: Path) -> float:
        """Load a page. Returns the duration in seconds."""
        start_s = time.perf_counter()
        self.call("POST", "/url", {"url": page.as_uri()})
        return time.perf_counter() - start_s

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script and return its result."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run("return window.timeline.state()")
        return found

    def press(self, *keys: str) -> None:
        """Press keys in sequence."""
        acts: list[dict[str, Any]] = []
        for key in (KEYS.get(key, key) for key in keys):
            acts += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._act({"type": "key", "id": "keyboard", "actions": acts})

    def move(self, x: float, y: float) -> None:
        self._act(_mouse(_to(x, y)))

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        self._act(_mouse(_to(x, y), down, _to(to_x, to_y), up))

    def wheel(self, x: float, y: float, by: int) -> None:
        act = {"type": "scroll", "x": int(x), "y": int(y), "deltaX": 0, "deltaY": by}
        self._act({"type": "wheel", "id": "wheel", "actions": [{**act, "origin": "viewport"}]})

    def _act(self, source: dict[str, Any]) -> None:
        self.call("POST", "/actions", {"actions": [source]})

    def place_of(self, lane: int, span: int) -> tuple[float, float]:
        """Return the position of a span in the window."""
        script = (
            "const box = document.getElementById('view').getBoundingClientRect();"
            "const [x, y] = window.timeline.placeOf(arguments[0], arguments[1]);"
            "return [x + box.left, y + box.top];"
        )
        x, y = self.run(script, lane, span)
        return x, y

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """Return the messages on the console."""
        found = self.call("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in found]

    def requests(self) -> list[str]:
        """Return all requests except the page itself and the browser's own first tab."""
        found = []
        for entry in self.call("POST", "/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        own = ("file:", "data:", "about:", "chrome:", "chrome-untrusted:")
        return [url for url in found if not url.startswith(own)]


def _mouse(*acts: dict[str, Any]) -> dict[str, Any]:
    kind = {"pointerType": "mouse"}
    return {"type": "pointer", "id": "mouse", "parameters": kind, "actions": list(acts)}


def _to(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "x": int(x), "y": int(y), "duration": 20}


def _request(method: str, url: str, body: Any = None) -> Any:
    content = None if method == "GET" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, content, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(json.loads(error.read())["value"]["message"]) from None


@contextmanager
def browser(
    chromium: str, chromedriver: str, width: int = 1200, height: int = 640
) -> Iterator[Browser]:
    """Start a headless browser. Ends all of its processes on exit."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "driver.log"
        with log.open("wb") as out:
            driver = subprocess.Popen(
                [chromedriver, "--port=0"], stdout=out, stderr=subprocess.STDOUT
            )
        try:
            port = _port_of(log, driver)
            wanted = _new_session(chromium, folder, width, height)
            session = _request("POST", f"http://127.0.0.1:{port}/session", wanted)
            one = Browser(port, session["sessionId"])
            try:
                yield one
            finally:
                one.call("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(10)


def _port_of(log: Path, driver: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + START_S
    while time.monotonic() < until and driver.poll() is None:
        words = log.read_text(errors="replace").split("on port ")
        if len(words) > 1 and "successfully" in log.read_text(errors="replace"):
            return int(words[-1].split(".")[0])
        time.sleep(0.05)
    raise AssertionError(f"chromedriver did not start: {log.read_text(errors='replace')}")


def _new_session(chromium: str, folder: str, width: int, height: int) -> dict[str, Any]:
    options = {
        "binary": chromium,
        "args": [
            "--headless=new",
            "--no-sandbox",  # containers run as root, without user namespaces
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            f"--window-size={width},{height}",
            f"--user-data-dir={folder}/profile",
        ],
        "perfLoggingPrefs": {"enableNetwork": True},
    }
    return {
        "capabilities": {
            "alwaysMatch": {
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
        }
    }
