# SPDX-License-Identifier: Apache-2.0
"""The order of gradients."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_model
from helpers.shrunk import shrunk

from paxlike.devices import topology, xla_flags
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import gradient_order
from paxlike.layers.block import Block
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.mlp import Mlp
from paxlike.layers.norm import RmsNorm


def layer(x, weights):
  return jnp.tanh(x @ weights["w"]) * weights["scale"]


def test_the_cotangent_of_the_input_waits_for_the_gradients_of_the_weights():
  weights = {"w": jnp.ones((4, 4)), "scale": jnp.array([1, 2, 3, 4])}  # Integers have no gradient.

  def loss(x, w, tie):
    one = {**weights, "w": w}
    return layer(*tie(x, one)).sum()

  x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
  gradients = jax.grad(loss, (0, 1))
  tied = gradients(x, weights["w"], gradient_order.together)
  free = gradients(x, weights["w"], lambda *both: both)
  for got, expected in zip(tied, free, strict=True):
    np.testing.assert_array_equal(got, expected)
  program = jax.make_jaxpr(lambda x, w: gradients(x, w, gradient_order.together))(x, weights["w"])
  (barrier,) = [e for e in program.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
  assert [var.aval.shape for var in barrier.outvars] == [(2, 4), (4, 4)]


@pytest.mark.parametrize("is_time_sharded", [False, True])
def test_the_order_of_addends_keeps_no_more_activations(monkeypatch, is_time_sharded):
  def kernel(q_BTNH, k_BSKH, v_BSKH, **_: Any):
    return q_BTNH * k_BSKH * v_BSKH

  layer = tiny_model.attention(lambda role: functools.partial(Linear, role=role))(32, kernel=kernel)
  graph, state = nnx.split(layer)
  weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct((3, *w.shape), w.dtype), state)
  x_BTD = jnp.ones((2, 16, 32))

  def stored():
    """The number of arrays that a scan keeps of all layers' activations."""

    def one(x, state):
      return x + nnx.merge(graph, state)(jnp.tanh(x), Context())[0], None

    gradient = jax.grad(lambda x, weights: jax.lax.scan(one, x, weights)[0].sum(), (0, 1))
    equations = jax.make_jaxpr(gradient)(x_BTD, weights).jaxpr.eqns
    forward = next(one for one in equations if one.primitive.name == "scan")
    return sum(output.aval.size == 3 * x_BTD.size for output in forward.outvars)

  ici = {"context": 2} if is_time_sharded else {}
  with jax.set_mesh(MeshSpec(ici=ici).build(jax.devices()[: 1 + is_time_sharded])):
    number = stored()
    monkeypatch.setattr(gradient_order, "fork", lambda x: (x, x))
    assert number == stored() > 0


@pytest.mark.parametrize(
  ("ici", "is_v5e", "recomputes", "waits"),
  [
    ({"fsdp": 4}, True, True, True),
    ({"fsdp": 4}, True, False, False),
    ({"fsdp": 4}, False, True, False),
    ({"fsdp": 2}, True, True, False),
    ({"fsdp": 2, "tensor": 2}, True, True, False),
    ({"data": 4}, True, True, False),
    ({}, True, True, False),
  ],
)
def test_the_input_of_a_layer_waits_where_all_reduces_need_a_matmul(
  monkeypatch, ici, is_v5e, recomputes, waits
):
  layer = Block(
    8,
    norm=RmsNorm,
    attention=tiny_model.attention(lambda role: functools.partial(Linear, role=role)),
    mlp=functools.partial(
      Mlp,
      hidden_dim=16,
      up=functools.partial(Linear, role="up"),
      down=functools.partial(Linear, role="down"),
    ),
  )
  graph, state = nnx.split(layer)
  draw = functools.partial(np.random.default_rng(0).normal)
  weights = jax.tree.map(lambda w: jnp.asarray(draw(size=w.shape), w.dtype), state)
  x_BTD = jnp.asarray(draw(size=(4, 2, 8)), jnp.float32)

  def gradients(x_BTD, weights):
    def loss(x_BTD, weights):
      context = Context(recomputes=recomputes)
      return jnp.square(nnx.merge(graph, weights)(x_BTD, context)[0]).sum()

    return jax.grad(loss, (0, 1))(x_BTD, weights)

  monkeypatch.setattr(gradient_order, "_LEAST_CHIPS", 4)
  with jax.set_mesh(MeshSpec(ici=ici).build(jax.devices()[: math.prod(ici.values())])):
    free = jax.jit(lambda *given: gradients(*given))(x_BTD, weights)
    monkeypatch.setattr(xla_flags, "fuses_all_reduces", lambda: is_v5e)
    equations = jax.make_jaxpr(gradients)(x_BTD, weights).jaxpr.eqns
    got = jax.jit(lambda *given: gradients(*given))(x_BTD, weights)
  tied = [len(e.outvars) for e in equations if e.primitive.name == "optimization_barrier"]
  of_matrices = jax.tree.leaves(nnx.state((layer.attention, layer.mlp)))
  assert tied.count(1 + len(of_matrices)) == waits
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, free)


def test_only_a_v5e_computes_all_reduces_beside_matmuls_in_one_kernel():
  fuses = {}
  for target in ("v4-8", "v5e-4", "v5p-8", "v6e-4", "h100-2"):
    with topology.target(target):
      fuses[target] = xla_flags.fuses_all_reduces()
  assert not xla_flags.fuses_all_reduces()
  assert [target for target, does in fuses.items() if does] == ["v5e-4"]


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize(
  ("policy", "expected"),
  [("SAVE_NOTHING", 3), ("SAVE_QKV_OUT_PROJ", 0), ("SAVE_EVERYTHING", 0)],
)
def test_all_layers_wait_if_nothing_but_their_inputs_is_saved(monkeypatch, kind, policy, expected):
  knobs = {"MTP_NUM_LAYERS": 1, "MTP_KIND": kind}
  definition = shrunk("SyntheticLLaMA7B", remat=policy, **knobs)
  weights = {name: weight.abstract for name, weight in definition.weights.items()}

  def loss(weights):
    return definition.bind(definition.prepare(weights)).losses(tiny_model.batch(), Context())

  waiting = []
  monkeypatch.setattr(gradient_order, "after_weights", lambda *given: waiting.append(1) or given)
  with jax.set_mesh(MeshSpec().build(jax.devices()[:1])):
    jax.eval_shape(loss, weights)
  assert len(waiting) == expected
