# SPDX-License-Identifier: Apache-2.0
"""Splits the concatenated documents into sequences of equal length, with random access.

Each epoch shuffles the documents and concatenates them into one stream, with BOS before and EOS
after each document if the tokenizer has them. The stream is rotated by a random offset, split into
sequences, and the sequences are shuffled.
"""

import functools
from typing import NamedTuple

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.corpus import CorpusRows
from paxlike.data.dataset import Arrays
from paxlike.data.token_index import TokenIndex

_LONG = 192  # Tokens; ranges of more are faster copied one by one than gathered.


class _Plan(NamedTuple):
  """The stream of one epoch as pieces: documents, one of which the rotation may split in two.

  Attributes:
    begins: int64 [pieces + 1]; where each piece begins in the stream, then the stream's length.
    offsets: int64 [pieces]; stream position i of a piece is corpus token i + offset.
    torn: Whether a document is split: the first piece is its tail and the last piece its head.
    rows: int64 [sequences]; sequence i begins at stream position rows[i] * seq_len.
  """

  begins: np.ndarray
  offsets: np.ndarray
  torn: bool
  rows: np.ndarray


class _Segments(NamedTuple):
  """The segments of a batch of sequences, in order; each is the overlap of a piece and a sequence.

  Attributes:
    row: The segment's sequence.
    number: int32, its index in the sequence.
    column: int32, its first position in the sequence.
    piece: Its piece of the stream.
    lengths: Positions up to the next segment or the end of the sequence.
  """

  row: np.ndarray
  number: np.ndarray
  column: np.ndarray
  piece: np.ndarray
  lengths: np.ndarray

  def per_position(self, values: np.ndarray) -> np.ndarray:
    """Repeats one value per segment over its positions; flattened over sequences."""
    return np.repeat(values, self.lengths)


@configurable
class PackedRows(CorpusRows):
  """Sequences split from the stream of all documents.

  Every token but the stream's first is a target exactly once; the last sequence is padded with
  zeros of weight 0. If packed, segments separate the documents, and a document's first token is not
  a target; otherwise documents are concatenated without segments. `split` is a range of tokens, so
  it may truncate the documents at its ends. Without shuffling, every epoch has the same sequences.
  """

  def num_rows(self, epoch: int) -> int:
    return len(self._plan(epoch).rows)

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    plan = self._plan(epoch)
    first_B = plan.rows[numbers] * self.seq_len
    columns = np.arange(self.seq_len + 1)
    shape = len(first_B), len(columns)
    parts = _segments(plan, first_B, len(columns))
    tokens = self._tokens(plan, first_B, parts).reshape(shape)
    inputs, targets = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    arrays = {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}
    if self.packed:
      segments = parts.per_position(parts.number + 1).reshape(shape)
      positions = columns.astype(np.int32) - parts.per_position(parts.column).reshape(shape)
      arrays["weights"] *= positions[:, 1:] > 0
      arrays["segments"] = segments[:, :-1].copy()
      arrays["positions"] = positions[:, :-1].copy()
    if first_B.max(initial=0) + len(columns) > plan.begins[-1]:
      inside = columns < (plan.begins[-1] - first_B)[:, None]
      for name, array in arrays.items():
        array *= inside[:, 1:] if name in ("targets", "weights") else inside[:, :-1]
    return arrays

  def _tokens(self, plan: _Plan, first_B: np.ndarray, parts: _Segments) -> np.ndarray:
    """Returns tokens in any integer dtype, flattened over sequences."""
    width = self.seq_len + 1
    # Stream position minus position in the flattened batch.
    shift = first_B[parts.row] - parts.row * width
    starts = parts.row * width + parts.column + plan.offsets[parts.piece] + shift
    ids = _ranges(self._documents.tokens, starts, parts.lengths)
    bos, eos = self._markers
    largest = max((marker for marker in (bos, eos) if marker is not None), default=0)
    if largest > np.iinfo(ids.dtype).max:
      ids = ids.astype(np.int32)
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
    """The documents within the split, truncated at its ends."""
    tokens, offsets, _ = self._index
    first, last = (int(share * offsets[-1]) for share in self._split)
    bounds = np.clip(offsets, first, last)
    kept = np.flatnonzero(np.diff(bounds))
    tokens = np.asarray(tokens)  # Slices of a memmap are slow to make.
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
    # Rotate: the tokens before position `rotation` move to the end.
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


def _ranges(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Returns tokens[start : start + length] of all ranges as one array.

  Ranges may include the places of markers and of padding, even outside of `tokens`. What is
  returned there is arbitrary.
  """
  ends = starts + lengths
  is_inside = starts.min(initial=0) >= 0 and ends.max(initial=0) <= len(tokens)
  if is_inside and len(lengths) * _LONG <= lengths.sum():
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.concatenate([tokens[:0], *(tokens[start:end] for start, end in pairs)])
  first = np.cumsum(lengths) - lengths
  places = np.arange(lengths.sum()) + np.repeat(starts - first, lengths)
  return tokens.take(places, mode="clip")


def _segments(plan: _Plan, first_B: np.ndarray, width: int) -> _Segments:
  """Returns the segments of sequences of `width` tokens from stream positions `first_B`."""
  last_B = np.minimum(first_B + width, plan.begins[-1]) - 1
  first_piece, last_piece = np.searchsorted(plan.begins, [first_B, last_B], side="right") - 1
  counts = last_piece - first_piece + 1
  row = np.repeat(np.arange(len(first_B)), counts)
  number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
  piece = first_piece[row] + number
  column = np.maximum(plan.begins[piece] - first_B[row], 0)
  begins = row * width + column
  lengths = np.append(begins[1:], len(first_B) * width) - begins
  return _Segments(row, number.astype(np.int32), column.astype(np.int32), piece, lengths)
