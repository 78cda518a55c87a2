# SPDX-License-Identifier: Apache-2.0
"""Data mixins: `class Pile126M(datasets.Pile, Gpt126M)`."""

from typing import Literal

import fiddle as fdl

from paxlike.data import synthetic, text, tokenizer
from paxlike.errors import UserError
from paxlike.evaluation import EvalSet
from paxlike.experiment import Experiment


class Synthetic(Experiment):
  """Tokens that need no file, to measure speed with."""

  #: random: uniform ids. constant: id 1 everywhere, as in Pax, whose loss falls to 0.
  SYNTHETIC_TOKENS: Literal["random", "constant"] = "random"

  def train_data(self) -> fdl.Config:
    if self.SYNTHETIC_TOKENS == "constant":
      return fdl.Config(synthetic.ConstantTokens, seq_len=self.MAX_SEQ_LEN)
    return fdl.Config(
      synthetic.RandomTokens,
      seq_len=self.MAX_SEQ_LEN,
      vocab_size=self.VOCAB_SIZE,
      seed=self.RANDOM_SEED,
    )


class LocalText(Experiment):
  """Text files of the user: a file, a folder or a glob of .txt, .jsonl, .jsonl.zst, .parquet."""

  DATA_PATH: str | None = None  #: The files. Required.
  DATA_FIELD: str = "text"  #: The field or column of .jsonl and .parquet files.
  #: How text becomes ids.
  TOKENIZER: Literal["byte", "character", "sentencepiece", "huggingface"] = "byte"
  VOCAB_PATH: str | None = None  #: A SentencePiece model, or a tokenizer.json of Hugging Face.
  PACKED_INPUT: bool = True  #: Keep the documents of one row apart, by segment ids.
  TRAIN_SHARE: float = 0.9  #: The share of the documents (or of a single one) to train on.

  def train_data(self) -> fdl.Config:
    return self.text_data(split=(0.0, self.TRAIN_SHARE), shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.TRAIN_SHARE >= 1:
      return {}
    dataset = self.text_data(split=(self.TRAIN_SHARE, 1.0), shuffle=False)
    return {"validation": self.eval_set(dataset)}

  def text_data(self, *, split: tuple[float, float], shuffle: bool) -> fdl.Config[text.LocalText]:
    """A part of the text."""
    return fdl.Config(
      text.LocalText,
      path=self.DATA_PATH,
      field=self.DATA_FIELD,
      tokenizer=self.tokenizer(),
      vocab_size=self.VOCAB_SIZE,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      packed=self.PACKED_INPUT,
      shuffle=shuffle,
      split=split,
    )

  def tokenizer(self) -> fdl.Config[tokenizer.Tokenizer] | None:
    """How text becomes ids; None: a token for each character that occurs."""
    if self.TOKENIZER == "character":
      return None
    if self.TOKENIZER == "byte":
      return fdl.Config(tokenizer.ByteTokenizer)
    kinds = {
      "sentencepiece": (tokenizer.SentencePieceTokenizer, "a SentencePiece model"),
      "huggingface": (tokenizer.HuggingFaceTokenizer, "a tokenizer.json"),
    }
    kind, file = kinds[self.TOKENIZER]
    if self.VOCAB_PATH is None:
      raise UserError(f"TOKENIZER={self.TOKENIZER} needs --fdl.VOCAB_PATH=, {file}.")
    return fdl.Config(kind, self.VOCAB_PATH)
