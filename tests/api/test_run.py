# SPDX-License-Identifier: Apache-2.0
"""`paxlike.train` does what the command does, and `Run` is what the folder holds."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers.sources import REPOSITORY

import paxlike
from paxlike import main
from paxlike.api import run
from paxlike.experiment import Experiment

pytestmark = pytest.mark.slow


def files(folder) -> set[str]:
  """The names of all files of a run; those of TensorBoard and of Orbax end in what is drawn."""
  found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
  return {str(path) for path in found if path.parts[0] in names_of(folder)}


def names_of(folder) -> set[str]:
  return {path.name for path in folder.iterdir() if path.name not in ("summaries", "checkpoints")}


def test_it_writes_what_the_command_writes(tmp_path, text):
  knobs = {"DATA_PATH": str(text), "MAX_STEPS": 2, "NUM_LAYERS": 1, "MODEL_DIMS": 16}
  knobs |= {"HIDDEN_DIMS": 32, "NUM_HEADS": 2, "DIMS_PER_HEAD": 8, "VOCAB_SIZE": 257}
  knobs |= {"MAX_SEQ_LEN": 16, "PERCORE_BATCH_SIZE": 1.0, "SUMMARY_INTERVAL_STEPS": 1}
  ours = paxlike.train("Text126M", tmp_path / "python", **knobs)
  flags = [f"--fdl.{name}={value}" for name, value in knobs.items()]
  theirs = tmp_path / "command"
  assert main.main(["", "--fdl_config=Text126M", f"--job_log_dir={theirs}", *flags]) == 0
  assert files(tmp_path / "python") == files(theirs)
  for name in ("config.json", "experiment.json"):
    assert (tmp_path / "python" / name).read_text() == (theirs / name).read_text()
  (found,) = [record for record in ours.records() if record["kind"] == "eval"]
  more = paxlike.load(theirs, TRAIN_SHARE=0.5, ICI_MESH_SHAPE=(1, 1, 8)).evaluate()
  assert more["validation"]["num_examples"] > 3 * found["num_examples"]
  losses = [record["loss"] for record in ours.records()]
  assert losses == [record["loss"] for record in paxlike.Run(theirs).records()]
  assert len(losses) == 3


def test_a_run_is_what_its_folder_holds(trained):
  assert trained.status == "finished"
  assert trained.steps == [2, 4]
  assert [(r["kind"], r["updates"]) for r in trained.records()] == [
    *[("train", 1), ("train", 2), ("eval", 2)],
    *[("train", 3), ("train", 4), ("eval", 4)],
  ]
  assert "finished" in repr(paxlike.Run(trained.folder))


def test_metrics_are_a_table_where_pandas_is(trained, monkeypatch):
  records = trained.records()
  nested = {"kind": "layers", "updates": 4, "layers": {}}
  monkeypatch.setattr(run.Run, "records", lambda self: [*records, nested])
  table = trained.metrics()
  assert "layers" not in table
  assert list(table[table.kind == "train"].updates) == [1, 2, 3, 4]
  find = importlib.util.find_spec
  monkeypatch.setattr(run.importlib.util, "find_spec", lambda n: None if n == "pandas" else find(n))
  assert trained.metrics() == records


def test_the_same_call_goes_on_with_the_run(tiny, tmp_path, text, capsys):
  experiment = tiny(DATA_PATH=str(text), LR_COS_DECAY_END=4)
  paxlike.train(experiment, tmp_path / "run", MAX_STEPS=2)
  assert experiment.settings()["DATA_PATH"].value == str(text)
  assert "MAX_STEPS" not in experiment.settings()
  again = paxlike.train(experiment, tmp_path / "run")
  assert "resuming from checkpoint 2" in capsys.readouterr().out
  whole = paxlike.train(experiment, tmp_path / "whole")
  assert [r["loss"] for r in again.records()] == [r["loss"] for r in whole.records()]


JOB = {"COORDINATOR_ADDRESS": "localhost:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}


class Broken(Experiment):
  """Its model cannot be made."""

  def model(self):
    return {}["none"]


@pytest.mark.parametrize(
  ("experiment", "knobs", "says"),
  [
    ("Text126MM", {}, "Did you mean Text126M?"),
    ("Text126M", {"max_steps": 2}, "no knob max_steps in Text126M. Did you mean MAX_STEPS?"),
    ("Text126M", {"MAX_STEPS": 2.5}, "MAX_STEPS=2.5: "),
    ("Text126M", {}, "DATA_PATH"),
    ("Synthetic126M", {"LORA_RANK": 3}, "LORA_RANK has no effect .* USE_LORA=True would"),
    (int, {}, "expected an experiment, its class or its name, got <class 'int'>"),
    (Broken, {"MAX_STEPS": 1}, r"test_run.py, line \d+, in model: KeyError: 'none'"),
  ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(experiment, knobs, says, tmp_path):
  with pytest.raises(paxlike.UserError, match=says) as caught:
    paxlike.train(experiment, tmp_path / "run", **knobs)
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("number", "raised", "says"),
  [
    (signal.SIGINT, KeyboardInterrupt, "the same call resumes"),
    (signal.SIGTERM, SystemExit, str(128 + signal.SIGTERM)),
  ],
)
def test_signals_save_and_end_the_call(number, raised, says, tiny, tmp_path, text):
  def interrupt():
    while not (tmp_path / "run" / "metrics.jsonl").exists():
      time.sleep(0.01)
    os.kill(os.getpid(), number)

  threading.Thread(target=interrupt, daemon=True).start()
  with pytest.raises(raised, match=says):
    paxlike.train(tiny, tmp_path / "run", DATA_PATH=str(text), MAX_STEPS=100_000)
  stopped = paxlike.Run(tmp_path / "run")
  assert stopped.status == "stopped" and stopped.steps


def test_it_trains_in_any_thread(tiny, tmp_path, text):
  done = []
  given = {"DATA_PATH": str(text), "MAX_STEPS": 1}
  thread = threading.Thread(
    target=lambda: done.append(paxlike.train(tiny, tmp_path / "run", **given))
  )
  thread.start()
  thread.join()
  assert [one.status for one in done] == ["finished"]


def test_a_run_whose_process_is_gone_is_lost(tmp_path):
  assert paxlike.Run(tmp_path).status is None
  now = {"state": "running", "step": 1, "host": "elsewhere", "pid": 1}
  (tmp_path / "status.json").write_text(json.dumps(now))
  assert paxlike.Run(tmp_path).status == "lost"
  with pytest.raises(paxlike.UserError, match="no such folder"):
    paxlike.Run(tmp_path / "none")


def test_other_processes_are_joined_before_jax_starts(tiny, tmp_path, text, monkeypatch):
  for name, value in JOB.items():
    monkeypatch.setenv(f"JAX_{name}", value)
  with pytest.raises(paxlike.UserError, match="JAX has started in this one alone: call paxlike"):
    paxlike.train(tiny, tmp_path / "run", DATA_PATH=str(text))


OF_TWO = """
import sys
import paxlike

class Fails(paxlike.Callback):
  def on_step(self, step, metrics):
    raise KeyError("mine")

callbacks = [Fails()] if sys.argv[2:] else []
knobs = {"VOCAB_SIZE": 64, "MAX_SEQ_LEN": 16, "MAX_STEPS": 2, "FPROP_DTYPE": "float32"}
run = paxlike.train("Gpt3_52k", sys.argv[1], callbacks=callbacks, **knobs)
print(run.load())
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_may_be_several_processes(fails, tmp_path):
  """As in the command, they begin and end together."""
  (tmp_path / "script.py").write_text(OF_TWO)
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  command = [sys.executable, "script.py", "run", *(["fails"] if fails else [])]
  own = os.environ | {f"JAX_{name}": value for name, value in JOB.items()}
  own |= {"PYTHONPATH": str(REPOSITORY), "JAX_COORDINATOR_ADDRESS": address}
  began = time.monotonic()
  processes = [
    subprocess.Popen(
      command,
      env=own | {"JAX_PROCESS_ID": str(index)},
      cwd=tmp_path,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in range(2)
  ]
  said = [process.communicate(timeout=240)[0] for process in processes]
  assert [process.returncode for process in processes] == ([2, 1] if fails else [0, 0]), said
  for text in said:
    wanted = (
      "script.py, line 7, in on_step: KeyError: 'mine'"
      if fails
      else "checkpoint 2: 4,592 parameters"
    )
    assert wanted in text
  assert time.monotonic() - began < 50  # JAX would wait for a minute.
