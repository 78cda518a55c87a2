# SPDX-License-Identifier: Apache-2.0
"""A data set of which each sequence is split into shorter ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from paxlike.data.dataset import Arrays, Batch, Dataset


class Sliced(Dataset):
  """Splits each sequence of a data set into `slices` sequences of equal length.

  No token is left out, and the order stays: `slices` sequences in a row are one sequence of
  `source`. Positions (epoch, position) are those of `source`, so that a run may change between
  both.
  """

  def __init__(self, source: Dataset, *, slices: int):
    """`slices` divides the sequence length of `source`."""
    assert source.seq_len % slices == 0
    self._source = source
    self._slices = slices
    self.seq_len = source.seq_len // slices
    self.sources, self.is_endless, self.packed = source.sources, source.is_endless, source.packed

  @property
  def tokenizer(self) -> Any:
    return self._source.tokenizer

  @property
  def vocab_size(self) -> int | None:
    return self._source.vocab_size

  @property
  def named(self) -> str:
    return self._source.named

  def check(self):
    self._source.check()

  def no_rows(self) -> Arrays:
    return self._sliced(self._source.no_rows())

  def fingerprint(self) -> str:
    return self._source.fingerprint()

  def _num_rows_of(self, epoch: int) -> int | None:
    return self._source._num_rows_of(epoch)

  def _check_not_empty(self):
    self._source._check_not_empty()

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[list[Batch]]:
    k = self._slices
    assert batch_size % k == 0
    whole, numbers = np.unique(rows // k, return_inverse=True)
    wanted = numbers * k + rows % k
    for batches in self._source._generate(batch_size // k, whole, epoch, position, repeat):
      yield [
        Batch({name: x[wanted] for name, x in self._sliced(batch.arrays).items()}, batch.state)
        for batch in batches
      ]

  def _sliced(self, arrays: Arrays) -> Arrays:
    k, T = self._slices, self.seq_len
    sliced = {
      name: np.repeat(x, k, axis=0) if x.shape[1] == 1 else x.reshape(-1, T, *x.shape[2:])
      for name, x in arrays.items()
    }
    if "positions" in sliced:  # A document's positions begin anew in each slice.
      first = sliced["segments"] == sliced["segments"][:, :1]
      starts = np.where(first, sliced["positions"][:, :1], 0)
      sliced["positions"] = (sliced["positions"] - starts).astype(np.int32)
    return sliced
