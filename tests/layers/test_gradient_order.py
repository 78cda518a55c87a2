# SPDX-License-Identifier: Apache-2.0
"""The order of gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.layers import gradient_order


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
