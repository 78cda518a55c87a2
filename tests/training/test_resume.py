# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped and resumed is the run that was never stopped."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from helpers.kill_and_resume import kill_and_resume
from helpers.program import TEXT, TINY, curve, finish, run, start

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.training.evaluation import Evaluator
from paxlike.training.optimizers import OPTIMIZERS


def flags(folder, steps, *more):
  return (*TINY, f"--job_log_dir={folder}", f"--fdl.MAX_STEPS={steps}", *more)


def on_text(folder, path, steps, *more):
  """A batch of 8 of 110 rows: the first epoch ends in step 14."""
  own = (f"--fdl.DATA_PATH={path}", f"--fdl.MAX_STEPS={steps}")
  return (*TEXT, *own, f"--job_log_dir={folder}", *more)


def final_state(folder, step):
  with Checkpoints(folder / "checkpoints", keep=None) as saved:
    files = saved.path(step)
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(files / "state")


@pytest.mark.slow
def test_resume_is_bitwise_over_an_epoch_boundary(tmp_path, text):
  assert run(*on_text(tmp_path / "whole", text, 18)) == 0
  for steps in (5, 13, 18):
    assert run(*on_text(tmp_path / "parts", text, 18, f"--fdl.num_steps={steps}")) == 0
  whole, parts = curve(tmp_path / "whole"), curve(tmp_path / "parts")
  assert [updates for updates, _ in whole] == list(range(1, 19))
  assert parts == whole
  expected, got = final_state(tmp_path / "whole", 18), final_state(tmp_path / "parts", 18)
  assert expected.keys() == got.keys()
  for name, value in expected.items():
    assert np.asarray(value).tobytes() == np.asarray(got[name]).tobytes(), name
  assert curve(tmp_path / "whole", "eval") == curve(tmp_path / "parts", "eval")[-1:]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [name for name, make in OPTIMIZERS.items() if make is None and name != "adamw"]
)
def test_each_optimizer_resumes_bitwise(tmp_path, name, capsys):
  """On eight devices, with its state sharded."""
  more = (f"--fdl.OPTIMIZER={name}", "--fdl.ICI_MESH_SHAPE=[2,2,2]")
  given = flags(tmp_path, 4, *more, "--fdl.CHECKPOINT_EVERY_N_STEPS=2")
  assert run(*given) == 0
  expected = final_state(tmp_path, 4)
  shutil.rmtree(tmp_path / "checkpoints" / "checkpoint_00000004")
  assert run(*given) == 0
  assert "resuming from checkpoint 2" in capsys.readouterr().out
  got = final_state(tmp_path, 4)
  assert expected.keys() == got.keys()
  for key, value in expected.items():
    assert np.asarray(value).tobytes() == np.asarray(got[key]).tobytes(), key


@pytest.mark.slow
@pytest.mark.parametrize(
  "change", ["--fdl.ICI_MESH_SHAPE=[2,2,2]", "--fdl.USE_REPEATED_LAYER=false"]
)
def test_a_run_goes_on_on_another_mesh_and_in_another_layout(tmp_path, text, change, capsys):
  assert run(*on_text(tmp_path / "whole", text, 6)) == 0
  assert run(*on_text(tmp_path / "parts", text, 6, "--fdl.num_steps=3")) == 0
  capsys.readouterr()
  assert run(*on_text(tmp_path / "parts", text, 6, change)) == 0
  out = capsys.readouterr().out
  assert "changed since the run began:" in out
  assert ("mesh.ici" if "MESH" in change else "stack.scan") in out
  losses = [np.array(curve(tmp_path / name)) for name in ("whole", "parts")]
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_stages_with_fewer_layers_than_others(tmp_path, text):
  """Three layers on two stages, resumed without stages: losses and metrics of layers."""
  more = ("--fdl.NUM_LAYERS=3", "--fdl.LOG_LAYERS_EVERY=1")
  stages = ("--fdl.ICI_MESH_SHAPE={pipeline: 2, data: 4}", "--fdl.NUM_MICROBATCHES=2")
  assert run(*on_text(tmp_path / "whole", text, 4, *more)) == 0
  assert run(*on_text(tmp_path / "parts", text, 4, *more, *stages, "--fdl.num_steps=2")) == 0
  assert run(*on_text(tmp_path / "parts", text, 4, *more)) == 0
  losses = [np.array(curve(tmp_path / name)) for name in ("whole", "parts")]
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
  whole, parts = (of_layers(tmp_path / name) for name in ("whole", "parts"))
  assert len(whole) == len(parts) == 4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), parts, whole)


def of_layers(folder):
  """The metrics of layers, of each step."""
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  return [line["layers"] for line in lines if line["kind"] == "layers"]


@pytest.mark.slow
def test_another_experiment_does_not_touch_the_run(tmp_path, capsys):
  assert run(*flags(tmp_path, 2)) == 0
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
  capsys.readouterr()
  assert run(*flags(tmp_path, 4), "--fdl.HIDDEN_DIMS=32") == 2
  err = capsys.readouterr().err
  assert "is of another experiment" in err
  assert "stack.layers.0.mlp.up.w: float32[16, 64] in the checkpoint" in err
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_other_data_are_refused(tmp_path, text, capsys):
  assert run(*on_text(tmp_path, text, 2)) == 0
  assert run(*on_text(tmp_path, text, 4, "--fdl.RANDOM_SEED=5")) == 2
  assert "other training data" in capsys.readouterr().err


@pytest.mark.slow
def test_gradients_that_stay_infinite_end_the_run_with_a_report(tmp_path, capsys):
  bad = ("--fdl.LEARNING_RATE=1000", "--fdl.CLIP_GRADIENT_NORM_TO_VALUE=none")
  status = run(*flags(tmp_path, 40), *bad, "--fdl.MAX_SKIPPED_STEPS_IN_A_ROW=3")
  assert status == 1
  err = capsys.readouterr().err
  assert "the last 3 steps" in err
  assert "not finite" in err
  assert "Traceback" not in err


@pytest.mark.slow
def test_a_stop_during_an_evaluation_loses_no_step(tmp_path, text, monkeypatch):
  evaluate = Evaluator.run

  def stopped(*arguments, **named):
    signal.raise_signal(signal.SIGTERM)
    return evaluate(*arguments, **named)

  monkeypatch.setattr(Evaluator, "run", stopped)
  every = ("--fdl.EVAL_INTERVAL_STEPS=2", "--fdl.CHECKPOINT_EVERY_N_STEPS=100")
  assert run(*on_text(tmp_path, text, 9, *every)) == 128 + signal.SIGTERM
  updates = [updates for updates, _ in curve(tmp_path)]
  assert 2 <= updates[-1] < 9
  assert Checkpoints(tmp_path / "checkpoints", keep=None).steps() == updates[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(tmp_path, number):
  process = start(*flags(tmp_path, 1_000_000), signalled=True)
  metrics = tmp_path / "metrics.jsonl"
  while process.poll() is None and not (metrics.exists() and metrics.read_text()):
    time.sleep(0.1)
  process.send_signal(number)
  status, _, err = finish(process)
  assert status == 128 + number, err
  steps = Checkpoints(tmp_path / "checkpoints", keep=None).steps()
  assert len(steps) == 1
  assert curve(tmp_path)[-1][0] == steps[0]
  assert '"state": "stopped"' in (tmp_path / "status.json").read_text()


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_spares_the_older_checkpoint(tmp_path, monkeypatch):
  # With a cache of compiled programs, which cannot be written either.
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  assert run(*flags(tmp_path, 2)) == 0

  more = "--fdl.CHECKPOINT_EVERY_N_STEPS=2"
  status, _, err = finish(start(*flags(tmp_path, 6), more, file_blocks=20))
  assert status == 2, err
  (line,) = err.splitlines()
  assert line.startswith("paxlike: ")
  assert str(tmp_path / "checkpoints") in line
  assert '"state": "failed"' in (tmp_path / "status.json").read_text()
  assert Checkpoints(tmp_path / "checkpoints", keep=None).steps() == [2]
  assert run(*flags(tmp_path, 4)) == 0


@pytest.mark.slow
def test_a_run_killed_at_random_moments_is_the_run_never_killed(tmp_path):
  assert kill_and_resume(tmp_path, kills=2, seed=0) == []
