# SPDX-License-Identifier: Apache-2.0
"""What people see of a run: plain lines, and a progress bar where there is a terminal."""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from paxlike.errors import UserError


class Parser(argparse.ArgumentParser):
  """Reads the flags of a command; a mistake in them is a UserError."""

  def error(self, message: str) -> NoReturn:
    raise UserError(f"{message}. --help lists the flags.")


def path(text: str) -> str:
  """Returns the path that a flag gives: "" would be the working directory."""
  if not text.strip():
    raise argparse.ArgumentTypeError("expected a path that is not empty")
  return text


class Outliving:
  """A text stream that, once it takes nothing more, drops what is written.

  Attributes:
    is_lost: Whether something was dropped though there is a reader: the disk is full, say.
  """

  def __init__(self, stream: Any):
    self._stream = stream
    self.is_lost = False

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
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._stream.fileno())
      os.close(nowhere)
      # EPIPE: its reader has ended; EIO: the terminal is gone. Nobody reads that anyway.
      if error.errno not in (errno.EPIPE, errno.EIO):
        self.is_lost = True
        if self is sys.stdout:
          reason = error.strerror or error
          print(f"paxlike: standard output takes no more ({reason}): dropped", file=sys.stderr)
      return None


def outlive_readers():
  """Lets the program go on where its output or errors are closed, full, or read no more."""
  for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, name) is None:
      setattr(sys, name, _opened_nowhere(descriptor))
  for name in ("stdout", "stderr"):
    stream: Any = getattr(sys, name)
    if hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")  # The encoding may lack a sign of ours.
    setattr(sys, name, Outliving(stream))


def _opened_nowhere(descriptor: int) -> Any:
  """Returns a stream of the null device under the number of a stream that is closed.

  Without it, that number would be the one of the next file that is opened, and what libraries write
  to standard output or errors would be in that file.
  """
  try:
    os.fstat(descriptor)
  except OSError:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
      os.dup2(nowhere, descriptor)
      os.close(nowhere)
    os.set_inheritable(descriptor, True)
  return open(os.devnull, "r" if descriptor == 0 else "w")


def output_is_lost() -> bool:
  """Returns whether something of standard output could not be written."""
  sys.stdout.flush()
  return getattr(sys.stdout, "is_lost", False)


@contextlib.contextmanager
def mentioned(what: str, *, after: float = 20) -> Iterator[None]:
  """Context of work that is named on standard error if it takes more than so many seconds."""
  timer = threading.Timer(after, print, (f"paxlike: {what} ...",), {"file": sys.stderr})
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def in_notebook() -> bool:
  """Returns whether this process is the kernel of a notebook."""
  shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
  return getattr(shell, "kernel", None) is not None


class Console:
  """Lines on standard output, and under them on a terminal a bar on standard error.

  In a notebook the bar is on standard output: there, each change of stream begins a new block.
  """

  def __init__(self):
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    self._stream = "stderr" if is_terminal else "stdout" if in_notebook() else None
    # Notebooks know "\r", but do not erase lines.
    self._erases = is_terminal
    self._bar = ""
    self._drawn = 0.0

  def line(self, text: str, *, end: str = "\n"):
    """Prints a line above the bar."""
    self._erase()
    print(text, end=end, flush=True)
    self._draw()

  def progress(self, done: int, total: int, text: str):
    """Shows how far the run is; at most ten times a second."""
    if self._stream is None or (time.monotonic() - self._drawn < 0.1 and done < total):
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
      self._write("\r\033[K" if self._erases else f"\r{' ' * len(self._bar)}\r")

  def _draw(self):
    if self._bar:
      self._write(self._bar)

  def _write(self, text: str):
    stream = getattr(sys, self._stream or "stderr")
    stream.write(text)
    stream.flush()
