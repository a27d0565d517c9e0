"""A headless Chromium, driven through its DevTools protocol over two pipes: no further package is needed."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = (
    "chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable", "chrome",
    "chrome-headless-shell", "microsoft-edge",
)  # fmt: skip


LIMIT = 120.0  # seconds; a browser that has not answered then hangs

# The browser reads commands from descriptor 3 and writes answers to descriptor 4.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The browser named by GRPO_KERNELS_BROWSER, or the first found in PATH."""
    return os.environ.get("GRPO_KERNELS_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. errors: uncaught exceptions and error messages of the console; requests: addresses asked for."""

    def __init__(self, browser: str, scratch: Path):
        read_commands, self._out = os.pipe()
        self._in, write_answers = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_commands, write_answers)]
        arguments = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={scratch}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, theirs), *arguments], pass_fds=theirs, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (read_commands, write_answers, *theirs):
            os.close(fd)
        self._buffer, self._count, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.errors, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + LIMIT
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            if time.monotonic() > end:
                raise TimeoutError(f"{path} is not loaded after {LIMIT:g} s")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], LIMIT)[0]:
                raise TimeoutError(f"the browser did not answer within {LIMIT:g} s")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError(f"the browser ended with status {self._process.wait(LIMIT)}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message
