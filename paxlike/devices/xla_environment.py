# SPDX-License-Identifier: Apache-2.0
"""The variable XLA_FLAGS, without the flags that this version of XLA does not take.

XLA aborts a process that has one. Only XLA knows its flags (its library still contains the names of
removed ones), so a child process is given them, which takes about 0.2 s.
"""

import difflib
import functools
import importlib.util
import mmap
import os
import pathlib
import re
import subprocess
import sys

from paxlike.errors import UserError

VARIABLE = "XLA_FLAGS"
# XLA reads the variable when compile options are first made. No device is needed.
_ASK = "import jaxlib._jax as x; x.CompileOptions().executable_build_options.debug_options"
# A flag, whose value may be quoted, as xla/parse_flags_from_env.cc reads it.
_FLAG = re.compile(r"""\s*(-[-\w]*(?:="(?:\\.|[^"\\])*"?|='[^']*'?|\S*))""", re.ASCII)


def settle() -> str:
  """Removes flags that XLA does not take from the variable; a file's name becomes its flags.

  Call it before XLA is used.

  Returns:
    What was wrong, for the user; "" if nothing was.

  Raises:
    UserError: The file cannot be read, or XLA refuses the value of a flag.
  """
  if not os.environ.get(VARIABLE):
    return ""
  text = os.environ[VARIABLE].strip()  # XLA takes blanks for the name of a file.
  flags, rest = _parsed(text if text[:1] in ("", "-") else _read(text))
  answer = _answer(flags) if flags else ""
  if refused := re.search(r"Couldn't interpret value .*", answer):
    raise UserError(f"{VARIABLE}: {refused[0]}")
  unknown = _unknown(answer)
  dropped = [flag for flag in flags if _key(flag) in unknown]
  os.environ[VARIABLE] = " ".join(flag for flag in flags if flag not in dropped)
  messages = []
  if dropped:
    named = ", ".join(flag + _hint(flag) for flag in dropped)
    messages.append(f"this version of XLA does not take {named}: left out")
  if rest:
    messages.append(f"{rest} does not begin with --: ignored from there on, as XLA does")
  return f"{VARIABLE}: {'; '.join(messages)}" if messages else ""


def _read(file: str) -> str:
  try:
    return pathlib.Path(file).read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not text"
    raise UserError(
      f"{VARIABLE}={file}: it does not begin with --, so XLA reads flags from a file of that name,"
      f" which cannot be read: {reason}."
    ) from error


def _parsed(text: str) -> tuple[list[str], str]:
  """Returns the flags of a text, and the word at which XLA stops reading; "" if it does not."""
  flags, end = [], 0
  while match := _FLAG.match(text, end):
    flags.append(match[1])
    end = match.end()
  return flags, (text[end:].split() or [""])[0]


def _key(flag: str) -> str:
  """Returns a flag up to its value: XLA takes those of numbers and texts only with one."""
  match = re.match(r"[-\w]*=?", flag, re.ASCII)
  assert match
  return match[0]


def _answer(flags: list[str]) -> str:
  """Returns what XLA says to these flags; "" if it takes them, or cannot be asked."""
  if not sys.executable or importlib.util.find_spec("jaxlib") is None:
    return ""
  done = subprocess.run(
    [sys.executable, "-c", _ASK],
    env=os.environ | {VARIABLE: " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "0"},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    encoding="utf-8",
    errors="replace",
    check=False,
  )
  return done.stderr if done.returncode else ""


def _unknown(answer: str) -> set[str]:
  """Returns the keys of the flags that XLA lists as unknown."""
  listed = re.search(rf"Unknown flags? in {VARIABLE}: (.*)", answer)
  return {_key(word) for word in listed[1].split()} if listed else set()


def _hint(flag: str) -> str:
  """Returns " (did you mean X?)" for a misspelt flag, or "" if XLA has no similar flag."""
  name = _key(flag).strip("-=")
  near = difflib.get_close_matches(name, _candidates(), n=2, cutoff=0.9)
  found = next((f"--{one}" for one in near if one != name), "")
  return f" (did you mean {found}?)" if found and not _unknown(_answer([f"{found}=1"])) else ""


@functools.cache
def _candidates() -> list[str]:
  """Returns all that looks like the name of a flag in XLA's library."""
  spec = importlib.util.find_spec("jaxlib")
  file = pathlib.Path((spec and spec.origin) or "").parent / "libjax_common.so"
  if not file.is_file():
    return []
  with file.open("rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as text:
    return sorted({name.decode() for name in re.findall(rb"xla_[a-z0-9_]{3,80}", text)})
