# SPDX-License-Identifier: Apache-2.0
"""What examples/ adds to paxlike from outside works as what paxlike has itself."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.sources import REPOSITORY

import paxlike
from examples import extensions
from paxlike import main, registry
from paxlike.convert import main as convert

SMALL: dict[str, Any] = {
  "MAX_STEPS": 4,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 32,
  "NUM_HEADS": 2,
  "NUM_SUMS": 400,
}
SMALL |= {"PERCORE_BATCH_SIZE": 1, "SUMMARY_INTERVAL_STEPS": 1, "FPROP_DTYPE": "float32"}
SMALL |= {"CHECKPOINT_EVERY_N_STEPS": 2, "LION_WARMUP": 2, "LEARNING_RATE": 1e-3}
MODULE = extensions.__name__


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> paxlike.Run:
  """A run with all of them."""
  return paxlike.train(extensions.TinySums, tmp_path_factory.mktemp("sums") / "run", **SMALL)


def of(run, kind):
  return [record for record in run.records() if record["kind"] == kind]


def test_the_schedule_is_followed(run):
  rates = [record["learning_rate"] for record in of(run, "train")]
  expected = [1e-3 * min(step / 2, math.sqrt(2 / step)) for step in range(1, 5)]
  np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_schedule_has_a_name_in_every_experiment(tmp_path, text):
  knobs = {"LR_SCHEDULE": "inverse_root", "LR_COS_WARMUP": 2, "LEARNING_RATE": 1e-3}
  knobs |= {"MODEL_DIMS": 16, "MAX_SEQ_LEN": 16, "MAX_STEPS": 3, "SUMMARY_INTERVAL_STEPS": 1}
  made = paxlike.train("ShakespeareChar", tmp_path / "run", DATA_PATH=str(text), **knobs)
  rates = [record["learning_rate"] for record in of(made, "train")]
  expected = [1e-3 * min(step / 2, math.sqrt(2 / step)) for step in range(1, 4)]
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
  # A process that has not imported the module does so, if it may.
  load = f"paxlike.load({str(made.folder)!r}, allow_modules=[{MODULE!r}], LR_COS_WARMUP=3)"
  command = f"import paxlike; print({load}._graph.optimizer.learning_rate.warmup)"
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  said = subprocess.check_output([sys.executable, "-c", command], env=own, cwd=REPOSITORY)
  assert said == b"3\n"
  with pytest.raises(paxlike.UserError, match="LR_COS_DECAY_END has no effect"):
    paxlike.train(
      "ShakespeareChar", tmp_path / "a", DATA_PATH=str(text), LR_COS_DECAY_END=9, **knobs
    )


def test_the_optimizer_is_optax_s(run):
  """Lion moves each weight by the learning rate, up or down."""
  before, after = run.load(2), run.load(4)
  rates = [record["learning_rate"] for record in of(run, "train")][2:]
  moved = np.abs(np.asarray(after._params["head.w"] - before._params["head.w"]))
  assert moved.max() == pytest.approx(sum(rates), rel=0.01)


def test_the_metric_is_computed(run):
  (record,) = of(run, "eval")
  assert record["bits"] == pytest.approx(record["log_pplx"] / math.log(2), rel=1e-5)
  assert run.load().evaluate()["sums"]["bits"] == pytest.approx(record["bits"], rel=1e-4)


def test_the_objective_is_what_is_made_smaller(run, tmp_path):
  """At the same weights it is linear in the share of the other tokens."""

  def first(share: float) -> float:
    how = {**SMALL, "MAX_STEPS": 1, "LABEL_SMOOTHING": share}
    return of(paxlike.train(extensions.TinySums, tmp_path / str(share), **how), "train")[0]["loss"]

  none, all_others = first(0.0), first(1.0)
  assert none != all_others
  assert of(run, "train")[0]["loss"] == pytest.approx(0.9 * none + 0.1 * all_others, rel=1e-6)


def test_the_layer_has_its_weight(run):
  scales = [w for name, w in run.load()._params.items() if name.endswith("mlp.scale")]
  assert scales and all(np.ptp(np.asarray(scale)) > 0 for scale in scales)


def test_the_data_source_resumes(run, tmp_path):
  paxlike.train(extensions.TinySums, tmp_path / "run", **{**SMALL, "MAX_STEPS": 2})
  again = paxlike.train(extensions.TinySums, tmp_path / "run", **SMALL)
  assert [r["loss"] for r in of(again, "train")] == [r["loss"] for r in of(run, "train")]


def test_a_layer_that_hugging_face_lacks_is_not_exported(run, tmp_path):
  with pytest.raises(paxlike.UserError, match=r"mlp\.scale"):
    run.load().export(tmp_path / "theirs")
  assert not (tmp_path / "theirs").exists()


def test_the_tracker_has_the_records(run):
  rows = list(csv.reader((run.folder / "losses.csv").read_text().splitlines()))
  assert [[r["kind"], str(r["updates"]), str(r["loss"])] for r in run.records()] == rows


def test_the_command_takes_them_where_their_module_is_allowed(run, capsys):
  flags = ["--mode=decode", "--prompt=1+1=", "--max_new_tokens=2", f"--job_log_dir={run.folder}"]
  assert main.main(["", *flags]) == 2
  assert f"--fdl_allow_modules={MODULE}" in capsys.readouterr().err
  assert main.main(["", *flags, f"--fdl_allow_modules={MODULE}"]) == 0
  with pytest.raises(paxlike.UserError, match="Only if you trust it") as error:
    paxlike.load(run.folder)
  assert str(error.value).endswith(f'paxlike.load("{run.folder}", allow_modules=["{MODULE}"])')
  text = paxlike.load(run.folder, allow_modules=[MODULE]).generate("1+1=", max_new_tokens=2)
  (line,) = (run.folder / "decode_out" / "decode_00000004.jsonl").read_text().splitlines()
  assert text == json.loads(line)["text"]


def test_a_family_is_known_once_it_is_registered(tmp_path, text, monkeypatch):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(registry, "_REGISTRY", dict(registry.registered()))
  monkeypatch.delitem(sys.modules, "examples.family", raising=False)
  from examples import family

  small = {"DATA_PATH": str(text), "MAX_STEPS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32}
  run = paxlike.train("TinyParrot", tmp_path / "run", FPROP_DTYPE="float32", **small)
  model = run.load()
  model.export(tmp_path / "theirs")
  assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "parrot"
  tokens = [[1, 2, 3]]
  loaded = paxlike.load(tmp_path / "theirs")
  np.testing.assert_allclose(loaded.logits(tokens), model.logits(tokens), atol=1e-5)
  assert registry.find("TinyParrot") is family.TinyParrot


def test_a_family_is_imported_from_an_allowed_module(tmp_path, text, monkeypatch, capsys):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(registry, "_REGISTRY", dict(registry.registered()))
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.delitem(sys.modules, "examples.family", raising=False)
  monkeypatch.chdir(tmp_path)
  shutil.copy(REPOSITORY / "examples" / "family.py", "parrots.py")
  small = {"DATA_PATH": str(text), "MAX_STEPS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32}
  model = paxlike.train("parrots.TinyParrot", "run", FPROP_DTYPE="float32", **small).load()
  model.export("theirs")
  expected = model.logits([[1, 2, 3]])

  def forget():
    sys.modules.pop("parrots")
    for name in [name for name in registry._REGISTRY if name.startswith("parrots.")]:
      del registry._REGISTRY[name]

  command = ["--from=hf", "--path=theirs", "--to=ours"]
  forget()
  with pytest.raises(paxlike.UserError, match=r"model_type is 'parrot'; .* --fdl_allow_modules\.$"):
    paxlike.load("theirs")
  assert convert.run(command) == 2
  assert "--fdl_allow_modules." in capsys.readouterr().err
  assert convert.run([*command, "--fdl_allow_modules=parots"]) == 2
  assert "--fdl_allow_modules=parots: no module parots, neither" in capsys.readouterr().err
  assert convert.run([*command, "--fdl_allow_modules=parrots"]) == 0
  forget()
  for folder in ("ours", "theirs"):
    loaded = paxlike.load(folder, allow_modules=["parrots"])
    np.testing.assert_allclose(loaded.logits([[1, 2, 3]]), expected, atol=1e-5)
  (first,) = (tmp_path / "cache" / "converted").iterdir()
  with open("parrots.py", "a") as file:
    file.write("# The mapping was changed.\n")
  assert paxlike.load("theirs", allow_modules=["parrots"]).folder.name != first.name
  sys.modules.pop("parrots")


@pytest.mark.slow
def test_the_example_runs(tmp_path):
  command = [sys.executable, "examples/extensions.py", str(tmp_path / "run")]
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  done = subprocess.run(command, env=own, cwd=REPOSITORY, capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
  assert paxlike.Run(tmp_path / "run").status == "finished"
