# SPDX-License-Identifier: Apache-2.0
"""Prompt/completion pairs and conversations as a corpus; the loss is on the answers."""

import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data import token_index
from paxlike.data.chat import templates
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.chat.templates import Message, Part
from paxlike.data.corpus import Corpus
from paxlike.data.text.record_files import RecordFiles
from paxlike.data.token_index import Document, TokenIndex
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError


@configurable
class Conversations(Corpus):
  """Records of `messages`, of `prompt` and `completion`, or of Alpaca's `instruction`, `output`.

  Attributes:
    fields: The fields of a record that are read.
    revision: Part of the key of cached documents: changes with their form.
  """

  revision = ""
  fields: Sequence[str] = (
    "messages", "prompt", "completion", "instruction", "input", "output",
  )  # fmt: skip

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

  def check(self):
    _ = self._files.stamps(), self._template
    self._tokenizer.check(self._vocab_size)

  def index(self) -> TokenIndex:
    return self._index

  @functools.cached_property
  def _template(self) -> templates.Template:
    return templates.template(self._template_name, vocab_path=self._vocab_path)

  @functools.cached_property
  def _index(self) -> TokenIndex:
    template = self._template
    how = (
      template.args[0].source
      if isinstance(template, functools.partial)
      else inspect.getsource(templates)
    )
    stamps = self._files.stamps()
    kind = f"{type(self).__name__} {self.revision}".rstrip()
    key = json.dumps([kind, stamps, self._template_name, how, self._tokenizer.fingerprint()])
    index = token_index.cached(key, self._documents, vocab_size=self._vocab_size)
    if not len(index.tokens):
      raise UserError(f"{self.named} has no conversation.")
    return index

  def _documents(self) -> Iterator[Document]:
    print(f"tokenizing the conversations of {len(self._files)} files (once)", file=sys.stderr)
    for place, record in self._files.read(self.fields):
      yield from self.documents(place, record)

  def documents(self, place: str, record: Mapping[str, Any]) -> list[Document]:
    """Returns the documents of a record; `place` is named in errors.

    Raises:
      UserError: The record is of no known format.
    """
    return [self.document(messages) for messages in self.conversations(place, record)]

  def conversations(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    """Returns `messages`, checked.

    Raises:
      UserError: The record is of no known format.
    """
    found = self.messages(place, record)
    if not all(map(templates.are_messages, found)):
      raise UserError(f"{place}: each message needs a role and a content, both strings.")
    return found

  def messages(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    """Returns the conversations in a record; `place` is named in errors.

    Raises:
      UserError: The record is of no known format.
    """
    found: Any = record.get("messages")
    if found is None and "instruction" in record:
      said = [text for text in (record["instruction"], record.get("input")) if text]
      asked = "\n\n".join(said) if all(isinstance(text, str) for text in said) else None
      found = conversation(asked, record.get("output"))
    elif found is None:
      found = conversation(record.get("prompt"), record.get("completion"))
    if not templates.are_messages(found):
      there = ", ".join(record)
      raise UserError(
        f"{place}: a record needs messages with role and content, or prompt and completion, or"
        f" instruction and output, as strings. It has: {there}."
      )
    return [found]

  def document(self, messages: Sequence[Message], *, num_given: int = 0) -> dict[str, np.ndarray]:
    """Returns the tokens and the loss mask (`weights`) of a conversation.

    Args:
      messages: The conversation.
      num_given: How many of its first messages are a prompt: answers in them have no loss.
    """
    tokenizer = self._tokenizer
    parts: list[Part] = self._template(messages)
    given = sum(message["role"] == "assistant" for message in messages[:num_given])
    encoded = tokenizer.encode_all([part.text for part in parts])
    tokens, weights = [], []
    # A tokenizer's own template includes BOS if the model needs it.
    start = None if self._template_name == "tokenizer" else tokenizer.bos_id
    if start is None and parts[0].is_target:
      start = tokenizer.eos_id  # The first target needs an input before it.
    if start is not None:
      tokens, weights = [np.array([start])], [np.zeros(1)]
    for part, ids in zip(parts, encoded, strict=True):
      if part.ends and tokenizer.eos_id is not None:
        ids = np.append(ids, tokenizer.eos_id)
      tokens.append(ids)
      weights.append(np.full(len(ids), part.is_target and not given))
      given -= part.is_target and given > 0
    return {"tokens": np.concatenate(tokens), "weights": np.concatenate(weights)}


def conversation(asked: Any, answered: Any) -> list[Any]:
  """Returns prompt and completion as one conversation; each is a string or a list of messages."""
  before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
  after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
  return [*before, *after]
