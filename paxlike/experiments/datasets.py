# SPDX-License-Identifier: Apache-2.0
"""Mixins that give a model its data: `class Pile126M(datasets.Pile, Gpt126M)`."""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.config.knobs import UNSET
from paxlike.data import mixture, packing, synthetic
from paxlike.data.examples import ExampleRows
from paxlike.data.prepared import PreparedRows
from paxlike.data.text import text_files
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from paxlike.data.tuning import preferences
from paxlike.data.tuning.conversations import Conversations
from paxlike.data.tuning.labeled_answers import LabeledAnswers, LabeledRows
from paxlike.data.tuning.preferences import PairRows
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments.tfds import C4, BoolQ, Lambada, Pile, PretrainingTask, Tfds
from paxlike.training import evaluation, objectives
from paxlike.training.evaluation import EvalSet, Metrics

__all__ = [
  "C4",
  "BoolQ",
  "Chat",
  "DataPath",
  "Files",
  "Jsonl",
  "Lambada",
  "LocalText",
  "Pile",
  "Preferences",
  "Prepared",
  "PretrainingTask",
  "RewardPairs",
  "Synthetic",
  "TextMixture",
  "Tfds",
  "Tokenized",
]


class Synthetic(Experiment):
  """Synthetic tokens, to measure speed without files."""

  #: random: uniform ids. constant: id 1 everywhere, as in Pax; the loss falls to 0.
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

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    return {}  # Also instead of those of a family that has other data.


class Tokenized(Experiment):
  """Knobs that select a tokenizer."""

  #: Kind of tokenizer. character: one id per character of the data.
  TOKENIZER: Literal["byte", "character", "sentencepiece", "huggingface"] = "byte"
  #: File of the tokenizer: a SentencePiece model, or a tokenizer.json of Hugging Face.
  VOCAB_PATH: ranges.Path | None = None

  def tokenizer(self) -> fdl.Config[Tokenizer] | None:
    """Returns the tokenizer; None: one id per character of the data."""
    if self.TOKENIZER == "character":
      return None
    if self.TOKENIZER == "byte":
      return fdl.Config(ByteTokenizer)
    kinds = {
      "sentencepiece": (SentencePieceTokenizer, "a SentencePiece model"),
      "huggingface": (HuggingFaceTokenizer, "a tokenizer.json"),
    }
    kind, file = kinds[self.TOKENIZER]
    if self.VOCAB_PATH is None:
      raise UserError(f"TOKENIZER={self.TOKENIZER} needs --fdl.VOCAB_PATH=FILE ({file}).")
    return fdl.Config(kind, self.VOCAB_PATH)


class Prepared(Tokenized):
  """Data prepared by scripts/prepare_data.py with the same tokenizer and MAX_SEQ_LEN."""

  DATA_PATH: ranges.Path | None = None  #: Folder of the prepared data. Required.
  EVAL_SPLIT: ranges.Name | None = "validation"  #: Split to evaluate on. None: no evaluation.

  def train_data(self) -> fdl.Config:
    return self.rows("train", shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    if self.EVAL_SPLIT is None:
      return {}
    return {self.EVAL_SPLIT: self.eval_set(self.rows(self.EVAL_SPLIT, shuffle=False))}

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config[PreparedRows]:
    """Returns the sequences of a split."""
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


class DataPath(Tokenized):
  """The user's files, with a tokenizer."""

  DATA_PATH: ranges.Path | None = None  #: A file, a folder or a glob. Required.


class Chat(DataPath):
  """Prompts or conversations in the user's files."""

  #: Chat template. tokenizer: the template beside VOCAB_PATH.
  CHAT_TEMPLATE: Literal["plain", "alpaca", "chatml", "gemma", "llama2", "llama3", "tokenizer"] = (
    "plain"
  )


class Files(DataPath):
  """The user's files, packed into sequences; a part of them is evaluated on."""

  PACKED_INPUT: bool = True  #: Separate the documents of a sequence by segment ids.
  #: Fraction of the tokens of the text to train on; the rest is evaluated on.
  TRAIN_SHARE: ranges.Fraction = 0.9


class LocalText(Files):
  """Text files: .txt, .jsonl (.zst, .gz), .parquet or .arrow; a single file may have any name."""

  DATA_FIELD: ranges.Name = "text"  #: Field of records that holds the text.

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
    """Returns the sequences of a part of the text in DATA_PATH, or in `path`."""
    return fdl.Config(
      packing.PackedRows,
      corpus=self.corpus(path),
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      packed=self.PACKED_INPUT,
      shuffle=shuffle,
      split=split,
    )

  def corpus(self, path: str | None = None) -> fdl.Config[text_files.TextFiles]:
    """Returns the text in DATA_PATH, or in `path`."""
    return fdl.Config(
      text_files.TextFiles,
      path=self.DATA_PATH if path is None else path,
      field=self.DATA_FIELD,
      tokenizer=self.tokenizer(),
      vocab_size=self.VOCAB_SIZE,
      knob="DATA_PATH" if path is None else "DATA_PATHS",
    )


class TextMixture(LocalText):
  """A mixture of several text sources, each like `LocalText`, sampled by weight."""

  #: Name -> file, folder or glob of each source.
  DATA_PATHS: dict[ranges.Name, ranges.Path] = UNSET
  #: Relative number of sequences of each source. None: in proportion to the sources' sizes.
  MIXTURE_WEIGHTS: dict[ranges.Name, ranges.Weight] | None = None

  def train_data(self) -> fdl.Config[mixture.Mixture]:
    return fdl.Config(
      mixture.Mixture,
      sources=self.sources(),
      weights=self.MIXTURE_WEIGHTS,
      seed=self.RANDOM_SEED,
    )

  def sources(self) -> dict[str, fdl.Config]:
    """Returns training data by name, of any kind, but either all or none packed."""
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


class Jsonl(Chat, Files):
  """Prompts with completions, or conversations; only answers are trained on."""

  EVAL_DATA_PATH: ranges.Path | None = None  #: Files to evaluate on. None: the rest of DATA_PATH.

  def train_data(self) -> fdl.Config:
    split, packed = self.train_split(), self.PACKED_INPUT
    return self.conversations("DATA_PATH", split=split, shuffle=True, packed=packed)

  def train_split(self) -> tuple[float, float]:
    """Returns the part of DATA_PATH to train on, as a range of fractions."""
    return (0.0, self.TRAIN_SHARE if self.EVAL_DATA_PATH is None else 1.0)

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
    """Returns the sequences of a part of the files that a knob names."""
    tokenizer = self.tokenizer()
    if tokenizer is None:
      raise UserError("TOKENIZER=character is for plain text: use another one for conversations.")
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


class Answers(Jsonl):
  """Pairs of answers to a prompt, of which one is preferred."""

  def train_data(self) -> fdl.Config:
    return self.conversations("DATA_PATH", split=self.train_split(), shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    found = super().eval_data()
    for one in found.values():
      one.metrics = (self.metric(), evaluation.language_model)
    return found

  def metric(self) -> Metrics:
    """Returns the metric of answers."""
    return evaluation.preference_acc

  def kinds(self) -> tuple[type[ExampleRows], type[Conversations]]:
    """Returns the classes of sequences and of the corpus."""
    return PairRows, preferences.Preferences

  def conversations(
    self, knob: str, *, split: tuple[float, float], shuffle: bool, packed: bool = True
  ) -> fdl.Config[ExampleRows]:
    del packed  # The segments of a sequence are its answers.
    rows = super().conversations(knob, split=split, shuffle=shuffle, packed=True)
    rows_kind, corpus_kind = self.kinds()
    fdl.update_callable(rows, rows_kind)
    fdl.update_callable(rows.corpus, corpus_kind)
    return rows


class Preferences(Answers):
  """Preference optimization, on pairs of answers to a prompt or, for KTO, on labeled answers."""

  #: Loss of preferences. simpo and orpo need no copy of the initial model; kto takes single answers
  #: that are labeled as desirable or not.
  PREFERENCE_LOSS: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
  #: Strength of the KL penalty towards the initial model (beta).
  DPO_BETA: ranges.Factor = 0.1
  #: Assumed probability that a preference label is flipped.
  DPO_LABEL_SMOOTHING: ranges.Smoothing = 0.0
  #: Strength of the KL penalty towards the initial model (tau in the paper).
  IPO_BETA: ranges.Factor = 0.1
  SIMPO_BETA: ranges.Factor = 2.0  #: Factor of the log-probability per token, which is the reward.
  SIMPO_GAMMA: ranges.NonNegativeFloat = 1.0  #: Target margin between the rewards.
  ORPO_LAMBDA: ranges.Factor = 0.1  #: Weight of the loss of the odds ratio.
  KTO_BETA: ranges.Factor = 0.1  #: Strength of the KL penalty towards the initial model.
  KTO_DESIRABLE_WEIGHT: ranges.Weight = 1.0  #: Weight of the losses of desirable answers.
  KTO_UNDESIRABLE_WEIGHT: ranges.Weight = 1.0  #: Weight of the losses of undesirable answers.

  def objective(self) -> fdl.Config[objectives.Objective]:
    match self.PREFERENCE_LOSS:
      case "ipo":
        return fdl.Config(objectives.Ipo, beta=self.IPO_BETA)
      case "simpo":
        return fdl.Config(objectives.SimPo, beta=self.SIMPO_BETA, gamma=self.SIMPO_GAMMA)
      case "orpo":
        return fdl.Config(objectives.Orpo, odds_weight=self.ORPO_LAMBDA)
      case "kto":
        return fdl.Config(
          objectives.Kto,
          beta=self.KTO_BETA,
          desirable_weight=self.KTO_DESIRABLE_WEIGHT,
          undesirable_weight=self.KTO_UNDESIRABLE_WEIGHT,
        )
    smoothing = self.DPO_LABEL_SMOOTHING
    return fdl.Config(objectives.Dpo, beta=self.DPO_BETA, label_smoothing=smoothing)

  def metric(self) -> Metrics:
    is_labeled = self.PREFERENCE_LOSS == "kto"
    return evaluation.labeled_pplx if is_labeled else evaluation.preference_acc

  def kinds(self) -> tuple[type[ExampleRows], type[Conversations]]:
    is_labeled = self.PREFERENCE_LOSS == "kto"
    return (LabeledRows, LabeledAnswers) if is_labeled else super().kinds()


class RewardPairs(Answers):
  """A reward model (`layers.RewardModel`), trained on pairs of answers to a prompt.

  The family's output projection is replaced by one to a number, the reward of a conversation.
  """

  REWARD_CENTERING: ranges.NonNegativeFloat = 0.0  #: Weight of a loss that keeps rewards near 0.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    fdl.update_callable(model, layers.RewardModel)
    model.head, model.soft_cap = self.linear("head"), None
    return model

  def objective(self) -> fdl.Config[objectives.BradleyTerry]:
    return fdl.Config(objectives.BradleyTerry, centering=self.REWARD_CENTERING)

  def adapt(self, graph: fdl.Buildable):
    if self.USE_LORA:
      raise UserError("USE_LORA freezes the head of a reward model, which is new: leave it out.")
    super().adapt(graph)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    found = super().eval_data()
    for one in found.values():
      one.metrics = (self.metric(),)
    return found

  def kinds(self) -> tuple[type[ExampleRows], type[Conversations]]:
    return PairRows, preferences.ScoredPreferences
