# SPDX-License-Identifier: Apache-2.0
"""Single answers that are labeled as desirable or not."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.chat import openai_messages
from paxlike.data.dataset import Arrays
from paxlike.data.examples import EpochPlan, ExampleRows
from paxlike.data.token_index import Document
from paxlike.data.tuning.conversations import conversation
from paxlike.data.tuning.preferences import Preferences
from paxlike.errors import UserError


@configurable
class LabeledAnswers(Preferences):
  """Records of a `prompt`, a `completion` and a `label`, true or false; or those of `Preferences`.

  An answer becomes a document. The chosen answer of a pair is desirable, the rejected one is not.
  """

  fields: Sequence[str] = ("prompt", "completion", "label", "chosen", "rejected")

  def documents(self, place: str, record: Mapping[str, Any]) -> list[Document]:
    if record.get("chosen") is not None:
      pair = super().documents(place, record)
      return [_labeled(document, label) for document, label in zip(pair, (1, 0), strict=True)]
    prompt, label = record.get("prompt"), record.get("label")
    messages = conversation(prompt, record.get("completion"))
    if not isinstance(label, bool) or not openai_messages.are_messages(messages):
      there = ", ".join(record)
      raise UserError(
        f"{place}: a record needs prompt and completion, and a label that is true or false, or else"
        f" prompt, chosen and rejected. It has: {there}."
      )
    num_given = len(conversation(prompt, []))
    (document,) = self.rendered(place, record, [messages], num_given=num_given)
    return [_labeled(document, label)]


@configurable
class LabeledRows(ExampleRows):
  """One answer per sequence, whose segment is 1 if it is desirable, and 2 if not."""

  def fingerprint(self) -> str:
    return f"labeled {super().fingerprint()}"

  def _rows(self, epoch: int, numbers: np.ndarray, length: int) -> Arrays:
    arrays = super()._rows(epoch, numbers, length)
    examples, _ = self._plan(epoch)
    first = self._index.offsets[examples[numbers]]
    is_desirable = self._index.columns["desirable"][first].astype(bool)
    arrays["segments"] *= np.where(is_desirable, 1, 2).astype(np.int32)[:, None]
    return arrays

  def _make_plan(self, epoch: int) -> EpochPlan:
    return self._one_by_one(epoch)


def _labeled(document: Any, label: int) -> Document:
  return {**document, "desirable": np.full(len(document["tokens"]), label)}
