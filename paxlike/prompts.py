# SPDX-License-Identifier: Apache-2.0
"""Files of prompts to decode."""

import json
import os
import pathlib

from etils import epath

from paxlike import input_files, run_folder
from paxlike.errors import UserError

_MOST_BYTES = 2**28
# What stands for an open file, a terminal or a pipe that another process writes into.
_OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def read(name: epath.PathLike) -> list[str]:
  """Returns the prompts of a file: the lines of text, or the field "prompt" of lines of JSON.

  Raises:
    UserError: The file cannot be read, is a pipe with a name, or has no prompt, or a line has none.
  """
  lines = _text(os.fspath(name)).splitlines()
  if not str(name).endswith(".jsonl"):
    prompts = [line for line in lines if line]
  else:
    prompts = [_prompt(line, f"{name}: line {number}") for number, line in enumerate(lines, 1)]
  if not prompts:
    raise UserError(f"--prompt_file={name} has no prompts: expected one a line.")
  return prompts


def _text(name: str) -> str:
  try:
    if run_folder.is_remote(name) or name.startswith(_OPEN):
      return epath.Path(name).read_text()
    return input_files.read_text(pathlib.Path(name).expanduser(), limit=_MOST_BYTES)
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"--prompt_file={name} cannot be read: {reason}.") from None
  except UserError as error:  # It begins with the name.
    raise UserError(f"--prompt_file={error}") from None


def _prompt(line: str, place: str) -> str:
  try:
    prompt = json.loads(line)["prompt"]
  except (ValueError, KeyError, TypeError, RecursionError):
    prompt = None
  if not isinstance(prompt, str):
    raise UserError(f"--prompt_file={place} has no text in the field 'prompt'.")
  return prompt
