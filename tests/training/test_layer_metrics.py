# SPDX-License-Identifier: Apache-2.0
"""Metrics of single layers: against NumPy and autodiff, and alike on any mesh and in any layout."""

import functools
import json
import math
import re
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import TINY, run
from helpers.shrunk import shrunk
from helpers.steps import by_layer, first_state
from helpers.tiny_model import adamw, batch, tiny

import paxlike
from paxlike import registry
from paxlike.config import building
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import Pipeline
from paxlike.layers.decoder import forward
from paxlike.layers.stack import layout_of
from paxlike.training import layer_metrics
from paxlike.training.train_step import make_train_step


def logged(definition, mix, data, *, num_microbatches=1) -> tuple[Any, Any, layer_metrics.Table]:
  """Returns the states before and after the first step, and the step's table."""
  built = MeshSpec(ici=mix).build(jax.devices()[: math.prod(mix.values())])
  optimizer = adamw()
  before = first_state(definition, optimizer, built)
  make = functools.partial(make_train_step, definition, optimizer, seed=1, log_layers=True)
  placed = {
    name: jax.device_put(x, mesh.sharding(built, ("batch", "time"), x.shape))
    for name, x in data.items()
  }
  with jax.set_mesh(built):
    after, _, metrics = jax.jit(make(num_microbatches=num_microbatches))(before, placed)
  return before, after, layer_metrics.table(definition, jax.device_get(metrics))


@functools.cache
def one_device(num_microbatches: int = 1) -> Any:
  return logged(tiny(), {"data": 1}, batch(packed=True), num_microbatches=num_microbatches)


def assert_same(got: layer_metrics.Table, expected: layer_metrics.Table):
  assert {name: set(groups) for name, groups in got.items()} == {
    name: set(groups) for name, groups in expected.items()
  }
  for name, groups in expected.items():
    for group, values in groups.items():
      pairs = (np.array(x, float) for x in (got[name][group], values))  # None is NaN.
      np.testing.assert_allclose(*pairs, rtol=2e-4, atol=2e-6, err_msg=f"{name} {group}")


def norms(definition, params) -> dict[str, list[float | None]]:
  """The norm of each module's weights, of layers 0 and 1 or of the model."""
  squares: dict[str, dict[int, float]] = {}
  for (template, layer), value in by_layer(definition, params).items():
    group = template.removeprefix("stack.{}.") if "{}" in template else f"model.{template}"
    layers = squares.setdefault(group.rpartition(".")[0], {})
    layers[layer] = layers.get(layer, 0) + float(np.square(np.float64(value)).sum())
  return {
    group: [math.sqrt(layers[i]) for i in sorted(layers)] for group, layers in squares.items()
  }


@pytest.mark.slow
def test_norms_are_those_of_autodiff():
  before, after, table = one_device()
  definition, data = tiny(), batch(packed=True)

  def loss(params):
    logs = jax.nn.log_softmax(forward(definition, params, data)[0])
    picked = jnp.take_along_axis(logs, data["targets"][..., None], -1)[..., 0]
    return -(picked * data["weights"]).sum() / data["weights"].sum()

  change = jax.tree.map(lambda new, old: new - old, after.params, before.params)
  expected: Any = {
    "gradient_norm": norms(definition, jax.jit(jax.grad(loss))(before.params)),
    "weight_norm": norms(definition, before.params),
    "update_norm": norms(definition, change),
  }
  assert_same({name: table[name] for name in expected}, expected)
  assert set(expected["gradient_norm"]) >= {"attention.query", "mlp.up", "model.embedding"}
  ratios = table["update_to_weight"]["mlp.down"]
  pairs = (np.array(table[name]["mlp.down"]) for name in ("update_norm", "weight_norm"))
  np.testing.assert_allclose(ratios, np.divide(*pairs), rtol=1e-5)


def normed(x, w, name):
  centred = x - x.mean(-1, keepdims=True)
  y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
  return y * (1 + w[f"{name}.scale"]) + w[f"{name}.bias"]


def mapped(x, w, name):
  return np.tensordot(x, w[f"{name}.w"], 1) + w[f"{name}.b"]


def rms(x):
  return np.sqrt(np.square(x).mean())


def test_activations_and_logits_are_those_of_numpy():
  before, _, table = one_device()
  weights = {
    key: np.asarray(value, np.float64) for key, value in by_layer(tiny(), before.params).items()
  }
  data = batch(packed=True)
  tables: Any = [weights[f"{name}.table", 0] for name in ("embedding", "positions")]
  x = tables[0][data["inputs"]] + tables[1][data["positions"]]
  T, logits = x.shape[1], []
  attended, fed, sizes = [], [], []
  same = data["segments"][:, :, None] == data["segments"][:, None]
  for layer in range(2):
    w = {t.removeprefix("stack.{}."): value for (t, i), value in weights.items() if i == layer}
    y = normed(x, w, "attention_norm")
    q, k, v = (mapped(y, w, f"attention.{name}") for name in ("query", "key", "value"))
    logits_BNTS = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(8)
    logits_BNTS = np.where((np.tri(T, dtype=bool) & same)[:, None], logits_BNTS, -np.inf)
    logits.append(logits_BNTS.max())
    shares = np.exp(logits_BNTS) / np.exp(logits_BNTS).sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", shares, v)
    y = np.einsum("BTNH,NHD->BTD", y, w["attention.output.w"]) + w["attention.output.b"]
    attended.append(rms(y))
    x = x + y
    y = mapped(normed(x, w, "mlp_norm"), w, "mlp.up")
    y = mapped(y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))), w, "mlp.down")
    fed.append(rms(y))
    x = x + y
    sizes.append(rms(x))
  expected: Any = {
    "residual_rms": {"block": sizes},
    "attention_rms": {"attention": attended},
    "mlp_rms": {"mlp": fed},
    "max_attention_logit": {"attention": logits},
  }
  assert_same({name: table[name] for name in expected}, expected)
  assert set(table) == {
    *expected,
    "gradient_norm",
    "weight_norm",
    "update_norm",
    "update_to_weight",
  }


@pytest.mark.slow
def test_scanned_layers_on_a_mesh_are_unrolled_ones_on_one_device():
  mix = {"data": 2, "fsdp": 2, "tensor": 2}
  assert_same(logged(tiny(scan=True), mix, batch(packed=True))[2], one_device()[2])


@pytest.mark.slow
def test_microbatches_are_one_batch():
  assert_same(one_device(num_microbatches=4)[2], one_device()[2])


PIPELINE = {"schedule": "interleaved_1f1b", "stages": 2, "chunks": 2, "microbatches": 4}


@pytest.mark.slow
def test_layers_of_stages_with_experts_come_in_their_order():
  """A dense layer before them, and two chunks a stage: layers 1, 3, 2, 4 in memory."""
  name, data = "DeepSeekV3", batch(8)
  pipeline = fdl.Config(Pipeline, **PIPELINE)
  staged = shrunk(name, repeats=4, pipeline=pipeline)
  assert layout_of(staged.module).order == (0, 2, 1, 3)
  got = logged(staged, {"pipeline": 2, "expert": 2}, data)[2]
  plain = shrunk(name, scan=True, repeats=4)
  expected = logged(plain, {"data": 1}, data, num_microbatches=4)[2]
  assert_same(got, expected)
  assert len(set(expected["weight_norm"]["attention.output"])) == 5
  assert expected["router_entropy"]["mlp"][0] is None  # The dense layer.
  for layer in range(1, 5):
    loads = np.array([values[layer] for values in expected["expert_load"].values()], float)
    assert loads.mean() == pytest.approx(1, rel=1e-4)


@pytest.mark.slow
def test_shared_sequences_are_one_device():
  definition = shrunk("Mixtral8x7B", scan=True)
  got = logged(definition, {"expert": 2, "context": 2}, batch(8, packed=True))[2]
  assert_same(got, logged(definition, {"data": 1}, batch(8, packed=True))[2])


@pytest.mark.slow
def test_a_run_with_the_knob_is_the_run_without(tmp_path):
  flags = (*TINY, "--fdl.MAX_STEPS=4")
  runs = {}
  for every in (0, 2):
    folder = tmp_path / str(every)
    assert run(*flags, f"--fdl.LOG_LAYERS_EVERY={every}", f"--job_log_dir={folder}") == 0
    runs[every] = paxlike.Run(folder)
  train = [[r for r in one.records() if r["kind"] == "train"] for one in runs.values()]
  for name in ("loss", "grad_norm"):
    assert [r[name] for r in train[0]] == [r[name] for r in train[1]]
  params = [one.load()._params for one in runs.values()]
  jax.tree.map(np.testing.assert_array_equal, *params)

  layers = [r for r in runs[2].records() if r["kind"] == "layers"]
  assert [(r["step"], r["updates"]) for r in layers] == [(1, 2), (3, 4)]
  json.dumps(layers, allow_nan=False)
  squares = [x * x for group in layers[0]["layers"]["gradient_norm"].values() for x in group]
  assert math.sqrt(sum(squares)) == pytest.approx(train[1][1]["grad_norm"], rel=1e-5)
  assert scalars(tmp_path / "2") == {
    f"layers/{metric}/{group}/{layer}"
    for record in layers
    for metric, groups in record["layers"].items()
    for group, values in groups.items()
    for layer, value in enumerate(values)
    if value is not None
  }


def scalars(folder) -> set[str]:
  """The names, in TensorBoard, of the values of layers."""
  (file,) = (folder / "summaries" / "layers").iterdir()
  return set(re.findall(r"layers/[\w./]+", file.read_bytes().decode(errors="replace")))


@pytest.mark.slow
def test_a_step_that_is_not_due_is_the_program_without_the_knob():
  """So it costs nothing, and a saved step stays valid."""
  texts = set()
  for every in (0, 2):
    trainer = building.build(registry.find("Gpt3_52k")(LOG_LAYERS_EVERY=every).trainer())
    with jax.set_mesh(trainer.devices):
      texts.add(trainer.lower(*trainer.abstract()).as_text())
  assert len(texts) == 1


def test_what_is_not_finite_is_missing():
  definition = tiny()
  names = list(definition.weights)
  ones = np.ones(len(names))
  ones[names.index("stack.layers.1.mlp.up.w")] = np.nan
  ones[names.index("stack.layers.0.mlp.up.b")] = np.inf
  pairs = {"residual_rms": np.array([[8.0, 2.0], [0.0, 0.0]])}
  table = layer_metrics.table(
    definition, layer_metrics.LayerMetrics(ones, ones, ones, sums=pairs, maxima={})
  )
  assert table["gradient_norm"]["mlp.up"] == [None, None]
  assert table["gradient_norm"]["mlp.down"] == [pytest.approx(math.sqrt(2), rel=1e-5)] * 2
  assert table["residual_rms"] == {"block": [2.0, None]}


def test_layers_may_differ_in_the_number_of_experts():
  two, four = np.array([[3.0, 1.0], [0, 0]]), np.array([[0.0] * 4, [1, 0, 0, 3]])
  sums = {"expert_load/2": two, "expert_load/4": four}
  ones = np.ones(len(tiny().weights))
  table = layer_metrics.table(
    tiny(), layer_metrics.LayerMetrics(ones, ones, ones, sums=sums, maxima={})
  )
  assert table["expert_load"] == {"0": [1.5, 1], "1": [0.5, 0], "2": [None, 0], "3": [None, 3]}
  entropies = [-(a * math.log(a) + (1 - a) * math.log(1 - a)) for a in (0.75, 0.25)]
  assert table["expert_load_entropy"]["mlp"] == pytest.approx(entropies, rel=1e-5)
