# SPDX-License-Identifier: Apache-2.0
"""Small models that train on a laptop in minutes, on real text."""

import ast
import warnings
from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.data.seqio import python_corpus
from paxlike.experiments import datasets
from paxlike.experiments.gpt import Gpt
from paxlike.experiments.qwen import Qwen3
from paxlike.registry import register
from paxlike.telemetry.callbacks import Callback
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


# What may complete a line that begins or continues a compound statement: (text before, text after).
_COMPLETIONS = (
  ("", ""),
  ("", "\n pass"),  # if x:
  ("if x: pass\n", "\n pass"),  # else:
  ("try: pass\n", "\n pass"),  # except ValueError:
  ("", "\n case _: pass"),  # match x:
  ("match x:\n ", "\n  pass"),  # case 1:
  ("", "\ndef f(): pass"),  # @property
)


def parsed_lines(text: str) -> tuple[int, int]:
  """Returns (how many lines of a text are Python, how many lines it has).

  Each line is judged alone, without its indentation: `ast.parse` must accept it, if necessary with
  the rest of the shortest compound statement that it can be the beginning or a later clause of. A
  line within an expression of several lines is seldom accepted, a line of a docstring only if it
  could be code. Blank lines, comments, and the last line, within which a sample may end, are not
  counted.
  """
  lines = [line.strip() for line in text.split("\n")[:-1]]
  lines = [line for line in lines if line and not line.startswith("#")]
  return sum(map(_parses, lines)), len(lines)


def _parses(line: str) -> bool:
  for before, after in _COMPLETIONS:
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Such as that of an invalid escape sequence.
        ast.parse(f"{before}{line}{after}")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      continue
    return True
  return False


class CountPython(Callback):
  """Prints how many lines of the sample at the end of training are Python: see `parsed_lines`."""

  def on_record(self, record: dict[str, Any]):
    if record["kind"] == "sample":
      parsed, total = parsed_lines(record["prompt"] + record["text"])
      print(f"{parsed} of {total} lines of the sample parse as Python")


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

  def callbacks(self) -> list[Callback]:
    return [CountPython()]

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
