# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint stays, and a run that finds none better ends."""

import json
import math
import shutil
import signal
from typing import Any

import pytest
from helpers.program import TEXT, curve, run

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.errors import UserError
from paxlike.processes import phases
from paxlike.training.best_checkpoint import BestTracker, Criterion, step_of
from paxlike.training.evaluation import Result

# A tiny model learns at first, so that the highest loss is that of the first evaluation.
HIGHEST = ("--fdl.BEST_CHECKPOINT_METRIC=validation/log_pplx", "--fdl.BEST_CHECKPOINT_MODE=max")


def train(folder, text, *more):
  data = (*TEXT, f"--fdl.DATA_PATH={text}", "--fdl.NUM_LAYERS=1", "--fdl.EVAL_INTERVAL_STEPS=2")
  when = ("--fdl.CHECKPOINT_EVERY_N_STEPS=3", "--fdl.CHECKPOINT_MAX_TO_KEEP=1")
  return run(*data, *when, "--fdl.MAX_STEPS=20", f"--job_log_dir={folder}", *more)


def steps(folder):
  return Checkpoints(folder / "checkpoints", keep=None).steps()


@pytest.mark.slow
def test_the_best_stays_and_no_better_one_ends_the_run(tmp_path, text, capsys):
  patient = (*HIGHEST, "--fdl.EARLY_STOPPING_PATIENCE=3")
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert train(whole, text, *patient) == 0
  assert steps(whole) == [2, 8]
  assert json.loads((whole / "status.json").read_text())["state"] == "finished"
  losses = [loss for _, loss in curve(whole, "eval")]
  assert losses == sorted(losses, reverse=True) and len(losses) == 4

  assert train(parts, text, *patient, "--fdl.num_steps=5") == 0
  assert steps(parts) == [2, 5]
  assert train(parts, text, *patient) == 0
  # The first part ended with an evaluation of its own.
  assert curve(parts) == curve(whole)[: len(curve(parts))]
  assert steps(parts)[0] == 2

  assert train(whole, text, *patient) == 0
  assert len(curve(whole)) == 8
  capsys.readouterr()
  assert train(whole, text, *patient, "--mode=eval", "--step=best") == 0
  assert "evaluated validation after 2 updates" in capsys.readouterr().out
  assert train(whole, text, *HIGHEST) == 0
  assert steps(whole) == [2, 20]


@pytest.mark.slow
def test_an_evaluation_that_a_stop_prevented_is_made_up_for(tmp_path, text):
  patient = (*HIGHEST, "--fdl.EARLY_STOPPING_PATIENCE=3")
  assert train(tmp_path / "whole", text, *patient, "--fdl.num_steps=4") == 0
  shutil.copytree(tmp_path / "whole", tmp_path / "parts")
  told = tmp_path / "parts" / "best.json"
  whole = json.loads(told.read_text())
  assert [step for step, _ in whole["values"]] == [2, 4]
  told.write_text(json.dumps(whole | {"values": whole["values"][:1]}))
  for name in ("whole", "parts"):
    assert train(tmp_path / name, text, *patient) == 0
  assert told.read_text() == (tmp_path / "whole" / "best.json").read_text()
  assert steps(tmp_path / "parts") == steps(tmp_path / "whole")


@pytest.mark.slow
def test_a_metric_that_is_not_there_is_said_before_anything_is_made(tmp_path, text, capsys):
  for metric, says in (("validation/log_plx", "Did you mean"), ("lambada/acc", "no such metric")):
    flag = f"--fdl.BEST_CHECKPOINT_METRIC={metric}"
    assert train(tmp_path / "run", text, flag) == 2
    error = capsys.readouterr().err
    assert says in error and "validation/log_pplx" in error and error.count("\n") == 1
  assert train(tmp_path / "run", text, "--fdl.EARLY_STOPPING_PATIENCE=2") == 2
  assert "EARLY_STOPPING_PATIENCE has no effect" in capsys.readouterr().err
  assert train(tmp_path / "run", text, *HIGHEST, "--fdl.EARLY_STOPPING_PATIENCE=0") == 2
  assert "at least 1" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def found(value):
  return {"held": Result({"acc": value}, [])}


def test_what_is_no_number_is_never_the_best(tmp_path):
  for lowest in (False, True):
    best = BestTracker(tmp_path / str(lowest), Criterion(metric="held/acc", lowest=lowest))
    (tmp_path / str(lowest)).mkdir()
    assert not best.evaluated(found(math.nan), 1)
    assert best.step is None
    assert best.evaluated(found(0.5), 2)
    assert not best.evaluated(found(math.nan), 3)
    assert not best.evaluated(found(0.5), 4)
    assert best.step == 2


def test_a_run_without_checkpoints_says_of_none_that_it_is_the_best(tmp_path):
  best = BestTracker(tmp_path, Criterion(metric="held/acc", lowest=False, patience=1), saving=False)
  assert best.evaluated(found(0.5), 1) and not best.evaluated(found(0.1), 2)
  assert best.is_hopeless
  with pytest.raises(UserError, match="records no best checkpoint"):
    step_of(tmp_path)


def test_a_run_that_goes_on_from_before_forgets_what_came_after(tmp_path, capsys):
  criterion = Criterion(metric="held/acc", lowest=False, patience=2)
  best = BestTracker(tmp_path, criterion)
  for step, value in ((1, 0.1), (2, 0.3), (3, 0.9), (4, 0.2), (5, 0.2)):
    assert best.evaluated(found(value), step) == (step <= 3)
  assert best.is_hopeless
  again = BestTracker(tmp_path, criterion)
  assert again.is_hopeless and again.step == 3
  again.forget(after=2)
  assert again.step == 2 and not again.is_hopeless
  other = BestTracker(tmp_path, Criterion(metric="held/other", lowest=False))
  assert other.step is None
  values = ("[3]", "[[1e999, 1.0]]", "[[1, 1e999, 2]]", "3", "null", "[[[], {}]]", "[[1, []]]")
  told = [f'{{"metric": "held/acc", "lowest": false, "values": {one}}}' for one in values]
  for text in ("{", "[]", "3", *told):
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(UserError, match=r"best\.json is damaged"):
      step_of(tmp_path)
    assert BestTracker(tmp_path, criterion).step is None
    assert "best.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
  ("how", "in_evaluation", "stops_at"), [(HIGHEST, 1, 2), (HIGHEST, 2, 4), ((), 1, 2)]
)
def test_an_evaluation_that_a_stop_ends_is_made_by_the_next_run(
  tmp_path, text, monkeypatch, how, in_evaluation, stops_at
):
  given = (*how, "--fdl.MAX_STEPS=4")
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert train(whole, text, *given) == 0
  enter, seen = phases.enter, []

  def entering(kind: str, of: object = "", **how: Any):
    enter(kind, of, **how)
    seen.extend([of] if kind == "eval" and str(of).endswith("batch 0") else [])
    if len(seen) == 2 * in_evaluation - 1 and seen[-1] == of:  # It comes twice in each.
      signal.raise_signal(signal.SIGTERM)

  with monkeypatch.context() as patched:
    patched.setattr(phases, "enter", entering)
    assert train(parts, text, *given) == 143
  assert steps(parts)[-1] == stops_at
  assert json.loads((parts / "status.json").read_text())["state"] == "stopped"
  assert train(parts, text, *given) == 0
  assert json.loads((parts / "status.json").read_text())["state"] == "finished"
  assert curve(parts) == curve(whole) and curve(parts, "eval") == curve(whole, "eval")
  assert steps(parts) == steps(whole)
  if how:
    assert (parts / "best.json").read_text() == (whole / "best.json").read_text()
