# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code an exception was raised, and its message in one line."""

import linecache
import os
import pathlib
import re
import sysconfig
import traceback

_PACKAGE = f"{pathlib.Path(__file__).parent}{os.sep}"
_LIBRARIES = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})
# A graph in a Fiddle error message: `<Partial[Mlp(hidden_dim=64, ...)]>`.
_GRAPH = re.compile(r"<(\w+\[[\w.]+)\(.*\)\]>", re.DOTALL)


def summary(error: BaseException) -> str:
  """Returns the type and the message of an exception in one line, without a final period."""
  if isinstance(error, SystemExit):
    return f"sys.exit({'' if error.code is None else repr(error.code)[:300]}) was called"
  text = _GRAPH.sub(r"\1]", str(error).partition("\n\nFiddle context:")[0])
  lines = text.strip().splitlines()
  text = " ".join(map(str.strip, lines[:2])).rstrip(".")
  return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def line_of(error: BaseException, *, entry: bool) -> str:
  """Returns the innermost line of the user's code in a traceback, or "".

  Args:
    error: An exception that was raised.
    entry: Whether `__main__` counts as the user's code: true for a script that calls
      `paxlike.train`, false for a command.
  """
  if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
    return f"{error.filename}, line {error.lineno}"  # The traceback has no frame of that file.
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    path = os.path.abspath(frame.filename)
    # Notebook cells are not files, but `linecache` has their lines.
    exists = os.path.isfile(path) or frame.filename in linecache.cache
    is_ours = path.startswith((_PACKAGE, *_LIBRARIES)) or not exists
    if not is_ours and (entry or not _is_entry(path)):
      return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
  return ""


def _is_entry(path: str) -> bool:
  import __main__

  return path == os.path.abspath(getattr(__main__, "__file__", None) or "")


def is_ours(path: str) -> bool:
  """Returns whether a file is part of paxlike."""
  return os.path.abspath(path).startswith(_PACKAGE)
