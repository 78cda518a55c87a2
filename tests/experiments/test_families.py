# SPDX-License-Identifier: Apache-2.0
"""Laws of every family of models, each tried on one of its sizes, shrunk."""

import functools
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.shrunk import ONE_OF_EACH, shrunk
from helpers.steps import assert_same, one_device, steps
from helpers.teacher_forcing import assert_teacher_forcing, prompts
from helpers.tiny_model import SEQ_LEN, batch

from paxlike import fiddlers, registry
from paxlike.devices.mesh import MeshSpec
from paxlike.inference import generate
from paxlike.layers.module import Definition
from paxlike.training import train_state

pytestmark = pytest.mark.slow
# Dense models with one kind of layer, and Gemma 3 and Gemma 4 31B, whose kinds Gemma 4 E2B has: the
# families left shard the same layers. Their numbers are those of Hugging Face
# (convert/test_parity.py).
ALIKE = {"Llama31_8B", "Mistral7B", "Gemma2B", "Gemma3_1B", "Gemma4_31B", "Qwen3_8B"}
# Together they have every kind of layer.
ALL_LAYERS = ["Gemma2_2B", "GptOss20B", "SyntheticGLaM126M64E", "DeepSeekV3"]
every_kind = pytest.mark.parametrize(
  "name", [*(name for name in ONE_OF_EACH if name not in ALIKE), "Gemma4_E2B"]
)


# Of long programs: one repeat of their pattern, and two of the others'.
LONG = {"DeepSeekV32", "Gemma4_E2B", "GptOss20B", "Llama4Maverick", "Nemotron3_Nano_30B_A3B"}
LONG |= {"Qwen3Next80B_A3B", "SyntheticGLaM126M64E"}


def repeats_of(name: str) -> int:
  return 1 if name in LONG else 2


@functools.cache
def expected(name: str) -> Any:
  return one_device(shrunk(name, repeats=repeats_of(name)), batch(8))


@every_kind
def test_scanned_and_sharded_equal_one_device(name):
  for value in expected(name)[0].values():
    assert np.all(np.isfinite(value))
  spec = MeshSpec(ici={"fsdp": 2, "expert": 2, "tensor": 2})
  scanned = shrunk(name, scan=True, repeats=repeats_of(name))
  assert_same(steps(scanned, spec, batch(8)), expected(name))


@pytest.mark.parametrize("name", ALL_LAYERS)
def test_bfloat16_is_close_to_float32(name):
  exact = expected(name)[1]["loss"]
  definition = shrunk(name, scan=True, repeats=repeats_of(name), dtype="bfloat16")
  rough = one_device(definition, batch(8))[1]["loss"]
  np.testing.assert_allclose(rough[0] / rough[1], exact[0] / exact[1], rtol=0.02)


def test_sorted_tokens_of_experts_equal_one_device():
  spec = MeshSpec(ici={"expert": 4})
  got = steps(shrunk("Mixtral8x7B"), spec, batch(8), devices=jax.devices()[:4])
  assert_same(got, expected("Mixtral8x7B"))


def test_experts_with_capacity_equal_one_device():
  # So few places that tokens are dropped.
  knobs = {"MOE_DISPATCH": "capacity", "CAPACITY_FACTOR": 0.5}
  one = one_device(shrunk("Mixtral8x7B", **knobs), batch(8))
  dropped, total = one[1]["dropped_fraction"]
  assert 0.1 < dropped / total < 0.9
  assert total == 2 * 2 * 8 * SEQ_LEN
  spec = MeshSpec(ici={"data": 2, "expert": 2, "tensor": 2})
  got = steps(shrunk("Mixtral8x7B", **knobs), spec, batch(8))
  assert_same(got, one)


def test_biases_of_routers_follow_the_load():
  definition = shrunk("DeepSeekV3")
  names = [name for name in definition.weights if name.endswith("router_bias")]
  assert len(names) == 2
  assert definition.optimized(definition.weights).keys().isdisjoint(names)
  params = one_device(definition, batch(8), num_steps=1)[2].params
  for name in names:
    bias = np.asarray(params[name])
    # Some were chosen more often than others, and none as often as all on average.
    np.testing.assert_allclose(np.abs(bias[bias != 0]), 0.001, rtol=1e-6)
    assert bias.min() < 0 < bias.max()


def test_cached_decode_with_relative_positions_equals_teacher_forcing(monkeypatch):
  """The families that Hugging Face has are tried on its weights in convert/test_parity.py."""
  monkeypatch.setattr(generate, "_LEAST_ROOM", 4)
  graph = registry.find("SyntheticGLaM126M64E")().trainer()
  for edit in (fiddlers.shrink, fiddlers.decoding):
    edit(graph)
  fiddlers.precision(graph, "float32")
  definition = Definition(fdl.build(graph).model)
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  keys = jax.random.split(jax.random.key(0), len(params))
  # Relative biases would be zero.
  params = {
    name: value + 0.1 * jax.random.normal(key, value.shape)
    for key, (name, value) in zip(keys, params.items(), strict=True)
  }
  given = prompts(9, 2, 13)
  texts = generate.generate(definition, params, given, max_new_tokens=12, num_rows=2)
  assert_teacher_forcing(definition, params, given, texts)


def test_enough_places_serve_as_many_as_sorting():
  definition = shrunk("Mixtral8x7B", MOE_DISPATCH="capacity", CAPACITY_FACTOR=2.0)
  placed = steps(definition, MeshSpec(ici={"expert": 4}), batch(8), devices=jax.devices()[:4])
  assert placed[1].pop("dropped_fraction")[0] == 0
  assert_same(placed, expected("Mixtral8x7B"))
