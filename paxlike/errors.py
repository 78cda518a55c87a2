# SPDX-License-Identifier: Apache-2.0
"""Exceptions that end a run with a one-line message."""

import difflib
from collections.abc import Iterable

#: EX_TEMPFAIL of sysexits.h: a launcher should start the same command again.
TEMPORARY = 75


class UserError(ValueError):
  """Invalid input. `paxlike` prints the message in one line without a traceback and exits 2."""


class ArgumentError(UserError):
  """An invalid argument of a layer, in the message as `name=value`; see `knob_arguments.named`."""


class RunError(RuntimeError):
  """The run failed for a reason other than the user's flags or files.

  `paxlike` prints the message and exits with 1.
  """


class TemporaryError(RunError):
  """A failure after which the same command may succeed. `paxlike` exits with 75 (EX_TEMPFAIL)."""


def exit_status(error: BaseException) -> int:
  """Returns the exit status of a process that an exception ends."""
  if isinstance(error, UserError):
    return 2
  return TEMPORARY if isinstance(error, TemporaryError) else 1


def one_line(error: object, *, limit: int = 2000) -> str:
  """Returns an error's message in one line; control characters, as of quoted files, are escaped."""
  text = " ".join(line.strip() for line in str(error).splitlines())
  text = "".join(char if char.isprintable() else _escaped(char) for char in text)
  return text if len(text) <= limit else f"{text[:limit]}..."


def _escaped(char: str) -> str:
  return char.encode("unicode_escape").decode()


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
  """Returns " Did you mean X?" for the candidate nearest to `name`, or "" if none is near."""
  near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
  return f" Did you mean {near[0]}?" if near else ""
