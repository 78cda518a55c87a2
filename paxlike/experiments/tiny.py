# SPDX-License-Identifier: Apache-2.0
"""Small models that train on a laptop in minutes, on real text."""

import fiddle as fdl

from paxlike import layers
from paxlike.data.seqio import python_corpus
from paxlike.experiments import datasets
from paxlike.experiments.gpt import Gpt
from paxlike.experiments.qwen import Qwen3
from paxlike.registry import register
from paxlike.training.evaluation import EvalSet


class SmallQwen(Qwen3):
  """A small Qwen3, which normalizes queries and keys, trained by Muon."""

  NUM_KV_HEADS = None
  ROPE_THETA = 10_000.0
  USE_TIED_EMBEDDING = True
  ICI_MESH_SHAPE = (-1, 1, 1)
  CHECKPOINT_POLICY = "SAVE_EVERYTHING"
  FPROP_DTYPE = "float32"
  OPTIMIZER = "muon"
  LR_SCHEDULE = "linear"
  WEIGHT_DECAY_ON = "matrices"

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    if role in ("output", "down"):  # Each block begins as the identity.
      linear.init = fdl.Partial(layers.zeros)
    return linear


@register
class TinyPython(SmallQwen):
  """A Qwen3 of 2M parameters, trained on the source code of Python's standard library.

  Needs no file and no network: on first use, the running Python's sources are converted to a TFDS
  data set, a SentencePiece vocabulary of 4,096 pieces and a SeqIO task in the user's cache folder.
  """

  VOCAB_SIZE = 4096
  MAX_SEQ_LEN = 256
  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 160
  HIDDEN_DIMS = 448
  DIMS_PER_HEAD = 40
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 480
  LEARNING_RATE = 0.015
  LR_WARMUP = 20
  SUMMARY_INTERVAL_STEPS = 25
  EVAL_INTERVAL_STEPS = 240
  CHECKPOINT_EVERY_N_STEPS = 240
  CHECKPOINT_MAX_TO_KEEP = 2
  SAMPLE_PROMPT = "def __init__(self, "

  def train_data(self) -> fdl.Config:
    return fdl.Config(python_corpus.dataset, split="train", **self._options())

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    dataset = fdl.Config(python_corpus.dataset, split="validation", **self._options())
    return {"heldout": self.eval_set(dataset, num_batches=40)}

  def _options(self) -> dict[str, object]:
    return {"seq_len": self.MAX_SEQ_LEN, "vocab_size": self.VOCAB_SIZE, "seed": self.RANDOM_SEED}


class CharText(datasets.LocalText):
  """The data and the budget of nanoGPT's character model for CPUs: 2,000 steps of 768 characters.

  --fdl.DATA_PATH=FILE, such as tinyshakespeare.
  """

  TOKENIZER = "character"
  PACKED_INPUT = False
  VOCAB_SIZE = 65
  MAX_SEQ_LEN = 64
  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 128
  ICI_MESH_SHAPE = (-1, 1, 1)
  CHECKPOINT_POLICY = "SAVE_EVERYTHING"
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 12
  MAX_STEPS = 2000
  WEIGHT_DECAY_ON = "matrices"
  EVAL_INTERVAL_STEPS = 250
  CHECKPOINT_EVERY_N_STEPS = 1000


@register
class NanoGptChar(CharText, Gpt):
  """nanoGPT's character model for CPUs (train_shakespeare_char): --fdl.DATA_PATH=FILE.

  Published for tinyshakespeare: validation loss 1.88.
  """

  LEARNING_RATE = 1e-3
  LR_COS_WARMUP = 100
  ADAM_BETA2 = 0.99


@register
class ShakespeareChar(CharText, SmallQwen):
  """A Qwen3 of the size and in the budget of `NanoGptChar`, trained by Muon."""

  DIMS_PER_HEAD = 32
  HIDDEN_DIMS = 352
  LEARNING_RATE = 0.01
  LR_WARMUP = 50
