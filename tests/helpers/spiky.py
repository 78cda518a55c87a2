# SPDX-License-Identifier: Apache-2.0
"""An experiment whose data have two batches at which the loss spikes."""

import fiddle as fdl
import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import RowDataset
from paxlike.experiments.gpt import Gpt

SPIKES = (19, 29)  # The batches that do not look like the others.


@configurable
class Numbers(RowDataset):
  """Sequences of one token, but for batches in which all tokens are drawn; some are left out."""

  def __init__(self, *, left_out: tuple[ranges.NonNegative, ...]):
    self.seq_len = 8
    self._batches = [n for n in range(100) if n not in left_out]

  def fingerprint(self) -> str:
    return "numbers"

  def num_rows(self, epoch: int) -> int:
    return 8 * len(self._batches)

  def rows(self, epoch: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
    drawn = [self._row(self._batches[n // 8], n % 8) for n in numbers.tolist()]
    tokens = np.array(drawn, np.int32)
    weights = np.ones((len(tokens), self.seq_len), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

  def _row(self, batch: int, row: int) -> np.ndarray:
    random = np.random.default_rng((batch, row))
    return random.integers(0, 32, 9) if batch in SPIKES else np.full(9, random.integers(0, 4))


class Spiky(Gpt):
  """A model of 32 tokens."""

  VOCAB_SIZE, NUM_LAYERS, NUM_HEADS, MODEL_DIMS, MAX_SEQ_LEN = 32, 2, 2, 16, 8
  FPROP_DTYPE = "float32"
  ICI_MESH_SHAPE = (-1, 1, 1)
  PERCORE_BATCH_SIZE = 1.0
  LEARNING_RATE, LR_SCHEDULE = 0.02, "constant"
  SPIKE_WINDOW, SPIKE_DEVIATIONS = 8, 10.0
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS, MAX_STEPS = 8, 40
  LEFT_OUT: tuple[ranges.NonNegative, ...] = ()  #: Batches that are left out.

  def train_data(self) -> fdl.Config:
    return fdl.Config(Numbers, left_out=self.LEFT_OUT)
