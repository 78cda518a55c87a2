# SPDX-License-Identifier: Apache-2.0
"""Terminal output: lines, and a progress bar."""

import argparse
import contextlib
import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from paxlike.errors import UserError, one_line


class Parser(argparse.ArgumentParser):
  """An argument parser that raises a UserError for wrong flags."""

  def error(self, message: str) -> NoReturn:
    raise UserError(f"{message}. --help lists the flags.")


def path(text: str) -> str:
  """Returns a flag's path; refuses "", which would be the working directory."""
  if not text.strip():
    raise argparse.ArgumentTypeError("expected a path that is not empty")
  return text


def exit_status(prog: str, action: Callable[[], int]) -> int:
  """Returns the exit status of a command: that of `action`, or 2 for a user error (one line)."""
  # It logs each error that it also raises, with its stack.
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
  try:
    return action()
  except UserError as error:
    print(f"{prog}: {one_line(error)}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


class _Resilient:
  """A text stream that drops its output after a failed write instead of raising.

  Attributes:
    is_lost: Whether output was lost although it had a reader, for example on a full disk.
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
    """Writes buffered text."""
    self._attempt(self._stream.flush)

  def _attempt(self, action: Any, *arguments: str) -> Any:
    try:
      return action(*arguments)
    except OSError as error:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._stream.fileno())
      os.close(nowhere)
      # EPIPE: the reader has exited; EIO: the terminal is gone. Nobody would read the output.
      if error.errno not in (errno.EPIPE, errno.EIO):
        self.is_lost = True
        if self is sys.stdout:
          reason = error.strerror or error
          print(f"paxlike: standard output cannot be written ({reason}): dropped", file=sys.stderr)
      return None


def outlive_readers():
  """Lets the program continue if standard output or error is closed, full or no longer read."""
  for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, name) is None:
      setattr(sys, name, _opened_nowhere(descriptor))
  for name in ("stdout", "stderr"):
    stream: Any = getattr(sys, name)
    if hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")  # The encoding may lack a character.
    setattr(sys, name, _Resilient(stream))


def _opened_nowhere(descriptor: int) -> Any:
  """Returns a null stream with the descriptor of a closed standard stream.

  Otherwise the next opened file would get that descriptor, and libraries that write to the standard
  stream would write into the file.
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
  """Returns whether some standard output could not be written."""
  sys.stdout.flush()
  return getattr(sys.stdout, "is_lost", False)


@contextlib.contextmanager
def mentioned(what: str, *, after: float = 20) -> Iterator[None]:
  """Context that prints `what` to standard error if it takes more than `after` seconds."""
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
  """Prints lines to standard output and, in a terminal, a bar below them to standard error.

  In a notebook the bar is on standard output, because each change of stream starts a new block.
  """

  def __init__(self):
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    self._stream = "stderr" if is_terminal else "stdout" if in_notebook() else None
    # Notebooks support "\r", but not erasing a line.
    self._erases = is_terminal
    self._bar = ""
    self._drawn = 0.0

  def line(self, text: str, *, end: str = "\n"):
    """Prints a line above the bar."""
    self._erase()
    print(text, end=end, flush=True)
    self._draw()

  def progress(self, done: int, total: int, text: str):
    """Updates the bar, at most ten times a second."""
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
