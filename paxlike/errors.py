# SPDX-License-Identifier: Apache-2.0
"""The exceptions that end a run in one line."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """Bad input. `paxlike` prints its message as one line, without a traceback, and exits with 2."""


class RunError(RuntimeError):
  """The run failed, and no flag or file of the user is to blame.

  `paxlike` prints the message and exits with 1.
  """


class TemporaryError(RunError):
  """The same, but started again the run may succeed. `paxlike` exits with 75 (EX_TEMPFAIL)."""


def one_line(error: object, *, limit: int = 2000) -> str:
  """Returns a message for a terminal: what others' files put into it cannot break or steer that."""
  text = " ".join(line.strip() for line in str(error).splitlines())
  text = "".join(char if char.isprintable() else _escaped(char) for char in text)
  return text if len(text) <= limit else f"{text[:limit]}..."


def _escaped(char: str) -> str:
  return char.encode("unicode_escape").decode()


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
  """Returns " Did you mean X?" for the candidate nearest to `name`, or "" if none is near."""
  near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
  return f" Did you mean {near[0]}?" if near else ""
