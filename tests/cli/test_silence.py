# SPDX-License-Identifier: Apache-2.0
"""A program that stops says what there is, and how to go on."""

import json
import signal
import time

import pytest
from etils import epath
from helpers import run_headers
from helpers.program import TINY, finish, run, start

from paxlike.cli import hints, plot
from paxlike.telemetry import run_paths
from paxlike.telemetry.run_log import RunLog
from paxlike.telemetry.step_metrics import Reading


@pytest.mark.slow
def test_ctrl_c_says_what_was_saved_and_how_to_go_on(tmp_path):
  flags = (*TINY, "--fdl.MAX_STEPS=1000000", "--fdl.PERCORE_BATCH_SIZE=1", "--job_log_dir=run")
  process = start(*flags, cwd=tmp_path, signalled=True)
  metrics = tmp_path / "run" / "metrics.jsonl"
  while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
    time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  status, out, error = finish(process)
  assert status == 130, error
  assert "Ctrl-C again stops at once" in error
  step = json.loads((tmp_path / "run" / "status.json").read_text())["step"]
  last = out.strip().splitlines()[-1]
  assert last == (
    f"stopped by Ctrl-C. Checkpoint {step} is saved in run: the same command resumes from it."
  )


def test_what_is_saved_is_the_newest_whole_checkpoint(tmp_path):
  assert "No checkpoint was saved" in hints.saved(str(tmp_path))
  for name in ("checkpoint_00000010", "checkpoint_00000020", "checkpoint_00000030.partial"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert f"Checkpoint 20 is saved in {tmp_path}" in hints.saved(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_a_finished_run_says_so_and_what_to_raise(tmp_path, capsys, steps):
  flags = (*TINY, f"--job_log_dir={tmp_path / 'run'}", "--fdl.LR_COS_DECAY_END=2")
  assert run(*flags, "--fdl.MAX_STEPS=2") == 0
  assert "nothing to train" not in capsys.readouterr().out
  assert run(*flags, f"--fdl.MAX_STEPS={steps}") == 0
  out = capsys.readouterr().out
  assert "nothing to train" in out and "raise MAX_STEPS" in out
  if steps == 2:
    (hint,) = [word for word in out.split() if word.startswith("--fdl.MAX_STEPS=")]
    assert run(*flags, hint) == 0
    assert "completed step: 3" in capsys.readouterr().out


def test_a_folder_of_runs_is_plotted_as_its_runs(tmp_path, capsys):
  record = {"kind": "train", "step": 0, "updates": 1, "loss": 2.0}
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / "metrics.jsonl").touch()
  (tmp_path / "notes").mkdir()
  assert plot.run([str(tmp_path)]) == 0
  assert (tmp_path / "curves.png").exists()
  assert run_paths.within(str(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]
  capsys.readouterr()
  assert plot.run([str(tmp_path / "notes")]) == 2
  assert "is not the folder of a run" in capsys.readouterr().err


def test_margins_of_preferences_are_on_the_line(tmp_path, capsys):
  values = {"loss": 0.5, "learning_rate": 1e-3, "skipped": 0.0}
  values |= {"reward_margin": 1.25, "reward_accuracy": 0.75, "reward_chosen": 0.5}
  with RunLog(epath.Path(tmp_path)) as run_log:
    run_log.start(run_headers.made(), {}, step=0, num_steps=1)
    run_log.step(Reading(0, values, 1.0, 0.5), due=True)
  (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("completed")]
  assert line.endswith("reward_margin: 1.250, reward_accuracy: 0.750")
