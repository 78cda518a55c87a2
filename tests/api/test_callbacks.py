# SPDX-License-Identifier: Apache-2.0
"""Callbacks and trackers: what they are given, when, and what happens where one fails."""

import gc
import json
import sys
import types

import jax
import pytest

import paxlike
from paxlike import main
from paxlike.telemetry.console import Console

pytestmark = pytest.mark.slow


class Tracker(paxlike.Callback):
  """Keeps all that it is given."""

  def __init__(self):
    self.calls, self.records = [], []

  def on_start(self, step, folder):
    assert (folder / "config.json").exists()
    self.calls.append(("start", step))

  def on_step(self, step, metrics):
    assert {"loss", "learning_rate", "grad_norm"} <= metrics.keys()
    self.calls.append(("step", step))

  def on_eval(self, step, name, metrics):
    assert name == "validation" and "log_pplx" in metrics
    self.calls.append(("eval", step))

  def on_save(self, step, folder):
    assert folder.name == f"checkpoint_{step:08d}" and (folder / "metadata").exists()
    self.calls.append(("save", step))

  def on_record(self, record):
    self.records.append(record)

  def on_end(self, status):
    self.calls.append(("end", status))


def of(tracker, kind):
  return [value for name, value in tracker.calls if name == kind]


def test_a_tracker_is_given_all_that_the_run_records(tiny, tmp_path, text):
  tracker = Tracker()
  run = paxlike.train(tiny, tmp_path / "run", DATA_PATH=str(text), callbacks=[tracker])
  assert tracker.records == run.records()
  assert tracker.calls[0] == ("start", 0) and tracker.calls[-1] == ("end", "finished")
  assert of(tracker, "step") == [1, 2, 3, 4]
  assert of(tracker, "eval") == of(tracker, "save") == [2, 4]
  assert tracker.calls.index(("save", 2)) > tracker.calls.index(("step", 2))


class Watched(Tracker):
  """Fails at a step."""

  def on_step(self, step, metrics):
    super().on_step(step, metrics)
    if step == 3:
      raise ZeroDivisionError("no third step")


def test_a_callback_that_fails_ends_a_run_that_can_be_resumed(tiny, tmp_path, text):
  given = {"DATA_PATH": str(text), "LR_COS_DECAY_END": 4}
  first, second = Watched(), Tracker()
  with pytest.raises(paxlike.UserError) as caught:
    paxlike.train(tiny, tmp_path / "run", callbacks=[first], **given)
  assert str(caught.value).startswith(f"{__file__}, line ")
  assert "in on_step: ZeroDivisionError: no third step (in Watched.on_step)" in str(caught.value)
  assert isinstance(caught.value.__cause__, ZeroDivisionError)
  assert paxlike.Run(tmp_path / "run").status == "failed"
  assert first.calls[-1] == ("end", "failed")
  run = paxlike.train(tiny, tmp_path / "run", callbacks=[second], **given)
  assert second.calls[0] == ("start", 2) and of(second, "step") == [3, 4]
  assert [r["updates"] for r in run.records() if r["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
  ("callbacks", "says"),
  [
    ([Tracker], r"has <class .*: expected a paxlike\.Callback\. Write Tracker\(\), not Tracker"),
    (Tracker(), "expected a list of paxlike"),
    (["wandb"], "callbacks has 'wandb': expected a paxlike"),
  ],
)
def test_what_is_no_callback_is_refused(tiny, tmp_path, text, callbacks, says):
  with pytest.raises(paxlike.UserError, match=says):
    paxlike.train(tiny, tmp_path / "run", DATA_PATH=str(text), callbacks=callbacks)
  assert not (tmp_path / "run").exists()


OF_USER = """
import json, paxlike
from paxlike.experiments import datasets
from paxlike.experiments.gpt import Gpt3_52k

class Log(paxlike.Callback):
  def __init__(self, name):
    self.name = name

  def on_record(self, record):
    with open(self.name, "a") as file:
      file.write(json.dumps(record) + "\\\\n")

class Mine(Gpt3_52k):
  LOG_NAME: str = "none.jsonl"  #: Where the log goes.
  VOCAB_SIZE = 64
  MAX_SEQ_LEN = 16
  MAX_STEPS = 2
  SUMMARY_INTERVAL_STEPS = 1
  FPROP_DTYPE = "float32"

  def callbacks(self):
    return [Log(self.LOG_NAME)]
""".replace("\\\\", "\\")


def test_the_command_calls_those_of_the_experiment(tmp_path, monkeypatch):
  (tmp_path / "logged_experiment.py").write_text(OF_USER)
  monkeypatch.syspath_prepend(tmp_path)
  log = tmp_path / "log.jsonl"
  flags = ("--fdl_config=logged_experiment.Mine", f"--fdl.LOG_NAME={log}")
  assert main.main(["", *flags, f"--job_log_dir={tmp_path / 'run'}"]) == 0
  told = [json.loads(line) for line in log.read_text().splitlines()]
  assert told == paxlike.Run(tmp_path / "run").records()
  assert "Log" not in (tmp_path / "run" / "config.json").read_text()


@pytest.fixture
def notebook(monkeypatch):
  """This process is a notebook's kernel, as far as can be seen."""
  shell = types.SimpleNamespace(kernel=object())
  monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
  monkeypatch.setattr("paxlike.telemetry.notebook.callbacks", list)  # Nothing is drawn.
  monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))


def shown(output: str) -> list[str]:
  """The lines that a notebook shows: after "\\r" it writes over the line from its beginning."""
  lines = []
  for line in output.split("\n"):
    seen = ""
    for part in line.split("\r"):
      seen = part + seen[len(part) :]
    lines.append(seen.rstrip())
  return lines


def test_a_notebook_has_a_bar_under_the_lines(notebook, capsys):
  console = Console()
  console.progress(1, 4, "loss 1.0")
  console.line("a line")
  out, err = capsys.readouterr()
  assert shown(out) == ["a line", "[######..................] 1/4  loss 1.0"] and err == ""
  console.close()
  assert shown(out + capsys.readouterr().out) == ["a line", ""]


def test_the_process_of_a_notebook_is_not_ended_by_a_stall(
  notebook, tiny, tmp_path, text, monkeypatch
):
  from paxlike.training import trainer

  seen = []
  train = trainer.Trainer.train

  def noting(self, *given, **more):
    seen.append(self.stall_timeout)
    return train(self, *given, **more)

  monkeypatch.setattr(trainer.Trainer, "train", noting)
  paxlike.train(tiny, tmp_path / "run", DATA_PATH=str(text), MAX_STEPS=1)
  assert seen == [0]


class LiveArrays(paxlike.Callback):
  """Notes how many arrays, and bytes of them, there are after each step."""

  def __init__(self):
    self.seen = []

  def on_step(self, step, metrics):
    self.seen.append(live_arrays())


def live_arrays() -> tuple[int, int]:
  arrays = jax.live_arrays()
  return len(arrays), sum(array.nbytes for array in arrays)


def test_no_array_of_a_run_waits_for_the_garbage_collector(tiny, tmp_path, text):
  """The collector rarely runs: a state that only a cycle holds would stay in memory."""
  gc.collect()
  before, live = live_arrays(), LiveArrays()
  gc.disable()
  try:
    for steps in (4, 8):
      given = {"DATA_PATH": str(text), "MAX_STEPS": steps, "LR_COS_DECAY_END": 8}
      paxlike.train(tiny, tmp_path / "run", callbacks=[live], **given)
      assert not gc.isenabled()
      assert live_arrays() <= before
  finally:
    gc.enable()
  assert len(live.seen) == 8
  # While a state is saved there are copies of it. What stays after evaluations, saves and a restart
  # would be there at each later step.
  assert before < min(live.seen[4:]) <= min(live.seen[:4])
