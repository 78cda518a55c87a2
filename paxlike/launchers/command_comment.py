# SPDX-License-Identifier: Apache-2.0
"""The comment of a script or manifest that says which command made it."""

import shlex
from collections.abc import Sequence

_SHEBANG = "#!/usr/bin/env bash\n"
_FIRST = "# Made by this command; --to=FILE saves another:\n"
_INDENT = "#   "


def added(text: str, argv: Sequence[str]) -> str:
  """Returns a script or manifest with the comment.

  Args:
    text: The script or manifest.
    argv: The arguments of `paxlike-launch`. `--to` and `--submit` are left out of the comment.
  """
  words = [shlex.quote(word) for word in _kept(argv)]
  command = " \\\n  ".join([f"paxlike-launch {words[0]}", *words[1:]])
  lines = [f"{_INDENT}{line}" if line else "#" for line in command.split("\n")]
  comment = _FIRST + "".join(f"{line}\n" for line in lines)
  body = text.removeprefix(_SHEBANG)
  return f"{text[: len(text) - len(body)]}{comment}\n{body}"


def _kept(argv: Sequence[str]) -> list[str]:
  kept, words = [], iter(argv)
  for word in words:
    if word == "--to":
      next(words, None)
    elif word != "--submit" and not word.startswith("--to="):
      kept.append(word)
  return kept


def read(text: str) -> list[str]:
  """Returns the arguments of `paxlike-launch` in the comment of a script or manifest."""
  _, _, rest = text.partition(_FIRST)
  lines = rest.partition("\n\n")[0].split("\n")
  words = shlex.split("\n".join(line[len(_INDENT) :] for line in lines))
  # A backslash at the end of a line makes a word of the line's end.
  return [word for word in words if word != "\n"][1:]
