# SPDX-License-Identifier: Apache-2.0
"""Cuts documents into rows of equal length, by a plan that finds any row without those before it.

In each epoch the documents stand in another order, with BOS before and EOS after each where the
tokenizer has them. This stream is cut into rows, from another place in every epoch, and the rows
are shuffled once more.
"""

import functools
from typing import NamedTuple

import numpy as np

from paxlike.data.corpus import CorpusRows
from paxlike.data.dataset import Arrays
from paxlike.data.token_index import TokenIndex


class _Plan(NamedTuple):
  """The stream of one epoch.

  Attributes:
    order: The documents.
    starts: int64 [documents + 1], where each begins in the stream, and the stream's length.
    rotation: The stream begins so many tokens later, and its beginning comes last.
    rows: Which cut of the stream is row i.
  """

  order: np.ndarray
  starts: np.ndarray
  rotation: int
  rows: np.ndarray


class PackedRows(CorpusRows):
  """Rows cut from the stream of all documents.

  Every token but the stream's first is the target of one row; the last row is filled up without
  weight. If packed, no token is predicted from another document; otherwise documents run on into
  each other. Of a split, documents at its ends are cut. Unshuffled, every epoch is cut at the same
  places.
  """

  def num_rows(self, epoch: int) -> int:
    return len(self._plan(epoch).rows)

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    plan = self._plan(epoch)
    size = plan.starts[-1]
    places = plan.rows[numbers][:, None] * self.seq_len + np.arange(self.seq_len + 1)
    inside = places < size
    stream = np.where(inside, (places + plan.rotation) % max(size, 1), 0)
    documents = np.searchsorted(plan.starts, stream, side="right") - 1
    tokens = self._tokens(plan, stream, documents)
    weights = inside[:, 1:].astype(np.float32)
    arrays = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "weights": weights}
    if self.packed:
      follows = documents[:, 1:] == documents[:, :-1]
      # The end of the stream was rotated next to its beginning.
      follows &= stream[:, 1:] > stream[:, :-1]
      weights *= follows
      begins = np.concatenate([np.zeros((len(tokens), 1), bool), ~follows[:, :-1]], 1)
      columns = np.arange(self.seq_len)
      first = np.maximum.accumulate(np.where(begins, columns, 0), 1)
      real = inside[:, :-1]
      arrays["segments"] = ((1 + np.cumsum(begins, 1)) * real).astype(np.int32)
      arrays["positions"] = ((columns - first) * real).astype(np.int32)
    return arrays

  def _tokens(self, plan: _Plan, stream: np.ndarray, documents: np.ndarray) -> np.ndarray:
    tokens, offsets, _ = self._documents
    bos, eos = self._markers
    within = stream - plan.starts[documents] - (bos is not None)
    source = plan.order[documents]
    lengths = offsets[source + 1] - offsets[source]
    ids = tokens[np.clip(offsets[source] + within, 0, len(tokens) - 1)].astype(np.int32)
    if bos is not None:
      ids[within < 0] = bos
    if eos is not None:
      ids[within == lengths] = eos
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
    extra = sum(marker is not None for marker in self._markers)
    starts = np.append(0, np.cumsum(np.diff(offsets)[order] + extra))
    rotation = int(random.integers(starts[-1])) if self._shuffle and starts[-1] else 0
    rows = np.arange(max(-(-(starts[-1] - 1) // self.seq_len), 0))
    if self._shuffle:
      random.shuffle(rows)
    return _Plan(order, starts, rotation, rows)
