# SPDX-License-Identifier: Apache-2.0
"""Sums of two numbers: a task to learn in minutes, without files."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.corpus import Corpus
from paxlike.data.text.records import Placed
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.data.tuning.prompts import Prompts

PROMPT_TOKENS = 6  # Of the longest, "99+99=".
ANSWER_TOKENS = 4  # Of the longest, "198" and the end.
_HELD_OUT = 1000
_END = 256  # Of bytes.


def pairs(split: str) -> list[tuple[int, int]]:
  """Returns the pairs of numbers below 100 in a split, "train" or "validation", in random order."""
  order = np.random.Generator(np.random.Philox(key=0)).permutation(100 * 100)
  chosen = order[:_HELD_OUT] if split == "validation" else order[_HELD_OUT:]
  return [divmod(int(one), 100) for one in chosen]


@configurable
class SumPrompts(Prompts):
  """Prompts such as "12+34=", with the `answer` "46"."""

  def __init__(
    self,
    *,
    split: ranges.Name,
    vocab_size: ranges.Size,
    seq_len: ranges.Size,
    seed: ranges.NonNegative = 0,
    shuffle: bool = True,
  ):
    """See `pairs` for `split`, and `Prompts`."""
    super().__init__(
      path=None,
      field="prompt",
      tokenizer=ByteTokenizer(),
      vocab_size=vocab_size,
      seq_len=seq_len,
      max_tokens=PROMPT_TOKENS,
      seed=seed,
      shuffle=shuffle,
    )
    self._split = split

  @property
  def named(self) -> str:
    return f"sums, {self._split}"

  def _identity(self) -> Any:
    return self.named

  def _read(self) -> Iterator[Placed]:
    for a, b in pairs(self._split):
      yield f"{a}+{b}", {"prompt": f"{a}+{b}=", "answer": str(a + b)}


@configurable
class SumTexts(Corpus):
  """Texts such as "12+34=46", of which the answers and the end are targets."""

  def __init__(self, *, split: ranges.Name):
    self._split = split

  @property
  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  @property
  def vocab_size(self) -> int:
    return ByteTokenizer.vocab_size

  @property
  def named(self) -> str:
    return f"sums, {self._split}"

  def index(self) -> TokenIndex:
    return self._index

  @functools.cached_property
  def _index(self) -> TokenIndex:
    tokens, weights, sizes = [], [], []
    for a, b in pairs(self._split):
      asked, answered = (self.tokenizer.encode(text) for text in (f"{a}+{b}=", str(a + b)))
      tokens.append(np.concatenate([asked, answered, [_END]]))
      sizes.append(len(tokens[-1]))
      weights.append(np.arange(sizes[-1]) >= len(asked))
    offsets = np.append(0, np.cumsum(sizes))
    columns = {"weights": np.concatenate(weights).astype(np.uint8)}
    return TokenIndex(np.concatenate(tokens).astype(np.uint16), offsets, columns)
