# SPDX-License-Identifier: Apache-2.0
"""The interface of corpora, documents as token ids, and of what cuts them into rows."""

import abc
import functools
from typing import Any

import numpy as np

from paxlike import ranges
from paxlike.data.dataset import RowDataset
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizer import Tokenizer
from paxlike.errors import UserError


class Corpus(abc.ABC):
  """Documents as token ids."""

  @property
  def tokenizer(self) -> Tokenizer | None:
    """Turns text into the ids, and back; None where that is not known."""
    return None

  @property
  def vocab_size(self) -> int | None:
    """The number that ids are below, as far as that was given; None: it was not."""
    return None

  @property
  def named(self) -> str:
    """What messages call it."""
    return "the data"

  def check(self):  # noqa: B027 - a corpus without files has nothing to check.
    """Finds what is wrong, as far as that is cheap; writes nothing.

    Raises:
      UserError: A path is missing, say.
    """

  @abc.abstractmethod
  def index(self) -> TokenIndex:
    """Returns the documents; may take long the first time."""


class CorpusRows(RowDataset):
  """Rows made of the documents of a corpus, by a plan for each epoch."""

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
    """Makes rows of `seq_len` tokens.

    Args:
      corpus: The documents.
      seq_len: T.
      seed: Of the order.
      shuffle: Whether to change the order in every epoch; or the same order each time.
      packed: See `Dataset`.
      split: The part of the corpus to use, as shares between 0 and 1.
    """
    self.seq_len = seq_len
    self.corpus = corpus
    self._seed = seed
    self._shuffle = shuffle
    self.packed = packed
    self._split = split
    # Where a batch runs on into the next epoch, two are needed.
    self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self.corpus.tokenizer

  @property
  def vocab_size(self) -> int | None:
    return self.corpus.vocab_size

  @property
  def named(self) -> str:
    first, last = self._split
    part = "" if (first, last) == (0, 1) else f", from {first:g} to {last:g} of it (TRAIN_SHARE)"
    return f"{self.corpus.named}{part}"

  def check(self):
    first, last = self._split
    if not first < last:
      raise UserError(f"split={self._split} of the data is empty: see TRAIN_SHARE.")
    self.corpus.check()

  def fingerprint(self) -> str:
    options = (self.seq_len, self._seed, self._shuffle, self.packed, tuple(self._split))
    return f"{self._index.fingerprint()} {options}"

  @functools.cached_property
  def _index(self) -> TokenIndex:
    return self.corpus.index()

  @abc.abstractmethod
  def _make_plan(self, epoch: int) -> Any:
    """Returns what says which tokens each row of an epoch has."""

  def _random(self, epoch: int) -> np.random.Generator:
    counter = [0, 0, 0, epoch]
    return np.random.Generator(np.random.Philox(key=self._seed % 2**64, counter=counter))
