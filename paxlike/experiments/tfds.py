# SPDX-License-Identifier: Apache-2.0
"""Data mixins for TFDS data sets; `datasets` exports them too."""

import abc
import os
from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl

from paxlike.config import ranges
from paxlike.config.knobs import UNSET
from paxlike.data import packing
from paxlike.data.examples import ExampleRows
from paxlike.data.seqio import stream, tasks
from paxlike.data.seqio.corpus import SeqIOCorpus
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.training import evaluation
from paxlike.training.evaluation import EvalSet


class Tfds(Experiment):
  """Base of the mixins for TFDS data sets, each with a SeqIO task of `data/seqio/tasks.py`."""

  #: name:version under --tfds_data_dir, or a folder that TFDS wrote.
  TFDS_NAME: ranges.Name = UNSET
  VOCAB_PATH: ranges.Path | None = None  #: A SentencePiece model. None: $VOCAB_PATH.

  def task(self, register: Callable[..., str]) -> fdl.Config[tasks.TfdsTask]:
    """Returns the task that `register` adds."""
    vocab_path = self.VOCAB_PATH or os.environ.get("VOCAB_PATH")
    return fdl.Config(
      tasks.TfdsTask, register, tfds_name=self.TFDS_NAME, vocab_path=vocab_path or None
    )

  def corpus(
    self, register: Callable[..., str], *, split: str, **options: Any
  ) -> fdl.Config[SeqIOCorpus]:
    """Returns a split of a task; `options` are those of `SeqIOCorpus`."""
    return fdl.Config(
      SeqIOCorpus, task=self.task(register), split=split, vocab_size=self.VOCAB_SIZE, **options
    )

  def examples(
    self, corpus: fdl.Config[SeqIOCorpus], *, shuffle: bool, packed: bool = False
  ) -> fdl.Config[ExampleRows]:
    """Returns sequences of whole examples."""
    return fdl.Config(
      ExampleRows,
      corpus=corpus,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=packed,
    )

  def question_lengths(self, *answers: str) -> Mapping[str, int]:
    """Returns the lengths to which questions and answers are truncated."""
    if self.MAX_SEQ_LEN <= _ANSWER_LENGTH:
      raise UserError(f"MAX_SEQ_LEN={self.MAX_SEQ_LEN} leaves no room for questions.")
    lengths = {"inputs": self.MAX_SEQ_LEN - _ANSWER_LENGTH}
    return lengths | dict.fromkeys(answers, _ANSWER_LENGTH)


_ANSWER_LENGTH = 64


class PretrainingTask(Tfds, abc.ABC):
  """A task with a training split and an evaluation split."""

  EVAL_SPLIT: ranges.Name | None = "validation"  #: Split to evaluate on. None: no evaluation.
  EVAL_BATCHES: ranges.Positive | None = 16  #: Batches per evaluation. None: all.

  def train_data(self) -> fdl.Config:
    return self.rows("train", shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.EVAL_SPLIT is None:
      return {}
    dataset = self.rows(self.EVAL_SPLIT, shuffle=False)
    return {self.EVAL_SPLIT: self.eval_set(dataset, num_batches=self.EVAL_BATCHES)}

  @abc.abstractmethod
  def rows(self, split: str, *, shuffle: bool) -> fdl.Config:
    """Returns the sequences of a split."""


class Pile(PretrainingTask):
  """The Pile (Gao et al., 2020): chunks of MAX_SEQ_LEN tokens, across documents."""

  TFDS_NAME = "the_pile:1.0.0"
  EVAL_BATCHES = 1
  #: Stream through SeqIO on every host, rereading from the start after a restart, instead of
  #: tokenizing once into the cache folder (2 bytes per token).
  USE_STREAMING: bool = False

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config:
    """Returns a split, one chunk per sequence."""
    if self.USE_STREAMING:
      return fdl.Config(
        stream.SeqIOStream,
        task=self.task(tasks.the_pile_lm),
        task_split=split,
        seq_len=self.MAX_SEQ_LEN,
        vocab_size=self.VOCAB_SIZE,
        seed=self.RANDOM_SEED,
        shuffle=shuffle,
        packed=False,
      )
    lengths = {"targets": self.MAX_SEQ_LEN}
    corpus = self.corpus(tasks.the_pile_lm, split=split, bos_id=0, lengths=lengths)
    return self.examples(corpus, shuffle=shuffle)


class C4(PretrainingTask):
  """C4 (Raffel et al., 2020), English: sequences cut from documents that end with EOS."""

  TFDS_NAME = "c4/en:3.0.1"
  PACKED_INPUT: bool = True  #: Separate the documents of a sequence by segment ids.

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config[packing.PackedRows]:
    """Returns a split, cut into sequences."""
    return fdl.Config(
      packing.PackedRows,
      corpus=self.corpus(tasks.c4, split=split),
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=self.PACKED_INPUT,
    )


class Lambada(Tfds):
  """LAMBADA (Paperno et al., 2016), evaluation only: `acc_strict` of the last word."""

  TFDS_NAME = "my_lambada:1.0.0"

  def train_data(self) -> None:
    return None

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    lengths = self.question_lengths("targets")
    corpus = self.corpus(tasks.lambada_eval, split="test", bos_id=0, lengths=lengths)
    metrics = (evaluation.acc_strict, evaluation.language_model)
    return {"lambada": self.eval_set(self.examples(corpus, shuffle=False), metrics=metrics)}


class BoolQ(Tfds):
  """BoolQ (Clark et al., 2019): fine-tuning and evaluation on one-word answers, yes or no."""

  TFDS_NAME = "super_glue/boolq:1.0.2"
  PACKED_INPUT: bool = False  #: Pack several examples per sequence, with segment ids.

  def train_data(self) -> fdl.Config:
    return self.examples(self.questions("train"), shuffle=True, packed=self.PACKED_INPUT)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    dataset = self.examples(self.questions("validation"), shuffle=False)
    metrics = (evaluation.boolq_acc, evaluation.language_model)
    return {"boolq": self.eval_set(dataset, metrics=metrics)}

  def questions(self, split: str) -> fdl.Config[SeqIOCorpus]:
    """Returns a split; each example is a question and its answer."""
    lengths = self.question_lengths("targets", "alternatives")
    return self.corpus(tasks.boolq, split=split, bos_id=1, lengths=lengths)
