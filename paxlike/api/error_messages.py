# SPDX-License-Identifier: Apache-2.0
"""Error messages of the Python API, which name keywords and calls instead of flags."""

import ast
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator

from paxlike import saved_experiment
from paxlike.errors import RunError, UserError

_VALUE = r"""(?P<value>'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\}|[^\s,;:)]*[^\s,;:).?])?"""
_Rule = tuple[str, str | Callable[[re.Match[str]], str]]


def _keyword(match: re.Match[str]) -> str:
  return f"{match['name']}={_literal(match['value'] or '')}"


def _literal(text: str) -> str:
  """Returns the value of a flag as in Python; placeholders such as FILE stay."""
  try:
    ast.literal_eval(text)
  except (ValueError, SyntaxError):
    if text in ("true", "false"):
      return text.capitalize()
    return text if text.isupper() or text[:1] in ("", "[", "{") else json.dumps(text)
  return text


#: (Pattern in a message of the command, its replacement), applied in order.
_RULES: tuple[_Rule, ...] = (
  (rf"--fdl\.(?P<name>[A-Z]\w*)={_VALUE}", _keyword),
  (r"--fdl\.", ""),
  ("set --fdl_config=NAME and the flags that the run was started with", "leave the knobs out"),
  (rf"--fdl_config={_VALUE}", lambda match: _literal(match["value"] or "")),
  (r"--fdl_config: ", ""),
  (r"--fdl_help lists its knobs", "Its method knobs() lists them"),
  (r"(?<!paxlike )--list shows", "The command paxlike --list shows"),
  (r"--job_log_dir=|--to=", "folder "),
  (r"by --job_log_dir", "by its folder"),
  (r"--job_log_dir", "folder"),
  (r"--path=", ""),
  (rf"--(?P<name>dtype|step|stop|temperature|top_k|top_p|min_p)={_VALUE}", _keyword),
  (r"--base(?! of)", "--base of paxlike-convert"),
  (r"--tfds_data_dir", "the environment variable TFDS_DATA_DIR"),
  (r"--mode=eval", "evaluation"),
  (r"--mode=decode", "decoding"),
  (r"(?<!paxlike )--mode=compile shows", "paxlike --mode=compile shows"),
  (r" --traceback shows (more|where)\.", ""),
  (r"any one of these flags", "any one of these"),
  (r"the same command", "the same call"),
)
_MODULES = re.compile(r"--fdl_allow_modules=(?P<names>[\w.,]+)")


def translated(message: str, *, folder: str | os.PathLike[str] | None = None) -> str:
  """Returns a message of the command in terms of the API.

  Args:
    message: The message.
    folder: The folder of a run, for the call that allows all modules that the run needs.
  """
  for pattern, replacement in _RULES:
    message = re.sub(pattern, replacement, message)
  return _MODULES.sub(lambda match: _allowing(match["names"].split(","), folder), message)


def _allowing(names: list[str], folder: str | os.PathLike[str] | None) -> str:
  """Returns the argument that allows modules; with a folder, the call of `load`."""
  if folder is not None:
    with contextlib.suppress(ValueError):  # A damaged file is reported when it is read.
      names = list(dict.fromkeys([*names, *saved_experiment.foreign_modules(folder)]))
  argument = f"allow_modules={json.dumps(names)}"
  if folder is None:
    return argument
  return f"paxlike.load({json.dumps(os.fspath(folder))}, {argument})"


@contextlib.contextmanager
def for_python(folder: str | os.PathLike[str] | None = None) -> Iterator[None]:
  """Context or decorator whose errors are in terms of the API; for `folder` see `translated`."""
  try:
    yield
  except (UserError, RunError) as error:
    error.args = (translated(str(error), folder=folder),)
    raise
