# SPDX-License-Identifier: Apache-2.0
"""ON_SPIKE=rollback: a run goes on from its newest checkpoint, without the data of the spike."""

import json
from typing import Any

import fiddle as fdl
import numpy as np
import pytest
from helpers.program import curve

import paxlike
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import RowDataset
from paxlike.experiments.gpt import Gpt

pytestmark = pytest.mark.slow
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


def record(folder) -> list[tuple[int, int]]:
  found = json.loads((folder / "rollbacks.json").read_text())
  return [(one["checkpoint"], one["spike"]) for one in found]


def test_the_curve_is_that_without_the_data_from_checkpoint_to_spike(tmp_path, capsys):
  """Also if the run is killed at any step after the first rollback, and when none is saved yet."""
  paxlike.train(Spiky, tmp_path / "run", ON_SPIKE="rollback")
  assert record(tmp_path / "run") == [(16, 19), (24, 25)]  # Batch 29 is the one of step 25.
  assert "from step 16, the data of steps 16 to 19 are skipped" in capsys.readouterr().out
  found = curve(tmp_path / "run")
  assert [updates for updates, _ in found] == list(range(1, 41))
  clean: dict[str, Any] = {"ON_SPIKE": "rollback", "LEFT_OUT": (16, 17, 18, 19, 28, 29)}
  paxlike.train(Spiky, tmp_path / "clean", **clean)
  assert not (tmp_path / "clean" / "rollbacks.json").exists()
  assert found == curve(tmp_path / "clean")
  # Stopped between the second rollback and the next checkpoint, as by a kill: the record is enough.
  for step in (32, 40):
    (tmp_path / "run/checkpoints" / f"checkpoint_{step:08d}").rename(tmp_path / f"lost_{step}")
  paxlike.train(Spiky, tmp_path / "run", ON_SPIKE="rollback")
  out = capsys.readouterr().out
  assert "from step 24, the data of steps 24 to 25 are skipped" in out and ": spike" not in out
  assert found == curve(tmp_path / "run")


def test_a_spike_before_the_first_checkpoint_leads_to_the_start(tmp_path):
  late: dict[str, Any] = {"ON_SPIKE": "rollback", "CHECKPOINT_EVERY_N_STEPS": 100, "MAX_STEPS": 24}
  paxlike.train(Spiky, tmp_path / "run", **late)
  assert record(tmp_path / "run")[0] == (0, 19)
  assert [updates for updates, _ in curve(tmp_path / "run")] == list(range(1, 25))


def test_spikes_that_stay_end_the_run(tmp_path):
  often: dict[str, Any] = {"ON_SPIKE": "rollback", "MAX_SKIPPED_STEPS_IN_A_ROW": 1}
  with pytest.raises(paxlike.RunError, match="has rolled back to checkpoint 8 as often as"):
    paxlike.train(Spiky, tmp_path / "run", **often, SPIKE_DEVIATIONS=0.01)
