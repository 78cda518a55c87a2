# SPDX-License-Identifier: Apache-2.0
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
import optax
import pytest
from fiddle import selectors

from paxlike import fiddlers, layers, registry
from paxlike.errors import UserError


@pytest.fixture
def graph():
  return registry.find("Gpt3_52k")().trainer()


def test_select_finds_by_type_and_role(graph):
  roles = [linear.role for linear in fiddlers.select(graph, layers.Linear)]
  assert sorted(roles) == ["down", "key", "output", "query", "up", "value"]
  chosen = fiddlers.select(graph, layers.Linear, "up", "query")
  assert {linear.role for linear in chosen} == {"up", "query"}


@pytest.mark.parametrize("name", ["Mixtral8x7B", "NemotronH_47B", "DeepSeekV32", "Pile5B"])
@pytest.mark.parametrize("kind", [layers.Linear, layers.Module])
def test_select_finds_what_the_selectors_of_fiddle_find(name, kind):
  graph = registry.find(name)().trainer()
  expected = list(selectors.select(graph, kind, check_nonempty=False))
  found = list(fiddlers.select(graph, kind))
  assert found and len(found) == len(expected)
  assert all(one is other for one, other in zip(found, expected, strict=True))


def test_precision_reaches_every_layer_that_computes(graph):
  fiddlers.precision(graph, "float16")
  for kind in (layers.Linear, layers.Embedding, layers.PositionEmbedding, layers.LayerNorm):
    nodes = list(fiddlers.select(graph, kind))
    assert nodes
    assert all(node.dtype == jnp.float16 for node in nodes)


def test_stack_and_remat_change_the_stack(graph):
  fiddlers.stack(graph, scan=True)
  fiddlers.remat(graph, "SAVE_DOT_ONLY")
  assert graph.model.stack.scan is True
  assert graph.model.stack.remat is layers.Remat.SAVE_DOT_ONLY
  with pytest.raises(UserError, match="Did you mean SAVE_NOTHING"):
    fiddlers.remat(graph, "SAVE_NOTHIN")


@pytest.mark.parametrize(
  ("knobs", "dot"),
  [
    ({"USE_FP8": True}, layers.Fp8),
    ({"QUANTIZATION": "fp8"}, layers.Fp8),
    ({"QUANTIZATION": "int8"}, layers.Int8),
    ({"QUANTIZATION": "fp8_delayed", "USE_FP8": True}, layers.DelayedFp8),
  ],
)
def test_products_in_few_bits_are_those_of_the_blocks(knobs, dot):
  graph = registry.find("Mixtral8x7B")(**knobs).trainer()

  def dots(kind):
    nodes = fiddlers.select(graph, kind)
    return {node.role: fdl.get_callable(node.dot) for node in nodes if getattr(node, "dot", None)}

  assert dots(layers.Linear) == dict.fromkeys(("query", "key", "value", "output"), dot)
  assert dots(layers.ExpertLinear) == dict.fromkeys(("gate", "up", "down"), dot)
  assert {"head", "router"} <= {node.role for node in fiddlers.select(graph, layers.Linear)}


def test_a_quantization_that_is_none_or_two_is_said(graph):
  with pytest.raises(UserError, match=r"no quantization fp9\..*Did you mean fp8"):
    fiddlers.quantize(graph, "fp9")
  with pytest.raises(UserError, match="USE_FP8=True, but QUANTIZATION=int8"):
    registry.find("Gpt3_52k")(USE_FP8=True, QUANTIZATION="int8").trainer()


def test_a_rate_that_is_a_number_is_a_schedule_to_change(graph):
  graph.optimizer.learning_rate = 0.01
  schedules = []
  fiddlers.change_rate(graph, schedules.append)
  assert schedules[0](7) == 0.01


def test_a_rate_is_changed_with_the_arguments_that_it_had(graph):
  def warm(learning_rate: float):
    return optax.constant_schedule(learning_rate)

  graph.optimizer.learning_rate = fdl.Config(warm, learning_rate=1e-3)
  fiddlers.change_rate(graph, lambda schedule: lambda step: schedule(step) / 2)
  changed: Any = graph.optimizer.learning_rate
  assert changed(0) == 5e-4


def test_a_kernel_that_is_none_is_said(graph):
  with pytest.raises(UserError, match="Did you mean cudnn"):
    fiddlers.attention(graph, "cudn")  # pyright: ignore[reportArgumentType]
