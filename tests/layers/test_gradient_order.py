# SPDX-License-Identifier: Apache-2.0
"""The order of gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_model

from paxlike.devices.mesh import MeshSpec
from paxlike.layers import gradient_order
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear


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
