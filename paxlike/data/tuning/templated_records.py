# SPDX-License-Identifier: Apache-2.0
"""Records in a user's files, whose conversations a chat template renders."""

import functools

from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.source import Source
from paxlike.data.text.record_files import RecordFiles
from paxlike.data.tokenizers.tokenizer import Tokenizer


class TemplatedRecords(Source):
  """A source of records with a tokenizer and a chat template."""

  def __init__(
    self,
    *,
    path: str | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    template: str,
    vocab_path: str | None,
    knob: str,
  ):
    """Reads nothing yet; for the arguments see `Conversations`."""
    self._files = RecordFiles(path, knob=knob)
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._template_name = template
    self._vocab_path = vocab_path

  @property
  def tokenizer(self) -> Tokenizer:
    return self._tokenizer

  @functools.cached_property
  def prompt_renderer(self) -> PromptRenderer:
    return PromptRenderer(self._template_name, self._tokenizer, vocab_path=self._vocab_path)

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return self._files.named
