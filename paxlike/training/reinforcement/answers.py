# SPDX-License-Identifier: Apache-2.0
"""Sampled answers, and batches of them: as many prompts with their answers as fit a sequence."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike.data.dataset import Arrays
from paxlike.data.examples import best_fit
from paxlike.data.tuning.prompts import Prompts

_NAMES = ("inputs", "targets", "segments", "positions", "seeds")
# What the loss needs of each token, and the more that it needs with a value head.
_OF_LOSS = ("weights", "advantages", "old_log_probabilities")
_OF_VALUES = ("returns", "old_values")


@dataclasses.dataclass(kw_only=True)
class Answer:
  """An answer that was sampled for a prompt.

  Attributes:
    prompt: int32 tokens.
    record: Number of the record that the prompt is from.
    max_tokens: The most tokens it may have.
    seed: Of the sampling; see `request.Request`.
    tokens: Of the answer, with the end token if it has one.
    has_ended: Whether it has one; else the answer is cut off.
    drafted: Log-probabilities under the decoder's numerics, NaN for tokens that the training
      forward pass has drawn.
    log_probabilities: Under the training forward pass, float32, of each token.
    values: Of the value head, before each token, float32; empty if the model has none.
    reward: Its reward.
    advantage: Its advantage, or that of each token.
    returns: Of each token, what its value is trained to be; empty without a value head.
  """

  prompt: np.ndarray
  max_tokens: int
  record: int = 0
  seed: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  has_ended: bool = False
  drafted: list[float] = dataclasses.field(default_factory=list)
  log_probabilities: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
  values: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
  reward: float = 0.0
  advantage: Any = 0.0
  returns: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

  @property
  def is_finished(self) -> bool:
    """Whether it has ended or is cut off."""
    return self.has_ended or len(self.tokens) >= self.max_tokens

  @property
  def size(self) -> int:
    """Positions in a sequence: its last token is only a target."""
    return len(self.prompt) + len(self.tokens) - 1


class Place(NamedTuple):
  """Where the targets of an answer are: in `batch`, `row`, from `first` to before `end`."""

  batch: int
  row: int
  first: int
  end: int


class Packed(NamedTuple):
  """Answers as batches.

  Attributes:
    batches: int32 arrays [B, T] `inputs`, `targets`, `segments`, `positions` and `seeds`.
    places: Of each answer.
  """

  batches: list[Arrays]
  places: list[Place]

  def collect(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the part of each answer in arrays [B, T], one per batch."""
    return [arrays[place.batch][place.row, place.first : place.end] for place in self.places]

  def spread(self, parts: Sequence[Any]) -> list[np.ndarray]:
    """Returns float32 arrays [B, T], one per batch, with a number or an array for each answer."""
    arrays = [np.zeros(batch["inputs"].shape, np.float32) for batch in self.batches]
    for place, part in zip(self.places, parts, strict=True):
      arrays[place.batch][place.row, place.first : place.end] = part
    return arrays


def pack(
  answers: Sequence[Answer], *, batch_size: int, seq_len: int, max_segments: int | None = None
) -> Packed:
  """Packs answers with their prompts into batches of `batch_size` sequences of `seq_len` tokens.

  `max_segments` is the most segments in a sequence, padding included; None: any number.
  """
  sizes = np.array([answer.size for answer in answers], np.int64)
  most = None if max_segments is None else max(max_segments - 1, 1)  # Padding is a segment, too.
  rows = best_fit(sizes, seq_len, most=most)
  batches = [
    {name: np.zeros((batch_size, seq_len), np.int32) for name in _NAMES}
    for _ in range(0, len(rows), batch_size)
  ]
  places: dict[int, Place] = {}
  for number, row in enumerate(rows):
    batch, at = divmod(number, batch_size)
    start = 0
    for segment, index in enumerate(row):
      answer = answers[index]
      tokens = np.append(answer.prompt, answer.tokens).astype(np.int32)
      end = start + answer.size
      values = (tokens[:-1], tokens[1:], segment + 1, np.arange(answer.size), answer.seed)
      for name, value in zip(_NAMES, values, strict=True):
        batches[batch][name][at, start:end] = value
      places[index] = Place(batch, at, start + len(answer.prompt) - 1, end)
      start = end
  return Packed(batches, [places[index] for index in range(len(answers))])


def of_loss(answers: Sequence[Answer], weights: Sequence[float] | np.ndarray) -> dict[str, Any]:
  """Returns what the loss needs, by name: for each answer a number or an array.

  `weights` are those of each answer's tokens.
  """
  parts: dict[str, Any] = {
    "weights": weights,
    "advantages": [answer.advantage for answer in answers],
    "old_log_probabilities": [answer.log_probabilities for answer in answers],
  }
  of_values = {
    "returns": [answer.returns for answer in answers],
    "old_values": [answer.values for answer in answers],
  }
  return parts | {name: given for name, given in of_values.items() if all(map(len, given))}


def no_rows(seq_len: int, *, with_values: bool) -> Arrays:
  """Returns the arrays of a batch as the loss needs them, without sequences: [0, T]."""
  arrays: Arrays = {name: np.zeros((0, seq_len), np.int32) for name in _NAMES}
  names = (*_OF_LOSS, *(_OF_VALUES if with_values else ()))
  return arrays | {name: np.zeros((0, seq_len), np.float32) for name in names}


def decoded(answers: Sequence[Answer], data: Prompts) -> list[tuple[str, Mapping[str, Any]]]:
  """Returns the text of each answer, without the end token, and the record of its prompt."""
  found = []
  for answer in answers:
    tokens = answer.tokens[:-1] if answer.has_ended else answer.tokens
    text = data.tokenizer.continuation(answer.prompt, tokens)
    found.append((text, data.record(answer.record)))
  return found
