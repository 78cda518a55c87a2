# SPDX-License-Identifier: Apache-2.0
"""Runs that train adapters: small checkpoints, an untouched base, the same on any mesh."""

import json
import pathlib
import re
import shutil

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.program import curve, run
from helpers.shrunk import shrunk
from helpers.steps import ONE, assert_same, one_device, steps
from helpers.tiny_model import batch

from paxlike import fiddlers, registry
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.decoder import forward
from paxlike.training import train_state

pytestmark = pytest.mark.slow
KNOBS = {
  "VOCAB_SIZE": 64,
  "MAX_SEQ_LEN": 16,
  "NUM_LAYERS": 2,
  "MODEL_DIMS": 64,
  "HIDDEN_DIMS": 256,
  "NUM_HEADS": 4,
  "FPROP_DTYPE": "float32",
  "PERCORE_BATCH_SIZE": 1,
  "LEARNING_RATE": 0.01,
  "LR_SCHEDULE": "constant",
  "SUMMARY_INTERVAL_STEPS": 1,
  "MAX_STEPS": 4,
}
MODEL = "SyntheticLLaMA7B"
LORA = {"USE_LORA": True, "LORA_RANK": 1, "LORA_TARGET_LAYERS": "query,value"}


def train(folder, *more, **knobs):
  knobs = KNOBS | knobs
  flags = [f"--fdl.{name}={value}" for name, value in knobs.items()]
  return run("--fdl_config=SyntheticLLaMA7B", f"--job_log_dir={folder}", *flags, *more)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  folder = tmp_path_factory.mktemp("base") / "run"
  assert train(folder) == 0
  return folder


def size_of(folder: pathlib.Path, step: int) -> int:
  files = (folder / "checkpoints" / f"checkpoint_{step:08d}").rglob("*")
  return sum(path.stat().st_size for path in files if path.is_file())


def saved(folder, step):
  with Checkpoints(folder / "checkpoints", keep=None) as checkpoints:
    return list(checkpoints.at(step)._described()[0]["tensors"])


def test_a_checkpoint_has_the_adapters_alone_and_resumes_bitwise(base, tmp_path, capsys):
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": base}
  assert train(tmp_path / "whole", **lora) == 0
  assert train(tmp_path / "parts", "--fdl.num_steps=2", **lora) == 0
  assert train(tmp_path / "parts", **LORA) == 0  # It knows its base without being told again.
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  names = [name for name in saved(tmp_path / "whole", 4) if not name.startswith(("step", "skip"))]
  assert names and all(".lora." in name or name.endswith("count") for name in names), names
  assert size_of(tmp_path / "whole", 4) < 0.05 * size_of(base, 4)
  told = json.loads((tmp_path / "parts" / "restored_from.json").read_text())
  assert (told["path"], told["step"]) == (str(base / "checkpoints"), 4)
  assert all(".lora." in name for name in told["initialized"])
  file = tmp_path / "parts" / "restored_from.json"
  file.write_text(file.read_text()[:40])
  capsys.readouterr()
  assert train(tmp_path / "parts", MAX_STEPS=5, **LORA) == 2
  assert f"{file}, the record of the run's initial weights, is damaged" in capsys.readouterr().err


def test_the_base_that_a_run_began_with_stays_its_base(base, tmp_path, capsys):
  """Although the base goes on training, or is given otherwise."""
  moving = tmp_path / "moving"
  assert train(moving) == 0
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": moving}
  assert train(tmp_path / "run", f"--fdl.num_steps={2}", **lora) == 0
  assert train(moving, MAX_STEPS=6) == 0
  assert train(tmp_path / "run", **lora) == 0
  assert train(tmp_path / "still", **(lora | {"CHECKPOINT_RESTORE_STEP": 4})) == 0
  assert curve(tmp_path / "run") == curve(tmp_path / "still")
  moving.rename(tmp_path / "gone")
  capsys.readouterr()
  assert train(tmp_path / "run", MAX_STEPS=5, **lora) == 2
  assert "no checkpoint in" in capsys.readouterr().err
  assert train(tmp_path / "run", MAX_STEPS=5, **LORA) == 2
  assert f"checkpoint 4 of {moving / 'checkpoints'}, from which" in capsys.readouterr().err
  elsewhere = {"CHECKPOINT_RESTORE_PATH": tmp_path / "gone", "CHECKPOINT_RESTORE_STEP": 4}
  assert train(tmp_path / "run", MAX_STEPS=5, **LORA, **elsewhere) == 0


def test_another_checkpoint_never_takes_the_place_of_the_base(base, tmp_path, capsys):
  moving = tmp_path / "moving"
  assert train(moving) == 0
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": moving}
  assert train(tmp_path / "run", "--fdl.num_steps=2", **lora) == 0
  assert train(moving, MAX_STEPS=6) == 0
  shutil.rmtree(moving / "checkpoints" / "checkpoint_00000004")
  capsys.readouterr()
  assert train(tmp_path / "run", **lora) == 2
  assert "checkpoint 4 of" in capsys.readouterr().err
  (tmp_path / "run" / "restored_from.json").unlink()
  assert train(tmp_path / "run", **lora) == 2
  assert "the record of its initial weights" in capsys.readouterr().err


def test_a_checkpoint_of_other_weights_is_not_the_base(base, tmp_path, capsys):
  own, other = tmp_path / "own", tmp_path / "other"
  shutil.copytree(base, own)
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": own}
  assert train(tmp_path / "run", "--fdl.num_steps=2", **lora) == 0
  own.rename(tmp_path / "moved")
  assert train(other, LEARNING_RATE=3e-3) == 0
  capsys.readouterr()
  elsewhere = {"CHECKPOINT_RESTORE_STEP": 4, "CHECKPOINT_RESTORE_PATH": other}
  assert train(tmp_path / "run", **LORA, **elsewhere) == 2
  assert f"{other} is not the one" in capsys.readouterr().err
  elsewhere["CHECKPOINT_RESTORE_PATH"] = tmp_path / "moved"
  assert train(tmp_path / "run", **LORA, **elsewhere) == 0


def test_a_start_that_failed_leaves_no_base_behind(tmp_path):
  (tmp_path / "restored_from.json").write_text('{"path": "elsewhere"}')
  assert train(tmp_path, **LORA) == 0
  assert not (tmp_path / "restored_from.json").exists()


@pytest.mark.parametrize(
  ("mesh", "more"),
  [
    ("[1,8,1]", {"USE_REPEATED_LAYER": False}),
    ("[2,2,2]", {"LORA_DROPOUT": 0.1, "LORA_TARGET_LAYERS": "all", "LORA_RANK": 2}),
  ],
)
def test_every_mesh_and_layout_trains_the_same_adapters(base, tmp_path, mesh, more):
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": base} | more
  assert train(tmp_path / "mesh", ICI_MESH_SHAPE=mesh, **lora) == 0
  assert train(tmp_path / "plain", ICI_MESH_SHAPE="[-1,1,1]", **lora) == 0
  found, expected = curve(tmp_path / "mesh"), curve(tmp_path / "plain")
  np.testing.assert_allclose([y for _, y in found], [y for _, y in expected], rtol=1e-4)
  assert expected[0][1] != expected[-1][1]


def test_a_base_in_few_bits_stays_the_same_base(base, tmp_path, capsys):
  """Scanned or not, on any mesh, stopped or not, in training and evaluation."""
  lora = LORA | {"CHECKPOINT_RESTORE_PATH": base, "LORA_RANK": 4}
  nf4 = lora | {"LORA_BASE_QUANTIZATION": "nf4"}
  off = {}
  for kind in ("int8", "nf4"):
    assert train(tmp_path / kind, **(lora | {"LORA_BASE_QUANTIZATION": kind})) == 0
    told = re.search(r"quantized weights .* are off by ([\d.]+)%", capsys.readouterr().out)
    off[kind] = told and float(told[1])
  assert 0 < off["int8"] < 2 < off["nf4"] < 15
  for num_steps in (2, 4):
    assert train(tmp_path / "parts", f"--fdl.num_steps={num_steps}", **nf4) == 0
  assert curve(tmp_path / "parts") == curve(tmp_path / "nf4")
  mesh = {"ICI_MESH_SHAPE": "[2,2,2]", "USE_REPEATED_LAYER": False}
  assert train(tmp_path / "mesh", **nf4, **mesh) == 0
  assert train(tmp_path / "plain", **lora) == 0
  curves = {
    name: [y for _, y in curve(tmp_path / name)] for name in ("int8", "nf4", "mesh", "plain")
  }
  np.testing.assert_allclose(curves["mesh"], curves["nf4"], rtol=1e-4)
  for kind, close in (("int8", 0.002), ("nf4", 0.02)):
    assert curves["plain"] != curves[kind]
    np.testing.assert_allclose(curves["plain"], curves[kind], rtol=close)
  assert saved(tmp_path / "nf4", 4) == saved(tmp_path / "plain", 4)


def test_experts_of_a_base_in_few_bits_are_the_same_on_any_mesh():
  knobs = {"USE_LORA": True, "LORA_BASE_QUANTIZATION": "nf4"}
  definition = shrunk("Mixtral8x7B", **knobs)
  assert "up" in {name.split(".")[-2] for name, w in definition.weights.items() if w.is_quantized}
  expected = one_device(definition, batch(8))
  spec = MeshSpec(ici={"fsdp": 2, "expert": 2, "tensor": 2})
  assert_same(steps(shrunk("Mixtral8x7B", scan=True, **knobs), spec, batch(8)), expected)


MESH = {"fsdp": 2, "tensor": 2, "data": 2}
EXPERTS = {"LORA_TARGET_LAYERS": "all,experts,embedding,head"}
EXPERT_MESH = {"fsdp": 2, "tensor": 2, "expert": 2}
TIED = {"LORA_TARGET_LAYERS": "query,embedding", "USE_TIED_EMBEDDING": True}


@pytest.mark.parametrize(
  ("model", "knobs", "ici"),
  [
    (MODEL, {"LORA_DORA": True, "LORA_BASE_QUANTIZATION": "nf4"}, MESH),
    (MODEL, TIED, MESH),
    ("Mixtral8x7B", EXPERTS, EXPERT_MESH),
    ("Mixtral8x7B", {**EXPERTS, "MOE_DISPATCH": "capacity"}, EXPERT_MESH),
  ],
)
def test_adapters_are_the_same_on_any_mesh_scanned_or_not(model, knobs, ici):
  knobs = knobs | {"USE_LORA": True, "LORA_RANK": 4, "LORA_ALPHA": 8.0, "LORA_RSLORA": True}
  expected = one_device(shrunk(model, **knobs), batch(8))
  assert_same(steps(shrunk(model, scan=True, **knobs), MeshSpec(ici=ici), batch(8)), expected)


@pytest.mark.parametrize(
  ("model", "knobs", "more"),
  [
    (MODEL, {"LORA_DORA": True}, {}),
    (MODEL, {"LORA_TARGET_LAYERS": "embedding"}, {"USE_TIED_EMBEDDING": True}),
    ("Mixtral8x7B", EXPERTS, {}),
    ("Mixtral8x7B", EXPERTS, {"MOE_DISPATCH": "capacity"}),
  ],
)
def test_new_adapters_are_the_base_bit_for_bit(model, knobs, more):
  plain, adapted = shrunk(model, **more), shrunk(model, **more, **knobs, USE_LORA=True)
  params = train_state.init_params(adapted, ONE.build(jax.devices()[:1]), seed=0)
  base = {name: w for name, w in params.items() if name in plain.weights}
  assert len(base) < len(params)
  data = {"inputs": batch(2)["inputs"]}
  logits = (
    jax.jit(forward, static_argnums=0)(*given, data)[0]
    for given in ((plain, base), (adapted, params))
  )
  np.testing.assert_array_equal(*logits)


def test_knobs_of_adapters_need_adapters(tmp_path, capsys):
  assert train(tmp_path / "run", LORA_RANK=4) == 2
  assert "LORA_RANK has no effect" in capsys.readouterr().err
  assert train(tmp_path / "run", USE_LORA=True, LORA_RSLORA=True) == 2
  assert "LORA_RSLORA=True scales by LORA_ALPHA / sqrt" in capsys.readouterr().err
  twice = {"LORA_DORA": True, "LORA_DROPOUT": 0.1, "QUANTIZATION": "fp8"}
  no_dropout = {"LORA_TARGET_LAYERS": "head", "LORA_DROPOUT": 0.1}
  no_magnitude = {"LORA_TARGET_LAYERS": "query,embedding", "LORA_DORA": True}
  for wrong, says in (
    (twice, "multiplies by the base weights twice"),
    (no_dropout, "LORA_DROPOUT: the adapter of head has no dropout"),
    (no_magnitude, "LORA_DORA: the adapter of embedding has no magnitude"),
  ):
    assert train(tmp_path / "run", USE_LORA=True, **wrong) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
  for targets, unknown in (("quary", "'quary'"), ("query,kye", "'kye'"), ("none", "'none'")):
    assert train(tmp_path / "run", USE_LORA=True, LORA_TARGET_LAYERS=targets) == 2
    err = capsys.readouterr().err
    assert "LORA_TARGET_LAYERS" in err and f"no linear map has the role {unknown};" in err
  assert not (tmp_path / "run").exists()


def test_what_is_no_adapter_stays_as_it_is():
  """Even what no optimizer trains, such as the biases of routers."""
  graph = registry.find("DeepSeekV3")().trainer()
  fiddlers.shrink(graph)
  assert any(spec.update for spec in fdl.build(graph).definition.weights.values())
  fiddlers.lora(graph)
  weights = fdl.build(graph).definition.weights
  assert {".lora." in name for name, spec in weights.items() if spec.changes} == {True}


@pytest.mark.parametrize(("targets", "trained"), [("all", 79_953_920), ("attention", 33_554_432)])
def test_adapters_of_llama_7b_are_as_many_as_published(targets, trained):
  experiment = registry.find("LLaMA7B")()
  for name, value in {"USE_LORA": True, "LORA_RANK": 32, "LORA_TARGET_LAYERS": targets}.items():
    experiment.set(name, str(value), source="test")
  definition = fdl.build(experiment.trainer()).definition
  assert definition.num_trained == trained
  assert definition.num_params == 6_738_415_616 + trained
