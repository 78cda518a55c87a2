# SPDX-License-Identifier: Apache-2.0
"""What corpora and data sets have in common."""

from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.tokenizers.tokenizer import Tokenizer


class Source:
  """A source of tokens."""

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer; None if the data is not text."""
    return None

  @property
  def prompt_renderer(self) -> PromptRenderer | None:
    """Renders conversations as prompts; None unless the data are conversations."""
    return None

  @property
  def vocab_size(self) -> int | None:
    """The exclusive upper bound of ids; None if it was not given."""
    return None

  @property
  def named(self) -> str:
    """Its name in messages: the source and the split."""
    return "the data"

  def check(self):
    """Checks paths and options; cheap, and writes nothing.

    Raises:
      UserError: A path is missing, for example.
    """
