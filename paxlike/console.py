# SPDX-License-Identifier: Apache-2.0
"""What people see of a run: plain lines, and a progress bar where there is a terminal."""

import errno
import os
import shutil
import sys
import time
from typing import Any


class Outliving:
  """A text stream that, once nobody reads it any more, takes what is written and drops it."""

  def __init__(self, stream: Any):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    """Writes text."""
    return self._attempt(self._stream.write, text) or len(text)

  def flush(self):
    """Writes what is held back."""
    self._attempt(self._stream.flush)

  def _attempt(self, action: Any, *arguments: str) -> Any:
    try:
      return action(*arguments)
    except OSError as error:
      if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone.
        raise
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._stream.fileno())
      os.close(nowhere)
      return None


def outlive_readers():
  """Lets the program go on where the reader of its output or errors ends, as `head` does."""
  for name in ("stdout", "stderr"):
    if getattr(sys, name) is not None:
      setattr(sys, name, Outliving(getattr(sys, name)))


class Console:
  """Lines on standard output, and under them on a terminal a bar on standard error."""

  def __init__(self):
    self._terminal = sys.stderr.isatty()
    self._bar = ""
    self._drawn = 0.0

  def line(self, text: str, *, end: str = "\n"):
    """Prints a line above the bar."""
    self._erase()
    print(text, end=end, flush=True)
    self._draw()

  def progress(self, done: int, total: int, text: str):
    """Shows how far the run is; at most ten times a second."""
    if not self._terminal or (time.monotonic() - self._drawn < 0.1 and done < total):
      return
    self._drawn = time.monotonic()
    width = 24
    filled = width * done // max(total, 1)
    bar = f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}  {text}"
    self._erase()
    self._bar = "" if done >= total else bar[: shutil.get_terminal_size().columns - 1]
    self._draw()

  def close(self):
    """Removes the bar."""
    self._erase()
    self._bar = ""

  def _erase(self):
    if self._bar:
      sys.stderr.write("\r\033[K")
      sys.stderr.flush()

  def _draw(self):
    if self._bar:
      sys.stderr.write(self._bar)
      sys.stderr.flush()
