# SPDX-License-Identifier: Apache-2.0
"""Cuts documents into rows of equal length, by a plan that finds any row without those before it.

In each epoch the documents stand in another order, with BOS before and EOS after each where the
tokenizer has them. This stream is cut into rows, from another place in every epoch, and the rows
are shuffled once more.
"""

import functools
from typing import NamedTuple

import numpy as np

from paxlike.configurable import configurable
from paxlike.data.corpus import CorpusRows
from paxlike.data.dataset import Arrays
from paxlike.data.token_index import TokenIndex


class _Plan(NamedTuple):
  """The stream of one epoch, in pieces: documents, of which one may be torn and at both ends.

  Attributes:
    begins: int64 [pieces + 1], where each begins in the stream, and the stream's length.
    offsets: int64 [pieces]; at place i of the stream there is token i + offset.
    torn: Whether the first piece has no beginning, and the last no end.
    rows: Which cut of the stream is row i.
  """

  begins: np.ndarray
  offsets: np.ndarray
  torn: bool
  rows: np.ndarray


class _Parts(NamedTuple):
  """What rows are made of, in their order.

  Attributes:
    row: Which row each part is of.
    number: int32, its number there.
    column: int32, where it begins there.
    piece: Of which piece of the stream it is.
    lengths: Columns up to the next part, or the end of the row.
  """

  row: np.ndarray
  number: np.ndarray
  column: np.ndarray
  piece: np.ndarray
  lengths: np.ndarray

  def spread(self, values: np.ndarray) -> np.ndarray:
    """Returns a value of each part, for all its columns; of all rows, one after the other."""
    return np.repeat(values, self.lengths)


@configurable
class PackedRows(CorpusRows):
  """Rows cut from the stream of all documents.

  Every token but the stream's first is the target of one row; the last row is filled up with zeros,
  without weight. If packed, no token is predicted from another document; otherwise documents run on
  into each other. Of a split, documents at its ends are cut. Unshuffled, every epoch is cut at the
  same places.
  """

  def num_rows(self, epoch: int) -> int:
    return len(self._plan(epoch).rows)

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    plan = self._plan(epoch)
    first_B = plan.rows[numbers] * self.seq_len
    columns = np.arange(self.seq_len + 1)
    shape = len(first_B), len(columns)
    parts = _parts(plan, first_B, len(columns))
    inside = columns < (plan.begins[-1] - first_B)[:, None]
    tokens = self._tokens(plan, first_B, parts).reshape(shape) * inside
    weights = inside[:, 1:].astype(np.float32)
    arrays = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "weights": weights}
    if self.packed:
      segments = parts.spread(parts.number + 1).reshape(shape)
      positions = columns.astype(np.int32) - parts.spread(parts.column).reshape(shape)
      weights *= positions[:, 1:] > 0
      arrays["segments"] = segments[:, :-1] * inside[:, :-1]
      arrays["positions"] = positions[:, :-1] * inside[:, :-1]
    return arrays

  def _tokens(self, plan: _Plan, first_B: np.ndarray, parts: _Parts) -> np.ndarray:
    """Returns int32, the tokens of all rows, one after the other."""
    width = self.seq_len + 1
    # Where the stream's beginning would be, if this were one row.
    shift = first_B[parts.row] - parts.row * width
    places = np.arange(len(first_B) * width)
    places += parts.spread(plan.offsets[parts.piece] + shift)
    ids = self._documents.tokens.take(places, mode="clip").astype(np.int32)
    bos, eos = self._markers
    if bos is not None:
      begun = plan.begins[parts.piece] >= first_B[parts.row]
      begun &= (parts.piece > 0) | (not plan.torn)
      ids[(plan.begins[parts.piece] - shift)[begun]] = bos
    if eos is not None:
      last = plan.begins[parts.piece + 1] - 1
      ended = last < first_B[parts.row] + width
      ended &= (parts.piece < len(plan.offsets) - 1) | (not plan.torn)
      ids[(last - shift)[ended]] = eos
    return ids

  @property
  def _markers(self) -> tuple[int | None, int | None]:
    tokenizer = self.tokenizer
    return (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)

  @functools.cached_property
  def _documents(self) -> TokenIndex:
    """The documents within the split; one that the split cuts is shortened."""
    tokens, offsets, _ = self._index
    first, last = (int(share * offsets[-1]) for share in self._split)
    bounds = np.clip(offsets, first, last)
    kept = np.flatnonzero(np.diff(bounds))
    return TokenIndex(tokens, np.append(bounds[kept], last) if len(kept) else np.zeros(1, np.int64))

  def _make_plan(self, epoch: int) -> _Plan:
    offsets = self._documents.offsets
    order = np.arange(len(offsets) - 1)
    random = self._random(epoch)
    if self._shuffle:
      random.shuffle(order)
    bos, eos = self._markers
    lengths = np.diff(offsets)[order] + (bos is not None) + (eos is not None)
    size = int(lengths.sum())
    offsets = offsets[order] - (bos is not None)
    rotation = int(random.integers(size)) if self._shuffle and size else 0
    # What is before the place to begin at comes last.
    ends = np.cumsum(lengths)
    number = int(np.searchsorted(ends, rotation, side="right"))
    torn = rotation - int(ends[number] - lengths[number]) if size else 0
    lengths, offsets = np.roll(lengths, -number), np.roll(offsets, -number)
    if torn:
      lengths, offsets = np.append(lengths, torn), np.append(offsets, offsets[0])
      lengths[0] -= torn
      offsets[0] += torn
    begins = np.append(0, np.cumsum(lengths))
    rows = np.arange(max(-(-(size - 1) // self.seq_len), 0))
    if self._shuffle:
      random.shuffle(rows)
    return _Plan(begins, offsets - begins[:-1], bool(torn), rows)


def _parts(plan: _Plan, first_B: np.ndarray, width: int) -> _Parts:
  """Returns the parts of rows of `width` columns that begin at these places of the stream."""
  last_B = np.minimum(first_B + width, plan.begins[-1]) - 1
  first_piece, last_piece = np.searchsorted(plan.begins, [first_B, last_B], side="right") - 1
  counts = last_piece - first_piece + 1
  row = np.repeat(np.arange(len(first_B)), counts)
  number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
  piece = first_piece[row] + number
  column = np.maximum(plan.begins[piece] - first_B[row], 0)
  lengths = np.diff(row * width + column, append=len(first_B) * width)
  return _Parts(row, number.astype(np.int32), column.astype(np.int32), piece, lengths)
