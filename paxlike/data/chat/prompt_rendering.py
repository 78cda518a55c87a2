# SPDX-License-Identifier: Apache-2.0
"""Renders conversations as prompts."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlike import untrusted_files
from paxlike.data.chat import templates, tokenizer_template
from paxlike.data.chat.openai_messages import Message
from paxlike.data.tokenizers.file_tokenizer import FileTokenizer
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError


class PromptRenderer:
  """Renders messages as prompts, by the chat template of training."""

  def __init__(self, name: str, tokenizer: Tokenizer, *, vocab_path: str | None):
    """Reads nothing yet; see `templates.template` for `name` and `vocab_path`."""
    self._name = name
    self._tokenizer = tokenizer
    self._vocab_path = vocab_path

  @functools.cached_property
  def _template(self) -> templates.Template:
    return templates.template(self._name, vocab_path=self._vocab_path)

  @functools.cached_property
  def turn_end(self) -> templates.TurnEnd:
    """What ends an answer, besides the tokenizer's own end tokens."""
    return templates.turn_end(self._template, self._tokenizer)

  def tokens(
    self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
  ) -> np.ndarray:
    """Returns int32 ids [n] of the messages and of the beginning of an answer.

    Args:
      messages: The messages.
      variables: See `openai_messages.variables`.

    Raises:
      UserError: The template does not render all that was given.
    """
    text = templates.render(
      self._template, messages, add_generation_prompt=True, variables=variables
    )
    ids = self._tokenizer.encode(text)
    # A tokenizer's own template includes BOS if the model needs it.
    bos = None if self._name == "tokenizer" else self._tokenizer.bos_id
    return ids if bos is None else np.concatenate([np.array([bos], np.int32), ids])


def beside(tokenizer: Tokenizer | None) -> PromptRenderer | None:
  """Returns a `PromptRenderer` with the template in a tokenizer's folder; None if it has none."""
  if not isinstance(tokenizer, FileTokenizer):
    return None
  path = os.fspath(tokenizer.path)
  try:
    tokenizer_template.read(tokenizer.path)
  except UserError:
    beside = (tokenizer.path.parent / name for name in tokenizer_template.FILES[1:])
    if any(map(untrusted_files.is_there, beside)):
      raise
    return None
  return PromptRenderer("tokenizer", tokenizer, vocab_path=path)
