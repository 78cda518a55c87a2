# SPDX-License-Identifier: Apache-2.0
"""Prompt/completion pairs and conversations as a corpus; the loss is on the answers."""

import functools
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data import token_index
from paxlike.data.chat import openai_messages, templates
from paxlike.data.chat.openai_messages import Message, Part
from paxlike.data.chat.own_template import OwnTemplate
from paxlike.data.corpus import Corpus
from paxlike.data.token_index import Document, TokenIndex
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.data.tuning.templated_records import TemplatedRecords
from paxlike.errors import UserError

# Changes with how masks of a tokenizer's own template are made: cached tokens are of one version.
_MASKS = 2
_NO_MESSAGE = (
  "each message needs a role and a content, both strings; the content may be missing only beside"
  " tool_calls or thinking"
)


@configurable
class Conversations(TemplatedRecords, Corpus):
  """Records of `messages`, of `prompt` and `completion`, or of Alpaca's `instruction`, `output`.

  Messages are OpenAI's, with `tool_calls` and thinking (`openai_messages`). A record may also have
  `tools`, and `chat_template_kwargs`.

  Attributes:
    fields: The fields of a record that are read, besides those two.
    revision: Part of the key of cached documents: changes with their form.
  """

  revision = ""
  fields: Sequence[str] = (
    "messages", "prompt", "completion", "instruction", "input", "output",
  )  # fmt: skip

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
      (_MASKS, template.source)
      if isinstance(template, OwnTemplate)
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
    for place, record in self._files.read((*self.fields, "tools", openai_messages.KWARGS)):
      yield from self.documents(place, record)

  def documents(self, place: str, record: Mapping[str, Any]) -> list[Document]:
    """Returns the documents of a record; `place` is named in errors.

    Raises:
      UserError: The record is of no known format, or the template cannot render it.
    """
    return self.rendered(place, record, self.conversations(place, record))

  def rendered(
    self,
    place: str,
    record: Mapping[str, Any],
    conversations: Sequence[Sequence[Message]],
    *,
    num_given: int = 0,
  ) -> list[Document]:
    """Returns the document of each conversation of a record; see `document`."""
    variables = openai_messages.variables(record, place=place)
    try:
      return [self.document(messages, variables, num_given=num_given) for messages in conversations]
    except UserError as error:
      raise UserError(f"{place}: {error}") from None

  def conversations(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    """Returns `messages`, checked.

    Raises:
      UserError: The record is of no known format.
    """
    found = self.messages(place, record)
    if not all(map(openai_messages.are_messages, found)):
      raise UserError(f"{place}: {_NO_MESSAGE}.")
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
    if not openai_messages.are_messages(found):
      there = ", ".join(record)
      raise UserError(
        f"{place}: a record needs messages with role and content, or prompt and completion, or"
        f" instruction and output, as strings. It has: {there}."
      )
    return [found]

  def document(
    self,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    num_given: int = 0,
  ) -> dict[str, np.ndarray]:
    """Returns the tokens and the loss mask (`weights`) of a conversation.

    Args:
      messages: The messages.
      variables: See `openai_messages.variables`.
      num_given: How many of the first messages are a prompt: answers in them have no loss.

    Raises:
      UserError: The template does not render all that was given, or the loss would be on nothing or
        on everything.
    """
    parts = self._parts(messages, variables or {}, num_given)
    ids, weights = self._encoded(parts)
    _check_mask(weights, messages)
    # A tokenizer's own template includes BOS if the model needs it.
    start = None if self._template_name == "tokenizer" else self._tokenizer.bos_id
    if start is None and weights[0]:
      start = self._tokenizer.eos_id  # The first target needs an input before it.
    if start is not None:
      ids, weights = np.append(start, ids), np.append(0, weights)
    return {"tokens": ids, "weights": weights}

  def _parts(
    self, messages: Sequence[Message], variables: Mapping[str, Any], num_given: int
  ) -> Sequence[Part]:
    """Returns the rendered parts; see `document`."""
    parts, given = templates.parts(self._template, messages, variables), messages[:num_given]
    if not any(message["role"] == "assistant" for message in given):
      return parts
    left = sum(part.is_target for part in templates.parts(self._template, given, variables))
    before = list(itertools.accumulate(part.is_target for part in parts))
    return [
      part._replace(is_target=part.is_target and count > left)
      for part, count in zip(parts, before, strict=True)
    ]

  def _encoded(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [n] and their loss mask [n]."""
    tokenizer = self._tokenizer
    if isinstance(self._template, OwnTemplate):
      found = _encoded_whole(tokenizer, parts)
      if found is not None:
        return found
    ids, weights = [], []
    encoded = tokenizer.encode_all([part.text for part in parts])
    for part, some in zip(parts, encoded, strict=True):
      if part.ends and tokenizer.eos_id is not None:
        some = np.append(some, tokenizer.eos_id)
      ids.append(some)
      weights.append(np.full(len(some), part.is_target))
    return np.concatenate(ids), np.concatenate(weights)


def _encoded_whole(
  tokenizer: Tokenizer, parts: Sequence[Part]
) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns the ids [n] of the text of all parts, and their loss mask [n].

  The text is encoded as a whole, as in transformers. Where a token would overlap two parts, its
  sides are encoded apart, as a prompt and its answer are. None: the tokenizer has no offsets.
  """
  text = "".join(part.text for part in parts)
  edges = np.cumsum([len(part.text) for part in parts])
  cuts: set[int] = set()
  while True:
    bounds = [0, *sorted(cuts), len(text)]
    ids, begins, ends = [], [], []
    for begin, end in itertools.pairwise(bounds):
      some = tokenizer.encode_with_offsets(text[begin:end])
      if some is None:
        return None
      ids.append(some.ids)
      begins.append(some.offsets[:, 0] + begin)
      ends.append(some.offsets[:, 1] + begin)
    first, last = np.concatenate(begins), np.concatenate(ends)
    part = np.searchsorted(edges, first, side="right")
    torn = edges[np.minimum(part, len(edges) - 1)] < last
    if not torn.any():
      is_target = np.array([part.is_target for part in parts])
      return np.concatenate(ids), is_target[np.minimum(part, len(parts) - 1)]
    cuts |= {*edges[part[torn]].tolist()}


def _check_mask(weights: np.ndarray, messages: Sequence[Message]):
  if not weights.any():
    raise UserError("no token has loss: there is no answer of role assistant, or it is empty.")
  others = any(one["role"] != "assistant" and one.get("content") for one in messages)
  if weights.all() and others:
    raise UserError(
      "all tokens have loss, also those of other roles than assistant: {% generation %} of the"
      " chat template is around them, too."
    )


def conversation(asked: Any, answered: Any) -> list[Any]:
  """Returns prompt and completion as one conversation; each is a string or a list of messages."""
  before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
  after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
  return [*before, *after]
