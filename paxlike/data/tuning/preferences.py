# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: a chosen and a rejected answer in one sequence."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.chat import templates
from paxlike.data.chat.openai_messages import Message
from paxlike.data.examples import EpochPlan, ExampleRows
from paxlike.data.token_index import Document
from paxlike.data.tuning.conversations import Conversations, conversation
from paxlike.errors import UserError


@configurable
class Preferences(Conversations):
  """Records of `chosen` and `rejected` answers to a `prompt`, or of two whole conversations.

  A record becomes two documents: the chosen conversation, then the rejected one. The answers are
  what follows the prompt, or the messages that both conversations begin with.
  """

  fields: Sequence[str] = ("prompt", "chosen", "rejected", "label")
  revision = "without loss on answers in the prompt"

  def documents(self, place: str, record: Mapping[str, Any]) -> list[Document]:
    pair = self.conversations(place, record)
    num_given = _num_given(record, pair)
    return self.rendered(place, record, pair, num_given=num_given)

  def messages(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    prompt = record.get("prompt")
    if "label" in record and "chosen" not in record:
      raise UserError(
        f"{place}: labeled answers are for PREFERENCE_LOSS=kto; other losses need records with"
        " prompt, chosen and rejected."
      )
    pair: list[Any] = [record.get("chosen"), record.get("rejected")]
    if prompt is None and not all(isinstance(one, list) for one in pair):
      there = ", ".join(record)
      raise UserError(f"{place}: no prompt, nor messages in chosen and rejected. It has: {there}.")
    # An answer that begins with a message of another role is a whole conversation.
    return [one if _is_whole(one) else conversation(prompt, one) for one in pair]


def _num_given(record: Mapping[str, Any], pair: Sequence[Sequence[Message]]) -> int:
  """Returns how many messages of both conversations are the prompt."""
  if not any(_is_whole(record.get(name)) for name in ("chosen", "rejected")):
    return len(conversation(record.get("prompt"), []))
  alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False))
  return min(len(list(alike)), *(len(messages) - 1 for messages in pair))


def _is_whole(answer: Any) -> bool:
  first = answer[0] if isinstance(answer, list) and answer else None
  return isinstance(first, Mapping) and first.get("role") != "assistant"


@configurable
class ScoredPreferences(Preferences):
  """Those of `Preferences`, for models that give a whole conversation a reward.

  All tokens are inputs, EOS included: the last one's target, an appended 0, is the only one with
  weight.
  """

  revision = "whole conversations"

  def scored(
    self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
  ) -> np.ndarray:
    """Returns the tokens of a conversation, int [n], of which the last one's reward counts.

    Raises:
      UserError: The template cannot render it, or its end is not an answer.
    """
    try:
      return super().document(messages, variables)["tokens"]
    except UserError:
      if messages[-1]["role"] != "assistant":
        raise
    # Of an odd answer, such as an empty one, it may be unclear what the assistant writes.
    text = templates.render(
      self._template, messages, add_generation_prompt=False, variables=variables
    )
    bos = None if self._template_name == "tokenizer" else self._tokenizer.bos_id
    ids = self._tokenizer.encode(text)
    return ids if bos is None else np.append(bos, ids)

  def document(
    self,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    num_given: int = 0,
  ) -> dict[str, np.ndarray]:
    del num_given
    tokens = super().document(messages, variables)["tokens"]
    return {"tokens": np.append(tokens, 0), "weights": np.append(np.zeros(len(tokens)), 1)}


@configurable
class PairRows(ExampleRows):
  """One preference pair per sequence: segment 1 is the chosen conversation, 2 the rejected one.

  Each is truncated to half of `seq_len`.
  """

  segment_names = ("chosen", "rejected")

  def fingerprint(self) -> str:
    return f"pairs of {super().fingerprint()}"

  @property
  def _most(self) -> int:
    return self.seq_len // 2

  def _check_not_empty(self):
    super()._check_not_empty()
    _, offsets, columns = self._index

    def has_loss(example: int) -> bool:
      first = offsets[example] + 1
      return bool(columns["weights"][first : first + self._sizes[example]].any())

    if not any(all(map(has_loss, pair)) for pair in self._kept.reshape(-1, 2)):
      raise UserError(
        f"{self.named}: half of MAX_SEQ_LEN={self.seq_len} truncates an answer of each pair before"
        " its first token with loss: raise it."
      )

  def _make_plan(self, epoch: int) -> EpochPlan:
    first, last = (int(share * (len(self._sizes) // 2)) for share in self._split)
    pairs = np.arange(first, last)
    if self._shuffle:
      self._random(epoch).shuffle(pairs)
    return EpochPlan(
      (2 * pairs[:, None] + np.arange(2)).reshape(-1), np.arange(0, 2 * len(pairs) + 1, 2)
    )
