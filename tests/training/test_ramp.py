# SPDX-License-Identifier: Apache-2.0
"""Ramps of batch size and sequence length see every token once, and resume in any stage."""

import json

import numpy as np
import pytest
from helpers.program import TEXT, curve, finish, run, start

from paxlike.data.dataset import RowDataset
from paxlike.data.sliced import Sliced
from paxlike.training import ramp

BATCH = "--fdl.PERCORE_BATCH_SIZE_RAMP"
RAMPS = (
  "--fdl.PERCORE_BATCH_SIZE=2",
  "--fdl.PERCORE_BATCH_SIZE_RAMP={6: 1}",
  "--fdl.MAX_SEQ_LEN_RAMP={2: 4, 5: 8}",
  "--fdl.MAX_STEPS=7",
)


class Packed(RowDataset):
  """Ten sequences of 12 tokens, each of two documents."""

  seq_len, packed = 12, True

  def fingerprint(self) -> str:
    return "packed"

  def num_rows(self, epoch: int) -> int:
    return 10

  def rows(self, epoch: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
    end = numbers[:, None] % 11 + 1  # Of the first document.
    time = np.arange(12)[None]
    tokens = (100 * numbers[:, None] + time).astype(np.int32)
    second = time >= end
    arrays = {"inputs": tokens, "targets": tokens + 1, "segments": 1 + second}
    arrays["positions"] = time - end * second
    arrays = {name: x.astype(np.int32) for name, x in arrays.items()}
    return arrays | {
      "weights": np.ones(tokens.shape, np.float32),
      "source": numbers[:, None].astype(np.int32),
    }


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [1, 2], [5]])
def test_slices_hold_the_tokens_in_order(rows):
  sliced, rows = Sliced(Packed(), slices=3), np.array(rows)
  state, count = None, 0
  for _ in range(2):  # It resumes after each batch, over the end of an epoch.
    with sliced.batches(6, rows=rows, state=state) as batches:
      for _ in range(4):
        batch = next(batches)
        numbers = (count + rows // 3) % 10
        expected = 100 * numbers[:, None] + 4 * (rows % 3)[:, None] + np.arange(4)
        np.testing.assert_array_equal(batch.arrays["inputs"], expected)
        np.testing.assert_array_equal(batch.arrays["source"], numbers[:, None])
        for segments, positions in zip(
          batch.arrays["segments"], batch.arrays["positions"], strict=True
        ):
          for segment in set(segments.tolist()):  # Each document begins anew in each slice.
            found = positions[segments == segment]
            np.testing.assert_array_equal(found, np.arange(len(found)))
        state, count = batch.state, count + 2
        assert state["position"] == count % 10


def test_steps_of_epochs_count_each_stage():
  stages = [ramp.Stage(3, None, 2), ramp.Stage(7, None, 5), ramp.Stage(10**9, None, 8)]  # pyright: ignore
  assert [ramp.num_sequences(stages, n) for n in (0, 3, 5, 9)] == [0, 6, 16, 42]
  for sequences in range(1, 60):
    steps = ramp.num_steps(stages, sequences)
    assert ramp.num_sequences(stages, steps - 1) < sequences <= ramp.num_sequences(stages, steps)


@pytest.mark.slow
def test_a_run_killed_in_the_ramp_is_the_run_never_killed(tmp_path, text, capsys):
  flags = (*TEXT, *RAMPS, f"--fdl.DATA_PATH={text}", "--fdl.CHECKPOINT_EVERY_N_STEPS=1")
  assert run(*flags, f"--job_log_dir={tmp_path}/whole") == 0
  before, _ = capsys.readouterr().out.split("completed step: 0")
  assert "ramp:       32 sequences x 4 tokens before step 2\n" in before
  assert before.count("compiled the step") == 4  # Before steps 2, 5 and 6, and the last.
  for steps in (1, 5, 7):
    assert run(*flags, f"--job_log_dir={tmp_path}/killed", f"--fdl.num_steps={steps}") == 0
  assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
  lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
  weights = [one["total_weights"] for one in map(json.loads, lines) if one["kind"] == "train"]
  assert weights == pytest.approx([8 * 16] * 6 + [16 * 16], rel=0.05)


@pytest.mark.slow
def test_eight_devices_ramp_as_one(tmp_path, text):
  flags = (*TEXT, *RAMPS, f"--fdl.DATA_PATH={text}", "--fdl.MAX_STEPS=7")
  one = [*flags, "--fdl.PERCORE_BATCH_SIZE=16", "--fdl.PERCORE_BATCH_SIZE_RAMP={6: 8}"]
  process = start(*one, f"--job_log_dir={tmp_path}/one")
  assert run(*flags, "--fdl.ICI_MESH_SHAPE=[2,2,2]", f"--job_log_dir={tmp_path}/eight") == 0
  assert finish(process)[0] == 0
  np.testing.assert_allclose(curve(tmp_path / "eight"), curve(tmp_path / "one"), rtol=1e-5)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--fdl.MAX_SEQ_LEN_RAMP={2: 5}"], "MAX_SEQ_LEN_RAMP: 5 tokens do not divide MAX_SEQ_LEN=16"),
    ([f"{BATCH}={{2: 0.3}}"], "before step 2 (PERCORE_BATCH_SIZE_RAMP): PERCORE_BATCH_SIZE=0.3"),
    ([f"{BATCH}={{2: 0.5}}"], "before step 2 (PERCORE_BATCH_SIZE_RAMP): a global batch of 4"),
    (
      ["--fdl.MAX_SEQ_LEN_RAMP={2: 8}", f"{BATCH}={{2: 0.0625}}"],
      "before step 2 (PERCORE_BATCH_SIZE_RAMP): PERCORE_BATCH_SIZE=0.0625",
    ),
  ],
)
def test_an_impossible_ramp_is_refused(tmp_path, text, capsys, flags, says):
  given = (f"--fdl.DATA_PATH={text}", f"--job_log_dir={tmp_path}/run", "--fdl.MAX_STEPS=8")
  assert run(*TEXT, *given, *flags) == 2
  err = capsys.readouterr().err
  assert err.startswith(f"paxlike: {says}") and err.count("\n") == 1, err
  assert not (tmp_path / "run").exists()
