# SPDX-License-Identifier: Apache-2.0
"""Files of prompts to decode."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from paxlike import file_io, untrusted_files
from paxlike.data.chat import openai_messages
from paxlike.errors import UserError
from paxlike.inference.decoding import Prompt

_MOST_BYTES = 2**28
# Paths of an open file, terminal or pipe.
_OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def read(name: epath.PathLike) -> list[Prompt]:
  """Returns the prompts of a file: lines of text, or fields of JSON lines.

  A JSON line has a string in the field "prompt", or a conversation in "messages".

  Raises:
    UserError: The file cannot be read, is a named pipe or has no prompt, or a JSON line has none.
  """
  lines = _text(os.fspath(name)).splitlines()
  if not str(name).endswith(".jsonl"):
    prompts: list[Prompt] = [line for line in lines if line]
  else:
    prompts: list[Prompt] = [
      _prompt(line, f"{name}: line {number}") for number, line in enumerate(lines, 1)
    ]
  if not prompts:
    raise UserError(f"--prompt_file={name} has no prompts: expected one per line.")
  return prompts


def _text(name: str) -> str:
  try:
    if file_io.is_remote(name) or name.startswith(_OPEN):
      return epath.Path(name).read_text()
    return untrusted_files.read_text(pathlib.Path(name).expanduser(), limit=_MOST_BYTES)
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"--prompt_file={name} cannot be read: {reason}.") from None
  except UserError as error:  # Its message begins with the file's name.
    raise UserError(f"--prompt_file={error}") from None


def _prompt(line: str, place: str) -> Prompt:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    record = None
  record = record if isinstance(record, dict) else {}
  prompt = record.get("prompt")
  if isinstance(prompt, str):
    return prompt
  if record.get("messages") is None:
    raise UserError(
      f"--prompt_file={place} has no string in the field 'prompt', and no conversation in"
      " 'messages'."
    )
  return conversation(record, f"--prompt_file={place}")


def conversation(record: Mapping[str, Any], place: str) -> Sequence[openai_messages.Message]:
  """Returns the messages of `{"messages": [...]}`.

  Raises:
    UserError: There are no valid messages, or the last one is an answer; the error begins with
      `place`.
  """
  if "messages" not in record:
    raise UserError(f"{place}: expected {{'messages': [...]}}, got {dict(record)!r:.100}.")
  messages = record["messages"]
  messages = list(messages) if isinstance(messages, tuple) else messages
  if not openai_messages.are_messages(messages):
    raise UserError(f"{place}: messages need a role and a content, both strings.")
  if messages[-1]["role"] == "assistant":
    raise UserError(f"{place} ends with an answer: leave that out.")
  if given := openai_messages.variables(record, place=place):
    raise UserError(f"{place}: a prompt to decode has messages only: leave {', '.join(given)} out.")
  return messages
