# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from another run's checkpoint, with a rate that decays (DECAY_FROM)."""

import json

import pytest
from helpers.program import TEXT, curve, run

from paxlike.checkpoints.branch import Branch
from paxlike.errors import UserError

# So that the other run's checkpoint, which is evaluated first, is the best.
HIGHEST = ("--fdl.BEST_CHECKPOINT_METRIC=validation/log_pplx", "--fdl.BEST_CHECKPOINT_MODE=max")
HIGHEST += ("--fdl.EVAL_INTERVAL_STEPS=2", "--fdl.CHECKPOINT_EVERY_N_STEPS=2")
STABLE = ("--fdl.LR_SCHEDULE=wsd", "--fdl.LR_WARMUP=2", "--fdl.LR_WSD_DECAY=0")


def rates(folder) -> dict[int, float]:
  records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  return {r["updates"]: r["learning_rate"] for r in records if r["kind"] == "train"}


@pytest.mark.slow
def test_three_cooldowns_begin_where_a_stable_run_was(tmp_path, text):
  own = tuple(flag for flag in TEXT if "LR_COS" not in flag)
  flags = (*own, f"--fdl.DATA_PATH={text}", *STABLE, "--fdl.ICI_MESH_SHAPE=[2,2,2]")
  saved = ("--fdl.CHECKPOINT_EVERY_N_STEPS=2", "--fdl.CHECKPOINT_MAX_TO_KEEP=9")
  stable = tmp_path / "stable"
  assert run(*flags, *saved, "--fdl.MAX_STEPS=8", f"--job_log_dir={stable}") == 0
  assert list(rates(stable).values())[2:] == pytest.approx([1e-2] * 6)
  whole = dict(curve(stable))
  for start in (2, 4, 6):
    folder = tmp_path / f"cooldown_{start}"
    source = f"--fdl.DECAY_FROM={stable}/checkpoints/checkpoint_{start:08d}"
    more = (source, *HIGHEST, f"--fdl.MAX_STEPS={start + 4}", f"--job_log_dir={folder}")
    for steps in (start + 2, start + 4) if start == 4 else (start + 4,):  # One is stopped once.
      assert run(*flags, *more, f"--fdl.num_steps={steps}") == 0
    best = json.loads((folder / "best.json").read_text())["values"][0][0]
    assert best == start and (folder / "checkpoints" / f"checkpoint_{start:08d}").exists()
    found = dict(curve(folder))
    assert list(found) == list(range(start + 1, start + 5))
    assert found[start + 1] == whole[start + 1]  # The same weights, and the next batch.
    if start < 6:  # Then the weights differ.
      assert found[start + 3] != whole[start + 3]
    expected = [1e-2 * (1 - (n / 4) ** 0.5) for n in range(4)]
    assert list(rates(folder).values()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--fdl.DECAY_FROM=x/checkpoints"], "DECAY_FROM=x/checkpoints is not a checkpoint, such as"),
    (["--fdl.DECAY_FROM=x/checkpoint_00000009"], "DECAY_FROM=x/checkpoint_00000009: its step is"),
    (
      ["--fdl.DECAY_FROM=x/checkpoint_00000003"],
      "DECAY_FROM=x/checkpoint_00000003: no checkpoint 3",
    ),
    (["--fdl.DECAY_FROM=x/checkpoint_00000003", "--fdl.LR_SCHEDULE=linear"], "DECAY_FROM is only"),
  ],
)
def test_a_branch_from_nothing_is_refused(tmp_path, text, capsys, flags, says):
  own = tuple(flag for flag in TEXT if "LR_COS" not in flag)
  given = (f"--fdl.DATA_PATH={text}", f"--job_log_dir={tmp_path}/run", "--fdl.MAX_STEPS=8")
  assert run(*own, *given, *STABLE[:2], *flags) == 2
  err = capsys.readouterr().err
  assert err.startswith(f"paxlike: {says}") and err.count("\n") == 1, err


def test_a_record_of_the_other_run_that_cannot_be_read_is_one_line(tmp_path):
  (tmp_path / "restored_from.json").write_bytes(b"\xff")
  with pytest.raises(UserError, match=r"restored_from\.json cannot be read"):
    Branch(path=str(tmp_path / "checkpoints/checkpoint_00000002")).provenance()


@pytest.mark.slow
def test_a_branch_has_the_frozen_weights_of_its_run(tmp_path, text):
  """With LoRA, checkpoints have the adapters alone."""
  own = tuple(flag for flag in TEXT if "LR_COS" not in flag)
  flags = (*own, f"--fdl.DATA_PATH={text}", *STABLE)
  base, stable, branch = (tmp_path / name for name in ("base", "stable", "branch"))
  assert run(*flags, "--fdl.MAX_STEPS=3", f"--job_log_dir={base}") == 0
  lora = (*flags, "--fdl.USE_LORA=True", f"--fdl.CHECKPOINT_RESTORE_PATH={base}")
  saved = ("--fdl.CHECKPOINT_EVERY_N_STEPS=2", "--fdl.MAX_STEPS=4")
  assert run(*lora, *saved, f"--job_log_dir={stable}") == 0
  source = f"--fdl.DECAY_FROM={stable}/checkpoints/checkpoint_00000002"
  for steps in (3, 4):
    more = (source, "--fdl.MAX_STEPS=4", f"--fdl.num_steps={steps}")
    assert run(*lora, *more, f"--job_log_dir={branch}") == 0
  assert dict(curve(branch))[3] == dict(curve(stable))[3]
