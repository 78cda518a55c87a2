# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, by the DevTools protocol over pipes: it needs no library and no port."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

PROGRAM = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
  *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
  "--remote-debugging-pipe",
)


class Page:
  """A page of a running Chromium.

  Attributes:
    problems: What the page has logged as an error, and every request that is not for its own file.
  """

  def __init__(self, requests: Any, answers: Any):
    self._requests, self._answers = requests, answers
    self._number = 0
    self._session: str | None = None
    self._loaded: set[str] = set()  # The ids of the loads that have ended.
    self.problems: list[str] = []
    target = self.send("Target.createTarget", url="about:blank")["targetId"]
    attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.send(f"{domain}.enable")
    self.send("Page.setLifecycleEventsEnabled", enabled=True)

  def send(self, method: str, **parameters: Any) -> dict[str, Any]:
    """Calls a method of the protocol; returns its result."""
    self._number += 1
    request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
    if self._session is not None:
      request["sessionId"] = self._session
    self._requests.write(json.dumps(request).encode() + b"\0")
    self._requests.flush()
    while True:
      message = self._read()
      if message.get("id") == self._number:
        assert "error" not in message, message
        return message["result"]
      self._note(message)

  def _read(self) -> dict[str, Any]:
    data = bytearray()
    while (byte := self._answers.read(1)) != b"\0":
      assert byte, "Chromium has ended"
      data += byte
    return json.loads(data)

  def _note(self, message: dict[str, Any]):
    parameters = message.get("params", {})
    match message.get("method"):
      case "Runtime.exceptionThrown":
        self.problems.append(json.dumps(parameters["exceptionDetails"]))
      case "Log.entryAdded" if parameters["entry"]["level"] == "error":
        self.problems.append(parameters["entry"]["text"])
      case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith("file:"):
        self.problems.append(parameters["request"]["url"])
      case "Page.lifecycleEvent" if parameters["name"] == "load":
        self._loaded.add(parameters["loaderId"])

  def load(self, path: pathlib.Path):
    """Loads a file, and waits until its document and all that it needs are there."""
    loader = self.send("Page.navigate", url=path.absolute().as_uri())["loaderId"]
    while loader not in self._loaded:
      self._note(self._read())

  def open(self, path: pathlib.Path, *, width: int = 1200, height: int = 900, dark: bool = False):
    """Loads a file at a size of the window, and waits until it is loaded and laid out."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    self.send("Emulation.setEmulatedMedia", features=scheme)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    self.send("Emulation.setDeviceMetricsOverride", **size)
    self.load(path)
    self.settle()

  def settle(self):
    """Waits for two frames."""
    self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

  def run(self, script: str) -> Any:
    """Returns the value of an expression, awaited if it is a promise."""
    how = {"awaitPromise": True, "returnByValue": True}
    result = self.send("Runtime.evaluate", expression=script, **how)
    assert "exceptionDetails" not in result, result
    return result["result"].get("value")

  def mouse(self, kind: str, x: float, y: float, **more: Any):
    """Sends a mouse event: "mousePressed", "mouseMoved" or "mouseReleased"."""
    self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

  def drag(self, begin: tuple[float, float], end: tuple[float, float]):
    """Drags with the left button."""
    left: dict[str, Any] = {"button": "left", "buttons": 1, "clickCount": 1}
    self.mouse("mousePressed", *begin, **left)
    self.mouse("mouseMoved", *end, **left)
    self.mouse("mouseReleased", *end, **left)
    self.settle()

  def key(self, name: str):
    """Presses a key."""
    for kind in ("keyDown", "keyUp"):
      self.send("Input.dispatchKeyEvent", type=kind, key=name)

  def picture(self, path: pathlib.Path, *, whole: bool = True):
    """Saves a PNG of the window, or of the `whole` page."""
    found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
    path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def running(profile: pathlib.Path) -> Iterator[Page]:
  """Context with a page of a Chromium that has its own profile in a new folder."""
  assert PROGRAM is not None
  requests, answers = os.pipe(), os.pipe()
  inherited = (requests[0], answers[1])
  command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
  # The protocol reads from descriptor 3 and writes to 4.
  redirected = f'exec "$@" 3<&{inherited[0]} 4>&{inherited[1]}'
  process = subprocess.Popen(
    ["bash", "-c", redirected, "bash", *command],
    pass_fds=inherited,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  for descriptor in inherited:
    os.close(descriptor)
  try:
    with open(requests[1], "wb") as to, open(answers[0], "rb") as back:
      page = Page(to, back)
      yield page
      page._session = None
      page.send("Browser.close")
  finally:
    try:
      process.wait(timeout=10)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
