# SPDX-License-Identifier: Apache-2.0
"""A tiny model that learns sums, first from texts, then from rewards: minutes on two cores."""

import fiddle as fdl

from paxlike.data.examples import ExampleRows
from paxlike.data.tuning import sums
from paxlike.data.tuning.prompts import Prompts
from paxlike.experiments.reinforcement import Reinforcement, Split
from paxlike.experiments.tiny import SmallQwen
from paxlike.registry import register
from paxlike.training import evaluation
from paxlike.training.evaluation import EvalSet


class Adder(SmallQwen):
  """A Qwen3 of 0.6M parameters that reads bytes."""

  VOCAB_SIZE = 257
  MAX_SEQ_LEN = 64
  NUM_LAYERS = 3
  NUM_HEADS = 4
  DIMS_PER_HEAD = 32
  MODEL_DIMS = 128
  HIDDEN_DIMS = 384


@register
class Sums(Adder):
  """Pre-training on sums of two numbers below 100, stopped when it is right about half the time."""

  PERCORE_BATCH_SIZE = 16
  MAX_STEPS = 120
  LEARNING_RATE = 0.005
  LR_WARMUP = 20
  SUMMARY_INTERVAL_STEPS = 25
  EVAL_INTERVAL_STEPS = 100
  CHECKPOINT_EVERY_N_STEPS = 0

  def train_data(self) -> fdl.Config:
    return self.rows("train", shuffle=True)

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    metrics = (evaluation.language_model, evaluation.acc_strict)
    return {"validation": self.eval_set(self.rows("validation", shuffle=False), metrics=metrics)}

  def rows(self, split: str, *, shuffle: bool) -> fdl.Config[ExampleRows]:
    """Returns the sequences of a split."""
    return fdl.Config(
      ExampleRows,
      corpus=fdl.Config(sums.SumTexts, split=split),
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=shuffle,
      packed=shuffle,
    )


@register
class SumsRl(Reinforcement, Adder):
  """GRPO from a checkpoint of `Sums`: --fdl.CHECKPOINT_RESTORE_PATH=DIR."""

  REWARD = "exact_answer"
  PROMPTS_PER_STEP = 64
  GROUP_SIZE = 8
  DECODE_SLOTS = 512
  ROLLOUT_TEMPERATURE = 1.4
  MAX_NEW_TOKENS = sums.ANSWER_TOKENS
  PERCORE_BATCH_SIZE = 96
  OPTIMIZER = "adamw"
  LEARNING_RATE = 3e-4
  LR_WARMUP = 10
  MAX_STEPS = 1600
  SUMMARY_INTERVAL_STEPS = 50
  EVAL_INTERVAL_STEPS = 100
  CHECKPOINT_EVERY_N_STEPS = 100

  def prompts(self, split: Split) -> fdl.Config[Prompts]:
    return fdl.Config(
      sums.SumPrompts,
      split=split,
      vocab_size=self.VOCAB_SIZE,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.RANDOM_SEED,
      shuffle=split == "train",
    )
