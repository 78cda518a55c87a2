# SPDX-License-Identifier: Apache-2.0
"""Data mixins: `class Pile126M(datasets.Pile, Gpt126M)`."""

import abc
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import fiddle as fdl

from paxlike import evaluation, objectives
from paxlike.data import (
  mixture,
  packing,
  preferences,
  seqio_stream,
  synthetic,
  tasks,
  text,
  tokenizer,
)
from paxlike.data.conversations import Conversations
from paxlike.data.examples import ExampleRows
from paxlike.data.preferences import PairRows
from paxlike.data.prepared import PreparedRows
from paxlike.data.seqio_corpus import SeqIOCorpus
from paxlike.errors import UserError
from paxlike.evaluation import EvalSet
from paxlike.experiment import Experiment
from paxlike.knobs import UNSET


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


class Tokenized(Experiment):
  """A tokenizer that the user chooses."""

  #: How text becomes ids.
  TOKENIZER: Literal["byte", "character", "sentencepiece", "huggingface"] = "byte"
  VOCAB_PATH: str | None = None  #: A SentencePiece model, or a tokenizer.json of Hugging Face.

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


class Prepared(Tokenized):
  """Rows that scripts/prepare_data.py made, with the tokenizer and MAX_SEQ_LEN of then."""

  DATA_PATH: str | None = None  #: Their folder. Required.
  EVAL_SPLIT: str | None = "validation"  #: The split that is evaluated. None: none.

  def train_data(self) -> fdl.Config:
    return self.rows("train", shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.EVAL_SPLIT is None:
      return {}
    return {self.EVAL_SPLIT: self.eval_set(self.rows(self.EVAL_SPLIT, shuffle=False))}

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config[PreparedRows]:
    """A split."""
    return fdl.Config(
      PreparedRows,
      path=self.DATA_PATH,
      split=split,
      seq_len=self.MAX_SEQ_LEN,
      vocab_size=self.VOCAB_SIZE,
      tokenizer=self.tokenizer(),
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
    )


class Files(Tokenized):
  """Files of the user, and a tokenizer for them."""

  DATA_PATH: str | None = None  #: A file, a folder or a glob. Required.
  PACKED_INPUT: bool = True  #: Keep the documents of one row apart, by segment ids.
  TRAIN_SHARE: float = 0.9  #: The share of the documents (or of a single one) to train on.


class LocalText(Files):
  """Text files: .txt, .jsonl (.zst, .gz), .parquet or .arrow."""

  DATA_FIELD: str = "text"  #: The field of their records that holds the text.

  def train_data(self) -> fdl.Config:
    return self.text_data(split=(0.0, self.TRAIN_SHARE), shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.TRAIN_SHARE >= 1:
      return {}
    dataset = self.text_data(split=(self.TRAIN_SHARE, 1.0), shuffle=False)
    return {"validation": self.eval_set(dataset)}

  def text_data(
    self, *, split: tuple[float, float], shuffle: bool, path: str | None = None
  ) -> fdl.Config:
    """A part of the text, that of DATA_PATH or of another path."""
    return fdl.Config(
      packing.PackedRows,
      corpus=self.corpus(path),
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      packed=self.PACKED_INPUT,
      shuffle=shuffle,
      split=split,
    )

  def corpus(self, path: str | None = None) -> fdl.Config[text.TextFiles]:
    """The text."""
    return fdl.Config(
      text.TextFiles,
      path=self.DATA_PATH if path is None else path,
      field=self.DATA_FIELD,
      tokenizer=self.tokenizer(),
      vocab_size=self.VOCAB_SIZE,
    )


class TextMixture(LocalText):
  """Several of what `LocalText` has one of, drawn from by weight."""

  DATA_PATHS: dict[str, str] = UNSET  #: Name of each source: a file, a folder or a glob.
  #: The share of each, in any unit. None: as much as there is of it.
  MIXTURE_WEIGHTS: dict[str, float] | None = None

  def train_data(self) -> fdl.Config[mixture.Mixture]:
    return fdl.Config(
      mixture.Mixture,
      sources=self.sources(),
      weights=self.MIXTURE_WEIGHTS,
      seed=self.RANDOM_SEED,
    )

  def sources(self) -> dict[str, fdl.Config]:
    """What is trained on, by name: rows of any kind, but all packed or none."""
    split = (0.0, self.TRAIN_SHARE)
    return {
      name: self.text_data(split=split, shuffle=True, path=path)
      for name, path in self.DATA_PATHS.items()
    }

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.TRAIN_SHARE >= 1:
      return {}
    split = (self.TRAIN_SHARE, 1.0)
    return {
      name: self.eval_set(self.text_data(split=split, shuffle=False, path=path))
      for name, path in self.DATA_PATHS.items()
    }


class Jsonl(Files):
  """Prompts with completions, and conversations, of which the answers are learnt."""

  #: How messages become text; tokenizer: by the template beside VOCAB_PATH.
  CHAT_TEMPLATE: Literal["plain", "alpaca", "chatml", "gemma", "llama2", "llama3", "tokenizer"] = (
    "plain"
  )
  EVAL_DATA_PATH: str | None = None  #: Files to evaluate on. None: what TRAIN_SHARE leaves.

  def train_data(self) -> fdl.Config:
    split = (0.0, self.TRAIN_SHARE if self.EVAL_DATA_PATH is None else 1.0)
    return self.conversations("DATA_PATH", split=split, shuffle=True, packed=self.PACKED_INPUT)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.EVAL_DATA_PATH is None and self.TRAIN_SHARE >= 1:
      return {}
    split = (self.TRAIN_SHARE if self.EVAL_DATA_PATH is None else 0.0, 1.0)
    knob = "DATA_PATH" if self.EVAL_DATA_PATH is None else "EVAL_DATA_PATH"
    dataset = self.conversations(knob, split=split, shuffle=False, packed=False)
    metrics = (evaluation.language_model, evaluation.acc_strict)
    return {"validation": self.eval_set(dataset, metrics=metrics)}

  def conversations(
    self, knob: str, *, split: tuple[float, float], shuffle: bool, packed: bool
  ) -> fdl.Config[ExampleRows]:
    """A part of the conversations in the files that a knob names."""
    tokenizer = self.tokenizer()
    if tokenizer is None:
      raise UserError("TOKENIZER=character is for text: take another for conversations.")
    corpus = fdl.Config(
      Conversations,
      path=getattr(self, knob),
      tokenizer=tokenizer,
      vocab_size=self.VOCAB_SIZE,
      template=self.CHAT_TEMPLATE,
      vocab_path=self.VOCAB_PATH,
      knob=knob,
    )
    return fdl.Config(
      ExampleRows,
      corpus=corpus,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=packed,
      split=split,
    )


class Preferences(Jsonl):
  """Pairs of answers to a prompt, of which one is preferred: direct preference optimization."""

  DPO_BETA: float = 0.1  #: How dearly it is bought to leave the model that training began with.
  DPO_LABEL_SMOOTHING: float = 0.0  #: How probable it is that a preference is the wrong way round.

  def objective(self) -> fdl.Config[objectives.Dpo]:
    return fdl.Config(objectives.Dpo, beta=self.DPO_BETA, label_smoothing=self.DPO_LABEL_SMOOTHING)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    found = super().eval_data()
    for one in found.values():
      one.metrics = (evaluation.preference_acc, evaluation.language_model)
    return found

  def conversations(
    self, knob: str, *, split: tuple[float, float], shuffle: bool, packed: bool
  ) -> fdl.Config[ExampleRows]:
    rows = super().conversations(knob, split=split, shuffle=shuffle, packed=True)
    fdl.update_callable(rows, PairRows)
    fdl.update_callable(rows.corpus, preferences.Preferences)
    return rows


class Tfds(Experiment):
  """SeqIO tasks of `data/tasks.py`, over data sets of TFDS."""

  TFDS_NAME: str = UNSET  #: name:version under --tfds_data_dir, or a folder that TFDS wrote.
  VOCAB_PATH: str | None = None  #: A SentencePiece model. None: what $VOCAB_PATH says.

  def task(self, register: Callable[..., str]) -> fdl.Config[tasks.TfdsTask]:
    """The task that `register` adds."""
    vocab_path = self.VOCAB_PATH or os.environ.get("VOCAB_PATH")
    return fdl.Config(
      tasks.TfdsTask, register, tfds_name=self.TFDS_NAME, vocab_path=vocab_path or None
    )

  def corpus(
    self, register: Callable[..., str], *, split: str, **options: Any
  ) -> fdl.Config[SeqIOCorpus]:
    """A split of a task; `options` are those of `SeqIOCorpus`."""
    return fdl.Config(
      SeqIOCorpus, task=self.task(register), split=split, vocab_size=self.VOCAB_SIZE, **options
    )

  def examples(
    self, corpus: fdl.Config[SeqIOCorpus], *, shuffle: bool, packed: bool = False
  ) -> fdl.Config[ExampleRows]:
    """Rows of whole examples."""
    return fdl.Config(
      ExampleRows,
      corpus=corpus,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=packed,
    )

  def question_lengths(self, *answers: str) -> Mapping[str, int]:
    """What questions and answers are cut to."""
    if self.MAX_SEQ_LEN <= _ANSWER_LENGTH:
      raise UserError(f"MAX_SEQ_LEN={self.MAX_SEQ_LEN} leaves no room for questions.")
    lengths = {"inputs": self.MAX_SEQ_LEN - _ANSWER_LENGTH}
    return lengths | dict.fromkeys(answers, _ANSWER_LENGTH)


_ANSWER_LENGTH = 64


class PretrainingTask(Tfds, abc.ABC):
  """A task with a split to train on and one to look at now and then."""

  EVAL_SPLIT: str | None = "validation"  #: The split that is evaluated. None: none.
  EVAL_BATCHES: int | None = 16  #: Of it so many batches. None: all.

  def train_data(self) -> fdl.Config:
    return self.rows("train", shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.EVAL_SPLIT is None:
      return {}
    dataset = self.rows(self.EVAL_SPLIT, shuffle=False)
    return {self.EVAL_SPLIT: self.eval_set(dataset, num_batches=self.EVAL_BATCHES)}

  @abc.abstractmethod
  def rows(self, split: str, *, shuffle: bool) -> fdl.Config:
    """A split, as rows."""


class Pile(PretrainingTask):
  """The Pile (Gao et al., 2020): pieces of MAX_SEQ_LEN tokens, regardless of documents."""

  TFDS_NAME = "the_pile:1.0.0"
  EVAL_BATCHES = 1
  #: Read as it is needed, by SeqIO, rather than once into the cache folder: 2 bytes a token there.
  USE_STREAMING: bool = False

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config:
    """A split, each piece a row."""
    if self.USE_STREAMING:
      return fdl.Config(
        seqio_stream.SeqIOStream,
        task=self.task(tasks.the_pile_lm),
        task_split=split,
        seq_len=self.MAX_SEQ_LEN,
        seed=self.RANDOM_SEED,
        shuffle=shuffle,
        packed=False,
      )
    lengths = {"targets": self.MAX_SEQ_LEN}
    corpus = self.corpus(tasks.the_pile_lm, split=split, bos_id=0, lengths=lengths)
    return self.examples(corpus, shuffle=shuffle)


class C4(PretrainingTask):
  """C4 (Raffel et al., 2020), the English part: rows cut from documents that end with EOS."""

  TFDS_NAME = "c4/en:3.0.1"
  PACKED_INPUT: bool = True  #: Keep the documents of one row apart, by segment ids.

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config[packing.PackedRows]:
    """A split, cut into rows."""
    return fdl.Config(
      packing.PackedRows,
      corpus=self.corpus(tasks.c4, split=split),
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=self.PACKED_INPUT,
    )


class Lambada(Tfds):
  """LAMBADA (Paperno et al., 2016), to evaluate only: `acc_strict` of the last word."""

  TFDS_NAME = "my_lambada:1.0.0"

  def train_data(self) -> None:
    return None

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    lengths = self.question_lengths("targets")
    corpus = self.corpus(tasks.lambada_eval, split="test", bos_id=0, lengths=lengths)
    metrics = (evaluation.acc_strict, evaluation.language_model)
    return {"lambada": self.eval_set(self.examples(corpus, shuffle=False), metrics=metrics)}


class BoolQ(Tfds):
  """BoolQ (Clark et al., 2019): yes or no, fine-tuned on the one word and evaluated on it."""

  TFDS_NAME = "super_glue/boolq:1.0.2"
  PACKED_INPUT: bool = False  #: Several examples a row, told apart by segment ids.

  def train_data(self) -> fdl.Config:
    return self.examples(self.questions("train"), shuffle=True, packed=self.PACKED_INPUT)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    dataset = self.examples(self.questions("validation"), shuffle=False)
    metrics = (evaluation.boolq_acc, evaluation.language_model)
    return {"boolq": self.eval_set(dataset, metrics=metrics)}

  def questions(self, split: str) -> fdl.Config[SeqIOCorpus]:
    """A split, each example a question and its answer."""
    lengths = self.question_lengths("targets", "alternatives")
    return self.corpus(tasks.boolq, split=split, bos_id=1, lengths=lengths)
