# SPDX-License-Identifier: Apache-2.0
"""The interface of corpora (documents as token ids) and of data sets made from one."""

import abc
import functools
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.data.chat.prompt_rendering import PromptRenderer
from paxlike.data.dataset import RowDataset, epoch_random
from paxlike.data.source import Source
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError


class Corpus(Source, abc.ABC):
  """Documents as token ids."""

  @abc.abstractmethod
  def index(self) -> TokenIndex:
    """Returns the documents; slow the first time, then cached."""


class CorpusRows(RowDataset):
  """Sequences made from the documents of a corpus.

  A plan per epoch lists which tokens or documents each sequence holds.
  """

  def __init__(
    self,
    *,
    corpus: Corpus,
    seq_len: ranges.Size,
    seed: ranges.NonNegative = 0,
    shuffle: bool = True,
    packed: bool = True,
    split: tuple[ranges.Fraction, ranges.Fraction] = (0.0, 1.0),
  ):
    """Reads nothing yet.

    Args:
      corpus: The documents.
      seq_len: T.
      seed: Seed of the shuffle.
      shuffle: Whether to reshuffle in every epoch.
      packed: See `Dataset`.
      split: (begin, end) of the part of the corpus to use, as fractions between 0 and 1.
    """
    self.seq_len = seq_len
    self.corpus = corpus
    self._seed = seed
    self._shuffle = shuffle
    self.packed = packed
    self._split = split
    # A batch that spans two epochs needs both plans.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self.corpus.tokenizer

  @property
  def prompt_renderer(self) -> PromptRenderer | None:
    return self.corpus.prompt_renderer

  @property
  def vocab_size(self) -> int | None:
    return self.corpus.vocab_size

  @property
  def named(self) -> str:
    first, last = self._split
    share = "" if (first, last) == (0, 1) else f", fraction {first:g} to {last:g} (TRAIN_SHARE)"
    return f"{self.corpus.named}{share}"

  def check(self):
    first, last = self._split
    if not first < last:
      raise UserError(f"split={self._split} of the data is empty: change TRAIN_SHARE.")
    self.corpus.check()

  def fingerprint(self) -> str:
    options = (self.seq_len, self._seed, self._shuffle, self.packed, tuple(self._split))
    return f"{self._index.fingerprint()} {options}"

  @functools.cached_property
  def _index(self) -> TokenIndex:
    return self.corpus.index()

  @abc.abstractmethod
  def _make_plan(self, epoch: int) -> Any:
    """Returns the plan of an epoch."""

  def _random(self, epoch: int) -> np.random.Generator:
    return epoch_random(self._seed, epoch)
