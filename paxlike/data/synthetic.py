# SPDX-License-Identifier: Apache-2.0
"""Synthetic tokens, for benchmarks."""

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import ENDLESS, Arrays, RowDataset


@configurable
class RandomTokens(RowDataset):
  """Uniform random ids: nothing to learn, and memory accesses are spread over the embedding."""

  is_endless = True

  def __init__(self, *, seq_len: ranges.Size, vocab_size: ranges.Size, seed: ranges.NonNegative):
    self.seq_len = seq_len
    self._vocab_size = vocab_size
    self._seed = seed

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  def fingerprint(self) -> str:
    return f"random tokens: {self.seq_len} of {self._vocab_size}, seed {self._seed}"

  def num_rows(self, epoch: int) -> int:
    return ENDLESS

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    tokens = np.empty((len(numbers), self.seq_len + 1), np.int32)
    for row, number in zip(tokens, numbers, strict=True):
      # A counter-based generator gives random access.
      bits = np.random.Philox(key=self._seed % 2**64, counter=[0, 0, number, epoch])
      row[:] = np.random.Generator(bits).integers(0, self._vocab_size, len(row), np.int32)
    return _from_tokens(tokens)


@configurable
class ConstantTokens(RowDataset):
  """Id 1 everywhere, as in Pax's synthetic data: the loss soon is 0."""

  is_endless = True

  def __init__(self, *, seq_len: ranges.Size):
    self.seq_len = seq_len

  @property
  def vocab_size(self) -> int:
    return 2

  def fingerprint(self) -> str:
    return f"constant tokens: {self.seq_len}"

  def num_rows(self, epoch: int) -> int:
    return ENDLESS

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    return _from_tokens(np.ones((len(numbers), self.seq_len + 1), np.int32))


def _from_tokens(tokens: np.ndarray) -> Arrays:
  inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
  return {"inputs": inputs, "targets": targets, "weights": np.ones(inputs.shape, np.float32)}
