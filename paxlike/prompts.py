# SPDX-License-Identifier: Apache-2.0
"""Files of prompts to decode."""

import json

from etils import epath

from paxlike.errors import UserError


def read(name: epath.PathLike) -> list[str]:
  """Returns the prompts of a file: the lines of text, or the field "prompt" of lines of JSON.

  Raises:
    UserError: The file cannot be read, or a line has no prompt.
  """
  try:
    lines = epath.Path(name).read_text().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"--prompt_file={name} cannot be read: {reason}.") from None
  if not str(name).endswith(".jsonl"):
    return [line for line in lines if line]
  prompts = []
  for number, line in enumerate(lines, 1):
    try:
      prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
      prompt = None
    if not isinstance(prompt, str):
      raise UserError(f"--prompt_file={name}: line {number} has no text in the field 'prompt'.")
    prompts.append(prompt)
  return prompts
