# SPDX-License-Identifier: Apache-2.0
"""Weighted mixtures of data sets."""

import functools
import json
import math
from collections.abc import Mapping

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.dataset import ENDLESS, Arrays, RowDataset
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError

_BLOCK = 1024


@configurable
class Mixture(RowDataset):
  """An endless mixture of data sets in fixed proportions; each source repeats its epochs.

  The order is random within each block of 1024 sequences. After each block, the number of sequences
  so far from each source is its share of all, rounded. Batches have `source`, int32 [B, 1], the
  source of each sequence.
  """

  is_endless = True

  def __init__(
    self,
    *,
    sources: Mapping[str, RowDataset],
    weights: Mapping[str, float] | None = None,
    seed: ranges.NonNegative = 0,
  ):
    """Mixes data sets of one `seq_len`.

    Args:
      sources: Name -> data set.
      weights: Name -> relative number of sequences. None: each source's number of sequences.
      seed: The seed of the order.

    Raises:
      UserError: There is no source.
    """
    if not sources:
      raise UserError("a mixture needs a source: set --fdl.DATA_PATHS={NAME: PATH}.")
    self.seq_len = max((one.seq_len for one in sources.values()), default=0)
    self.sources = tuple(sources)
    self._datasets = list(sources.values())
    self._weights = weights
    self._seed = seed
    # Of each source, the cumulative number of sequences at the end of each epoch.
    self._ends = [[0] for _ in sources]
    self._block = functools.lru_cache(maxsize=4)(self._make_block)

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self._datasets[0].tokenizer

  @property
  def prompt_renderer(self) -> PromptRenderer | None:
    return self._datasets[0].prompt_renderer

  @property
  def vocab_size(self) -> int | None:
    return max((one.vocab_size or 0 for one in self._datasets), default=0) or None

  def check(self):
    weights = self._weights
    if weights is not None:
      if weights.keys() != set(self.sources):
        names = f"{', '.join(weights)}, but the sources are {', '.join(self.sources)}"
        raise UserError(f"MIXTURE_WEIGHTS names {names}.")
      if not all(0 < weight < math.inf for weight in weights.values()):
        raise UserError(f"MIXTURE_WEIGHTS={dict(weights)}: each must be positive and finite.")
    for dataset in self._datasets:
      dataset.check()
    tokenizers = [one.tokenizer for one in self._datasets]
    if len({one and one.fingerprint() for one in tokenizers}) > 1:
      raise UserError(
        "the sources of a mixture must share a tokenizer, but TOKENIZER=character makes one per"
        " source: set another TOKENIZER."
      )
    if any(one.seq_len != self.seq_len for one in self._datasets):
      raise UserError("the sources of a mixture must have the same seq_len.")

  def fingerprint(self) -> str:
    parts = {
      name: one.fingerprint() for name, one in zip(self.sources, self._datasets, strict=True)
    }
    return json.dumps(["mixture", parts, list(self._shares), self._seed])

  def num_rows(self, epoch: int) -> int:
    for name, dataset in zip(self.sources, self._datasets, strict=True):
      if dataset.num_rows(0) == 0:
        raise UserError(
          f"{name} of the mixture: {dataset.named} has no sequence: one needs at least 2 tokens."
        )
    return ENDLESS

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    del epoch
    places = [self._row(int(number)) for number in numbers]
    found = [self._datasets[source].rows(at, np.array([row])) for source, at, row in places]
    for (source, *_), row in zip(places, found, strict=True):
      if row.keys() != found[0].keys():
        raise UserError(
          f"{self.sources[source]} and {self.sources[places[0][0]]} do not mix: one has the arrays"
          f" {', '.join(row)}, the other {', '.join(found[0])}. Pack both, or neither."
        )
    arrays = {name: np.concatenate([row[name] for row in found]) for name in found[0]}
    return arrays | {"source": np.array([[source] for source, *_ in places], np.int32)}

  def no_rows(self) -> Arrays:
    return self._datasets[0].no_rows() | {"source": np.zeros((0, 1), np.int32)}

  def _row(self, number: int) -> tuple[int, int, int]:
    """Returns (source, epoch, index in that epoch) of sequence `number` of the mixture."""
    sources, ranks = self._block(number // _BLOCK)
    source, rank = int(sources[number % _BLOCK]), int(ranks[number % _BLOCK])
    ends = self._ends[source]
    while ends[-1] <= rank:
      ends.append(ends[-1] + self._datasets[source].num_rows(len(ends) - 1))
    epoch = int(np.searchsorted(ends, rank, side="right")) - 1
    return source, epoch, rank - ends[epoch]

  @functools.cached_property
  def _shares(self) -> tuple[float, ...]:
    self.num_rows(0)
    weights = self._weights or dict(
      zip(self.sources, (one.num_rows(0) for one in self._datasets), strict=True)
    )
    return tuple(weights[name] / sum(weights.values()) for name in self.sources)

  def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sequence's source, and its index among all sequences of that source."""
    before, after = (self._counts(number * _BLOCK) for number in (block, block + 1))
    sources = np.repeat(np.arange(len(self.sources)), after - before)
    ranks = np.concatenate([np.arange(*span) for span in zip(before, after, strict=True)])
    random = np.random.Generator(np.random.Philox(key=self._seed % 2**64, counter=[0, 0, 1, block]))
    order = random.permutation(_BLOCK)
    return sources[order], ranks[order]

  def _counts(self, num_rows: int) -> np.ndarray:
    """Returns how many of the first `num_rows` sequences are from each source."""
    bounds = np.append(np.cumsum(self._shares)[:-1], 1.0)
    return np.diff(np.floor(bounds * num_rows).astype(np.int64), prepend=0)
