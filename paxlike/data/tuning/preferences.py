# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: a chosen and a rejected answer in one sequence."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.chat.openai_messages import Message
from paxlike.data.examples import EpochPlan, ExampleRows
from paxlike.data.tuning.conversations import Conversations, conversation
from paxlike.errors import UserError


@configurable
class Preferences(Conversations):
  """Records of `chosen` and `rejected` answers to a `prompt`, or of two whole conversations.

  A record becomes two documents: the chosen conversation, then the rejected one.
  """

  fields = ("prompt", "chosen", "rejected")

  def messages(self, place: str, record: Mapping[str, Any]) -> list[list[Message]]:
    prompt = record.get("prompt")
    pair: list[Any] = [record.get("chosen"), record.get("rejected")]
    if prompt is None and not all(isinstance(one, list) for one in pair):
      there = ", ".join(record)
      raise UserError(f"{place}: no prompt, nor messages in chosen and rejected. It has: {there}.")
    # An answer that begins with a message of another role is a whole conversation.
    return [one if _is_whole(one) else conversation(prompt, one) for one in pair]


def _is_whole(answer: Any) -> bool:
  first = answer[0] if isinstance(answer, list) and answer else None
  return isinstance(first, Mapping) and first.get("role") != "assistant"


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

  def _make_plan(self, epoch: int) -> EpochPlan:
    first, last = (int(share * (len(self._sizes) // 2)) for share in self._split)
    pairs = np.arange(first, last)
    if self._shuffle:
      self._random(epoch).shuffle(pairs)
    return EpochPlan(
      (2 * pairs[:, None] + np.arange(2)).reshape(-1), np.arange(0, 2 * len(pairs) + 1, 2)
    )
