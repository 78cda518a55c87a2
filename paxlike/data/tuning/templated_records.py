# SPDX-License-Identifier: Apache-2.0
"""Records in a user's files, whose conversations a chat template renders."""

import functools
from typing import Any

from paxlike.config import constructors, ranges
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.source import Source
from paxlike.data.text.record_files import RecordFiles
from paxlike.data.tokenizers.tokenizer import Tokenizer


class TemplatedRecords(Source):
  """A source of records with a tokenizer and a chat template."""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    cls.__signature__ = constructors.signature(cls)

  def __init__(
    self,
    *,
    path: ranges.Path | None,
    tokenizer: Tokenizer,
    vocab_size: ranges.Size,
    template: str = "plain",
    vocab_path: ranges.Path | None = None,
    knob: str = "DATA_PATH",
  ):
    """Reads nothing yet.

    Args:
      path: A file, a folder (searched with its sub-folders) or a glob; for formats see `records`.
      tokenizer: The tokenizer.
      vocab_size: The model's vocabulary size.
      template: Name of a chat template; see `templates.template`.
      vocab_path: The tokenizer's file; its own template is in the same folder.
      knob: The knob that errors name.
    """
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
