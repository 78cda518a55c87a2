# SPDX-License-Identifier: Apache-2.0
"""ON_SPIKE=rollback: a run goes on from its newest checkpoint, without the data of the spike."""

import json
from typing import Any

import pytest
from etils import epath
from helpers.program import TINY, curve, run
from helpers.spiky import Spiky

import paxlike
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.errors import UserError
from paxlike.training.rollback import Rollback, Rollbacks

pytestmark = pytest.mark.slow


def record(folder) -> list[tuple[int, int]]:
  found = json.loads((folder / "rollbacks.json").read_text())
  return [(one["checkpoint"], one["spike"]) for one in found]


def test_the_curve_is_that_without_the_data_from_checkpoint_to_spike(tmp_path, capsys):
  """Also if the run is killed at any step after the first rollback, and when none is saved yet."""
  paxlike.train(Spiky, tmp_path / "run", ON_SPIKE="rollback")
  assert record(tmp_path / "run") == [(16, 19), (24, 25)]  # Batch 29 is the one of step 25.
  assert (
    "from step 16, the data up to those of the spike at step 19 are skipped"
    in capsys.readouterr().out
  )
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
  assert "from step 24, the data up to those of the spike at step 25 are skipped" in out
  assert ": spike" not in out
  assert found == curve(tmp_path / "run")


def test_a_spike_before_the_first_checkpoint_leads_to_the_start(tmp_path):
  late: dict[str, Any] = {"ON_SPIKE": "rollback", "CHECKPOINT_EVERY_N_STEPS": 100, "MAX_STEPS": 24}
  paxlike.train(Spiky, tmp_path / "run", **late)
  assert record(tmp_path / "run")[0] == (0, 19)
  assert [updates for updates, _ in curve(tmp_path / "run")] == list(range(1, 25))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch, capsys):
  """It was whole when it was saved, and is damaged before the spike."""
  newest = tmp_path / "run/checkpoints/checkpoint_00000016"
  wait = Checkpoints.wait

  def damaging(self):
    wait(self)
    if newest.exists() and not list(newest.parent.glob("damaged_*")):
      for file in (newest / "state").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))

  monkeypatch.setattr(Checkpoints, "wait", damaging)
  paxlike.train(Spiky, tmp_path / "run", ON_SPIKE="rollback", MAX_STEPS=24)
  assert "checkpoint_00000016 is damaged" in capsys.readouterr().err
  assert record(tmp_path / "run")[0] == (8, 19)
  assert [updates for updates, _ in curve(tmp_path / "run")] == list(range(1, 25))
  assert len(list(newest.parent.glob("damaged_checkpoint_00000016_*"))) == 1 and newest.exists()


@pytest.mark.parametrize(
  "content",
  ["[{}]", "[1]", "{", '[{"checkpoint": 0, "spike": 3, "train_input": null}]'],
)
def test_a_record_that_cannot_be_read_is_one_line(tmp_path, content):
  (tmp_path / "rollbacks.json").write_text(content)
  with pytest.raises(UserError, match=r"rollbacks\.json cannot be read .*remove it to skip none"):
    Rollbacks(epath.Path(tmp_path), most=1)


def test_a_cooldown_keeps_what_it_took_over(tmp_path):
  """Its run may roll back to that checkpoint later; another run is another source."""

  def skipped(own: str, run: str, spike: int | None) -> int | None:
    """Returns what a cooldown skips that starts when its run has rolled back after `spike`."""
    folders = [epath.Path(tmp_path / name) for name in (own, run)]
    for folder in folders:
      folder.mkdir(exist_ok=True)
    records = [] if spike is None else [{"checkpoint": 8, "spike": spike, "train_input": {}}]
    (folders[1] / "rollbacks.json").write_text(json.dumps(records))
    rollbacks = Rollbacks(folders[0], most=1)
    rollbacks.inherit(folders[1], 8)
    (folders[0] / "rollbacks.json").write_text(rollbacks.text() or "")
    last = rollbacks.last(8)
    rollbacks.add(Rollback(checkpoint=8, spike=20, train_input={}))  # The first of its own.
    return None if last is None else last.spike

  assert [skipped("one", "stable", spike) for spike in (11, 13)] == [11, 11]
  assert [skipped("two", "stable", spike) for spike in (None, 13)] == [None, None]
  assert skipped("two", "other", 14) == 14


def test_a_folder_in_place_of_the_record_is_one_line(tmp_path):
  (tmp_path / "rollbacks.json").mkdir()
  with pytest.raises(UserError, match=r"rollbacks\.json cannot be read"):
    Rollbacks(epath.Path(tmp_path), most=1)


def test_a_rollback_without_checkpoints_is_refused(tmp_path, capsys):
  given = ("--fdl.ON_SPIKE=rollback", "--enable_checkpoint_saving=false")
  assert run(*TINY, *given, "--fdl.MAX_STEPS=2", f"--job_log_dir={tmp_path}/run") == 2
  assert "ON_SPIKE=rollback goes on from checkpoints" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_spikes_that_stay_end_the_run(tmp_path):
  often: dict[str, Any] = {"ON_SPIKE": "rollback", "MAX_SKIPPED_STEPS_IN_A_ROW": 1}
  with pytest.raises(paxlike.RunError, match="has rolled back to checkpoint 8 as often as"):
    paxlike.train(Spiky, tmp_path / "run", **often, SPIKE_DEVIATIONS=0.01)
