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

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest
from helpers import warm_python
from helpers.sources import REPOSITORY
from helpers.teacher_forcing import assert_teacher_forcing, prompts

import paxlike
from examples import extensions, gated_llama
from paxlike import fiddlers, layers, main, registry
from paxlike.checkpoints.checkpoint import Checkpoint
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.config import building
from paxlike.convert import main as convert
from paxlike.convert import streaming
from paxlike.devices.mesh import MeshSpec
from paxlike.experiment import Experiment
from paxlike.inference import generate
from paxlike.layers.decoder import forward
from paxlike.layers.module import Definition
from paxlike.training import optimizers, train_state

pytestmark = pytest.mark.slow

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
GATED: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "LION_WARMUP"}
GATED |= {"CHECKPOINT_EVERY_N_STEPS": 1}


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
  made = paxlike.train("NanoGptChar", tmp_path / "run", DATA_PATH=str(text), **knobs)
  rates = [record["learning_rate"] for record in of(made, "train")]
  expected = [1e-3 * min(step / 2, math.sqrt(2 / step)) for step in range(1, 4)]
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
  # A process that has not imported the module does so, if it may.
  load = f"paxlike.load({str(made.folder)!r}, allow_modules=[{MODULE!r}], LR_COS_WARMUP=3)"
  script = tmp_path / "script.py"
  script.write_text(f"import paxlike; print({load}._graph.optimizer.learning_rate.warmup)")
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  said = subprocess.check_output([warm_python.program(), script], env=own, cwd=REPOSITORY)
  assert said == b"3\n"
  with pytest.raises(paxlike.UserError, match="LR_COS_DECAY_END has no effect"):
    paxlike.train("NanoGptChar", tmp_path / "a", DATA_PATH=str(text), LR_COS_DECAY_END=9, **knobs)


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
  """At the same weights it is linear in the factor of the entropy."""

  def first(factor: float) -> float:
    how = {**SMALL, "MAX_STEPS": 1, "CONFIDENCE_PENALTY": factor}
    return of(paxlike.train(extensions.TinySums, tmp_path / str(factor), **how), "train")[0]["loss"]

  none, half = first(0.0), first(0.5)
  assert none != half
  assert of(run, "train")[0]["loss"] == pytest.approx(0.8 * none + 0.2 * half, rel=1e-6)


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


class Passing(layers.Attention):
  """A variant that overrides nothing but the projection, which it passes on."""

  def project(self, y_BTNH, x_BTD, context):
    return super().project(y_BTNH, x_BTD, context)


def definition_of(
  kind: type, attention: type[Any] | None = None, *, scan: bool = False, **knobs
) -> Definition:
  model = kind(**{**GATED, **knobs}).model()
  fiddlers.stack(model, scan=scan)
  if attention is not None:
    for node in fiddlers.select(model, layers.Attention):
      fdl.update_callable(node, attention)
  return Definition(building.build(model))


def drawn(definition: Definition) -> dict[str, jax.Array]:
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  return train_state.init_params(definition, mesh, seed=Experiment.RANDOM_SEED)


def test_gated_attention_decodes_what_it_computes_in_training():
  definition = definition_of(gated_llama.GatedSums, INIT_STD=0.3)
  params, given = drawn(definition), prompts(5, 2)
  texts = generate.generate(definition, params, given, max_new_tokens=6, num_rows=2)
  assert_teacher_forcing(definition, params, given, texts)
  gates = [name for name in params if name.endswith("attention.gate.w")]
  open_gates = params | {name: 100.0 + 0 * params[name] for name in gates}
  tokens: Any = {"inputs": given[0][None]}
  gated, ungated = (forward(definition, p, tokens)[0] for p in (params, open_gates))
  assert len(gates) == 2
  assert not np.allclose(gated, ungated)


def test_attention_without_a_projection_of_its_own_stays_as_it_is():
  tokens: Any = {"inputs": prompts(7)[0][None]}
  logits = []
  for attention in (None, Passing):
    definition = definition_of(gated_llama.AveragedSums, attention)
    logits.append(np.asarray(forward(definition, drawn(definition), tokens)[0]))
  np.testing.assert_array_equal(*logits)


def test_muon_sees_the_matrices_of_all_layers():
  """Each is updated as optax updates a matrix alone; all other weights are updated by AdamW."""
  definition = definition_of(gated_llama.GatedSums, scan=True)
  weights, random = definition.weights, np.random.default_rng(0)
  params = {n: random.normal(size=w.shape).astype(np.float32) for n, w in weights.items()}
  grads = {n: random.normal(size=w.shape).astype(np.float32) for n, w in weights.items()}
  given: Any = {"learning_rate": optimizers.constant(peak=0.1), "weight_decay": 0.1}
  transform = gated_llama.muon(**given).transformation(definition)
  updates: Any = jax.jit(transform.update)(grads, transform.init(params), params)[0]
  plain = optax.contrib.muon(**given)

  @jax.jit
  def alone(w: jax.Array, g: jax.Array) -> jax.Array:
    updates: Any = plain.update([g], plain.init([w]), [w])[0]
    return updates[0]

  num_matrices = 0
  for name, spec in weights.items():
    sizes = [size for size, dim in zip(spec.shape, spec.dims, strict=True) if dim != "layer"]
    inputs = math.prod(spec.shape[spec.dims.index(dim)] for dim in spec.contracted)
    is_matrix = name.startswith("stack.") and name.endswith(".w")
    shape = (inputs, -1) if is_matrix else (-1,)
    count = math.prod(spec.shape) // math.prod(sizes)
    num_matrices += count * is_matrix
    w, g, update = (x[name].reshape(count, *shape) for x in (params, grads, updates))
    expected = np.stack([alone(*of_layer) for of_layer in zip(w, g, strict=True)])
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5)
  assert num_matrices == 2 * 8


def test_all_three_train_together(tmp_path):
  how: Any = GATED | {"MAX_STEPS": 3}
  run = paxlike.train(gated_llama.GatedSums, tmp_path / "run", **how)
  losses = [record["loss"] for record in of(run, "train")]
  assert losses[2] < losses[0]


@pytest.fixture(scope="module")
def average(tmp_path_factory) -> tuple[paxlike.Run, Any, Any]:
  """A run with averaged weights, its last weights, and their average by hand."""
  how = GATED | {"MAX_STEPS": 3, "CHECKPOINT_EVERY_N_STEPS": 1, "EMA_DECAY": 0.7}
  how |= {"ICI_MESH_SHAPE": [8, 1, 1], "SHARD_OPTIMIZER_OVER_DATA": True}
  how |= {"OPTIMIZER_ON_HOST": True, "USE_REPEATED_LAYER": True, "LR_COS_WARMUP": 0}
  run = paxlike.train(gated_llama.AveragedSums, tmp_path_factory.mktemp("average") / "run", **how)
  saved = Checkpoints(run.folder / "checkpoints", keep=None)
  definition = definition_of(gated_llama.AveragedSums, scan=True)
  mean = {name: np.asarray(w) for name, w in drawn(definition).items()}
  raw: Any = None
  for step in saved.steps():
    raw = {name: saved.at(step).read(f"params.{name}") for name in mean}
    mean = {name: 0.7 * mean[name] + 0.3 * raw[name] for name in mean}
  return run, raw, mean


def test_averaged_weights_are_loaded(average):
  run, raw, mean = average
  model = run.load()
  scanned = model._evaluator[1]
  assert scanned.keys() == mean.keys()
  for name, w in scanned.items():
    np.testing.assert_allclose(w, mean[name], rtol=1e-5, atol=1e-6)
  assert not np.allclose(raw["head.w"], mean["head.w"], atol=1e-3)


def test_averaged_weights_are_evaluated(average):
  run, raw, mean = average
  trainer, _ = run.load()._evaluator
  with jax.set_mesh(trainer.devices):
    by_hand, of_raw = (trainer.evaluators["sums"].run(w).values["log_pplx"] for w in (mean, raw))
  assert abs(by_hand - of_raw) > 1e-3
  (in_run,) = of(run, "eval")
  flags = ["", "--mode=eval", f"--job_log_dir={run.folder}"]
  assert main.main([*flags, f"--fdl_allow_modules={gated_llama.__name__},{MODULE}"]) == 0
  after = of(run, "eval")[-1]
  for found in (in_run, after, run.load().evaluate()["sums"]):
    assert found["log_pplx"] == pytest.approx(by_hand, rel=1e-5)


def test_averaged_weights_give_the_logits_and_are_exported(average, tmp_path):
  run, raw, mean = average
  model, tokens = run.load(), np.array([[1, 2, 3, 4]])
  definition = definition_of(gated_llama.AveragedSums, scan=True)
  batch: Any = {"inputs": tokens}
  by_hand, of_raw = (forward(definition, w, batch)[0] for w in (mean, raw))
  np.testing.assert_allclose(model.logits(tokens), by_hand, atol=1e-4)
  assert not np.allclose(by_hand, of_raw, atol=1e-2)
  model.export(tmp_path / "theirs")
  loaded = paxlike.load(tmp_path / "theirs")
  np.testing.assert_allclose(loaded.logits(tokens), by_hand, atol=1e-4)


def test_weights_without_an_optimizer_state_are_evaluated_as_they_are(average, tmp_path):
  """Such are those of a converted model."""
  run, raw, _ = average
  for name in ("config.json", "experiment.json"):
    (tmp_path / name).write_text((run.folder / name).read_text())
  weights = ((f"params.{name}", w) for name, w in raw.items())
  layout = Checkpoints(run.folder / "checkpoints", keep=None).at(3).layout()
  streaming.write(tmp_path / "checkpoints", weights, dtype=np.dtype("float32"), layout=layout)
  model = paxlike.load(tmp_path, allow_modules=[gated_llama.__name__, MODULE])
  np.testing.assert_array_equal(model._params["head.w"], raw["head.w"])
  model.export(tmp_path / "theirs")
  found = paxlike.load(tmp_path / "theirs")._params["head.w"]
  np.testing.assert_array_equal(found, raw["head.w"])


def test_only_what_is_evaluated_is_read(average, run, monkeypatch):
  wanted: list[str] = []
  restore = Checkpoint.restore

  def recorded(self, target, **how):
    wanted.extend(target)
    return restore(self, target, **how)

  monkeypatch.setattr(Checkpoint, "restore", recorded)
  averaged = average[0].load()
  assert {name.rpartition("weights.")[0] for name in wanted} == {"opt_state.1."}
  assert len(wanted) == len(averaged._params)
  wanted.clear()
  plain = run.load()
  assert sorted(wanted) == sorted(f"params.{name}" for name in plain._params)


@pytest.mark.slow
def test_the_example_runs(tmp_path):
  command = [warm_python.program(), "examples/extensions.py", str(tmp_path / "run")]
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  done = subprocess.run(command, env=own, cwd=REPOSITORY, capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
  assert paxlike.Run(tmp_path / "run").status == "finished"
