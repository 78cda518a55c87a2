# SPDX-License-Identifier: Apache-2.0
"""What the files of Hugging Face beside a tokenizer say of the tokens that begin and end texts."""

import os
import pathlib
from typing import Any

from paxlike import input_files
from paxlike.errors import UserError

_TOKENIZER = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_GENERATION = "generation_config.json"
# What travels with a tokenizer, beside its own file and its chat template.
FILES = (_TOKENIZER, _SPECIAL, _GENERATION, "added_tokens.json")


class TokenSettings:
  """The settings beside the file of a tokenizer; each file is read when first needed."""

  def __init__(self, tokenizer: str | os.PathLike[str]):
    """`tokenizer` is the path of its file; settings lie in the same folder, or there are none."""
    self._folder = os.path.dirname(os.fspath(tokenizer))
    self._read: dict[str, dict[str, Any]] = {}

  @property
  def adds_bos(self) -> bool | None:
    """Whether texts begin with BOS; None: nothing is said."""
    said = self._told(_TOKENIZER).get("add_bos_token")
    return said if isinstance(said, bool) else None

  @property
  def has_tokenizer_config(self) -> bool:
    """Whether there is a `tokenizer_config.json`."""
    return bool(self._told(_TOKENIZER))

  def token(self, name: str) -> str | None:
    """Returns the text of `bos_token` or `eos_token`; None: it is not named.

    Raises:
      UserError: It is named by something that is no text.
    """
    for file in (_TOKENIZER, _SPECIAL):
      found = self._told(file).get(name)
      found = found.get("content") if isinstance(found, dict) else found
      if isinstance(found, str):
        return found
      if found is not None:
        raise UserError(f"{os.path.join(self._folder, file)}: {name} is no text.")
    return None

  def ids(self, name: str) -> tuple[int, ...]:
    """Returns the ids of `bos_token_id` or `eos_token_id`, of which there may be several."""
    return ids_of(self._told(_GENERATION), name)

  def _told(self, name: str) -> dict[str, Any]:
    if name not in self._read:
      self._read[name] = _settings(os.path.join(self._folder, name))
    return self._read[name]


def ids_of(config: dict[str, Any], name: str) -> tuple[int, ...]:
  """Returns the ids that a configuration has under a name: none, one, or a list of them."""
  found = config.get(name)
  found = found if isinstance(found, list) else [found]
  return tuple(token for token in found if isinstance(token, int) and not isinstance(token, bool))


def _settings(path: str) -> dict[str, Any]:
  if not input_files.is_there(pathlib.Path(path)):
    return {}
  return input_files.read_json(pathlib.Path(path))
