# SPDX-License-Identifier: Apache-2.0
"""Sequences of whole examples, for fine-tuning and evaluation: no example is split.

An example is a document of a corpus. Its first token is only an input and its last only a target,
so n tokens take n - 1 positions of a sequence. The corpus column `weights` is the loss mask;
without it every token is a target.
"""

import bisect
import functools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.corpus import CorpusRows
from paxlike.data.dataset import Arrays, Batch
from paxlike.errors import UserError


class EpochPlan(NamedTuple):
  """The sequences of one epoch.

  Attributes:
    examples: Example indices, concatenated over sequences.
    starts: int64 [sequences + 1]; sequence i has examples[starts[i] : starts[i + 1]].
  """

  examples: np.ndarray
  starts: np.ndarray


@configurable
class ExampleRows(CorpusRows):
  """Sequences of whole documents: one per sequence or, if packed, as many as fit.

  Examples are truncated to `seq_len`. `split` is a range of examples, not of tokens. A single pass
  (`repeat=False`) is sorted by length, longest first, and each batch is padded only to its longest
  sequence, rounded up to one of a few lengths, so that short examples cost less.
  """

  def fingerprint(self) -> str:
    return f"examples {super().fingerprint()}"

  def _check_not_empty(self):
    if self.num_rows(0) == 0:
      raise UserError("the data has no example of two or more tokens.")
    truncated, without_loss = self.truncated
    if without_loss == len(self._kept):
      raise UserError(
        f"{self.named}: MAX_SEQ_LEN={self.seq_len} truncates all {without_loss} examples before"
        " their first token with loss: raise it."
      )
    if truncated:
      print(
        f"{self.named}: {truncated} of {len(self._kept)} examples are truncated to"
        f" {self._most} tokens (MAX_SEQ_LEN), {without_loss} of them before their first token with"
        " loss",
        file=sys.stderr,
      )

  @property
  def _most(self) -> int:
    """The most positions of an example."""
    return self.seq_len

  @functools.cached_property
  def _kept(self) -> np.ndarray:
    """The examples of the first epoch."""
    return self._plan(0).examples

  @functools.cached_property
  def truncated(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many examples are truncated, and how many of them keep no token with loss."""
    _, offsets, columns = self._index
    sizes = np.diff(offsets)[self._kept] - 1
    truncated = self._kept[sizes > self._most]
    weights = columns.get("weights")
    if weights is None:
      return len(truncated), 0
    begins = offsets[truncated] + 1
    kept = [weights[begin : begin + self._most].any() for begin in begins]
    return len(truncated), int(np.sum(np.logical_not(kept)))

  def num_rows(self, epoch: int) -> int:
    return len(self._plan(epoch).starts) - 1

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    return self._rows(epoch, numbers, self.seq_len)

  def _rows(self, epoch: int, numbers: np.ndarray, length: int) -> Arrays:
    examples, starts = self._plan(epoch)
    tokens, offsets, columns = self._index
    shape = (len(numbers), length)
    arrays: Arrays = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets")}
    arrays["weights"] = np.zeros(shape, np.float32)
    if "alternatives" in columns:
      arrays["alternatives"] = np.zeros(shape, np.int32)
    if self.packed:
      arrays |= {name: np.zeros(shape, np.int32) for name in ("segments", "positions")}
    for row, number in enumerate(numbers):
      at = 0
      for segment, example in enumerate(examples[starts[number] : starts[number + 1]]):
        size, first = int(self._sizes[example]), int(offsets[example])
        place, targets = (row, slice(at, at + size)), slice(first + 1, first + 1 + size)
        arrays["inputs"][place] = tokens[first : first + size]
        arrays["targets"][place] = tokens[targets]
        arrays["weights"][place] = columns["weights"][targets] if "weights" in columns else 1
        if "alternatives" in columns:
          arrays["alternatives"][place] = columns["alternatives"][targets]
        if self.packed:
          arrays["segments"][place] = segment + 1
          arrays["positions"][place] = np.arange(size)
        at += size
    return arrays

  @functools.cached_property
  def _sizes(self) -> np.ndarray:
    """The number of positions that each example takes."""
    return np.clip(np.diff(self._index.offsets) - 1, 0, self._most)

  def _make_plan(self, epoch: int) -> EpochPlan:
    if not self.packed:
      return self._one_by_one(epoch)
    random = self._random(epoch)
    examples = self._examples(random)
    rows = best_fit(self._sizes[examples], self.seq_len)
    if self._shuffle:
      random.shuffle(rows)
    starts = np.append(0, np.cumsum([len(row) for row in rows], dtype=np.int64))
    return EpochPlan(examples[np.concatenate([np.zeros(0, np.int64), *rows])], starts)

  def _one_by_one(self, epoch: int) -> EpochPlan:
    """Returns a plan of one example per sequence."""
    examples = self._examples(self._random(epoch))
    return EpochPlan(examples, np.arange(len(examples) + 1))

  def _examples(self, random: np.random.Generator) -> np.ndarray:
    first, last = (int(share * len(self._sizes)) for share in self._split)
    examples = first + np.flatnonzero(self._sizes[first:last])
    if self._shuffle:
      random.shuffle(examples)
    return examples

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[list[Batch]]:
    if repeat:
      yield from super()._generate(batch_size, rows, epoch, position, repeat)
      return
    examples, starts = self._plan(epoch)
    fingerprint = self.fingerprint()
    sizes = np.add.reduceat(self._sizes[examples], starts[:-1])
    order = np.argsort(-sizes, kind="stable")
    for first in range(position, len(order), batch_size):
      numbers = np.full(batch_size, -1)
      numbers[: len(order) - first] = order[first : first + batch_size]
      length = _rounded_up(int(sizes[order[first]]), self.seq_len)
      is_padding = numbers[rows] < 0
      arrays = self._rows(epoch, np.where(is_padding, order[first], numbers[rows]), length)
      arrays["weights"][is_padding] = 0
      state = {"epoch": epoch, "position": first + batch_size, "fingerprint": fingerprint}
      yield [Batch(arrays, state, numbers)]


def _rounded_up(size: int, limit: int) -> int:
  """Returns the next of 64, 96, 128, 192, 256, ...: few lengths mean few compilations."""
  length = 64
  while length < size:
    length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
  return min(length, limit)


def best_fit(sizes: np.ndarray, limit: int, *, most: int | None = None) -> list[list[int]]:
  """Packs examples by best fit; returns each sequence as a list of indices into `sizes`.

  At most 256 sequences are open at a time: beyond that, the fullest one is closed.

  Args:
    sizes: int64, of the examples, each at most `limit`.
    limit: The size of a sequence.
    most: The most examples in a sequence; None: any number.
  """
  rows: list[list[int]] = []
  open_rows: list[tuple[int, int]] = []  # (free positions, sequence), sorted.
  for index, size in enumerate(sizes.tolist()):
    at = bisect.bisect_left(open_rows, (size, -1))
    if at < len(open_rows):
      room, row = open_rows.pop(at)
      rows[row].append(index)
    else:
      room, row = limit, len(rows)
      rows.append([index])
    if room > size and len(rows[row]) != most:
      bisect.insort(open_rows, (room - size, row))
    if len(open_rows) > 256:
      open_rows.pop(0)  # The fullest one.
  return rows
