# SPDX-License-Identifier: Apache-2.0
"""Small models that train on a laptop in minutes, on real text."""

import fiddle as fdl

from paxlike.data.seqio import python_corpus
from paxlike.experiments import datasets
from paxlike.experiments.gpt import Gpt
from paxlike.registry import register
from paxlike.training.evaluation import EvalSet


@register
class TinyPython(Gpt):
  """A GPT of 2M parameters, trained on the source code of Python's standard library.

  Needs no file and no network: on first use, the running Python's sources are converted to a TFDS
  data set, a SentencePiece vocabulary of 4,096 pieces and a SeqIO task in the user's cache folder.
  """

  VOCAB_SIZE = 4096
  MAX_SEQ_LEN = 256
  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 160
  DIMS_PER_HEAD = 40
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 550
  LEARNING_RATE = 3e-3
  LR_COS_WARMUP = 30
  WEIGHT_DECAY_ON = "matrices"
  SUMMARY_INTERVAL_STEPS = 25
  EVAL_INTERVAL_STEPS = 275
  CHECKPOINT_EVERY_N_STEPS = 275
  CHECKPOINT_MAX_TO_KEEP = 2
  SAMPLE_PROMPT = "def "

  def train_data(self) -> fdl.Config:
    return fdl.Config(python_corpus.dataset, split="train", **self._options())

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    dataset = fdl.Config(python_corpus.dataset, split="validation", **self._options())
    return {"heldout": self.eval_set(dataset, num_batches=40)}

  def _options(self) -> dict[str, object]:
    return {"seq_len": self.MAX_SEQ_LEN, "vocab_size": self.VOCAB_SIZE, "seed": self.RANDOM_SEED}


@register
class ShakespeareChar(datasets.LocalText, Gpt):
  """nanoGPT's character model for CPUs (train_shakespeare_char): --fdl.DATA_PATH=FILE.

  Published for tinyshakespeare: validation loss 1.88 after 2,000 steps.
  """

  TOKENIZER = "character"
  PACKED_INPUT = False
  VOCAB_SIZE = 65
  MAX_SEQ_LEN = 64
  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 128
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 12
  MAX_STEPS = 2000
  LEARNING_RATE = 1e-3
  LR_COS_WARMUP = 100
  ADAM_BETA2 = 0.99
  WEIGHT_DECAY_ON = "matrices"
  EVAL_INTERVAL_STEPS = 250
  CHECKPOINT_EVERY_N_STEPS = 1000
