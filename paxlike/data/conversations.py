# SPDX-License-Identifier: Apache-2.0
"""Prompts with completions, and conversations, as a corpus of which the answers count."""

import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.data import chat, files, records, token_index
from paxlike.data.chat import Message, Part
from paxlike.data.corpus import Corpus
from paxlike.data.token_index import Document, TokenIndex
from paxlike.data.tokenizer import Tokenizer
from paxlike.errors import UserError


@configurable
class Conversations(Corpus):
  """Records of `messages`, of `prompt` and `completion`, or of Alpaca's `instruction`, `output`.

  Attributes:
    fields: What of a record is read.
  """

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
      path: A file, a folder (searched with its sub-folders) or a glob of `records`.
      tokenizer: Makes ids of texts.
      vocab_size: Ids that the model knows.
      template: See `chat.template`.
      vocab_path: The tokenizer's file, beside which its own template is.
      knob: What is named if something is wrong with the files.
    """
    self._path = path
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._template_name = template
    self._vocab_path = vocab_path
    self._knob = knob

  @property
  def tokenizer(self) -> Tokenizer:
    return self._tokenizer

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return f"{self._knob}={self._path}"

  def check(self):
    _ = self._files, self._template
    self._tokenizer.check(self._vocab_size)

  def index(self) -> TokenIndex:
    return self._index

  @functools.cached_property
  def _files(self) -> list[str]:
    return files.find(self._path, records.SUFFIXES, knob=self._knob)

  @functools.cached_property
  def _template(self) -> chat.Template:
    return chat.template(self._template_name, vocab_path=self._vocab_path)

  @functools.cached_property
  def _index(self) -> TokenIndex:
    template = self._template
    how = (
      template.args[0].source
      if isinstance(template, functools.partial)
      else inspect.getsource(chat)
    )
    stamps = files.stamps(self._files, knob=self._knob)
    kind = type(self).__name__
    key = json.dumps([kind, stamps, self._template_name, how, self._tokenizer.fingerprint()])
    index = token_index.cached(key, self._documents, vocab_size=self._vocab_size)
    if not len(index.tokens):
      raise UserError(f"{self._knob}={self._path} holds no conversation.")
    return index

  def _documents(self) -> Iterator[Document]:
    print(f"tokenizing the conversations of {len(self._files)} files (once)", file=sys.stderr)
    for name in self._files:
      try:
        for place, record in records.read(name, self.fields):
          for messages in self.messages(place, record):
            if not _are_messages(messages):
              raise UserError(f"{place}: messages need a role and a content, both texts.")
            yield self.document(messages)
      except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{self._knob}: {name} cannot be read: {error}.") from error

  def messages(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    """Returns the conversations in a record, whose place is for people.

    Raises:
      UserError: It is none of those known.
    """
    found: Any = record.get("messages")
    if found is None and "instruction" in record:
      said = [text for text in (record["instruction"], record.get("input")) if text]
      asked = "\n\n".join(said) if all(isinstance(text, str) for text in said) else None
      found = conversation(asked, record.get("output"))
    elif found is None:
      found = conversation(record.get("prompt"), record.get("completion"))
    if not _are_messages(found):
      there = ", ".join(record)
      raise UserError(
        f"{place}: neither messages with role and content, nor prompt and completion, nor"
        f" instruction and output, as texts. It has: {there}."
      )
    return [found]

  def document(self, messages: Sequence[Message]) -> Document:
    """Returns the tokens of a conversation, and which of them the model is to say."""
    tokenizer = self._tokenizer
    parts: list[Part] = self._template(messages)
    encoded = tokenizer.encode_all([part.text for part in parts])
    tokens, weights = [], []
    # A tokenizer's own template has BOS where the model wants it.
    start = None if self._template_name == "tokenizer" else tokenizer.bos_id
    if start is None and parts[0].learnt:
      start = tokenizer.eos_id  # Something has to come before the first token that is learnt.
    if start is not None:
      tokens, weights = [np.array([start])], [np.zeros(1)]
    for part, ids in zip(parts, encoded, strict=True):
      if part.ends and tokenizer.eos_id is not None:
        ids = np.append(ids, tokenizer.eos_id)
      tokens.append(ids)
      weights.append(np.full(len(ids), part.learnt))
    return {"tokens": np.concatenate(tokens), "weights": np.concatenate(weights)}


def conversation(asked: Any, answered: Any) -> list[Any]:
  """Returns a question and its answer, each a text or both messages, as one conversation."""
  before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
  after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
  return [*before, *after]


def _are_messages(messages: Any) -> bool:
  return (
    bool(messages)
    and isinstance(messages, list)
    and all(
      isinstance(message, Mapping)
      and isinstance(message.get("role"), str)
      and isinstance(message.get("content"), str)
      for message in messages
    )
  )
