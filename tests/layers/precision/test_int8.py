# SPDX-License-Identifier: Apache-2.0
"""Products in whole numbers of 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers import Int8
from paxlike.layers.precision.matmul import LinearForm


def int8(x, w):
  """x [..., D] times w [D, F]."""
  return Int8()(LinearForm(), x, w)


def reference(x, axis):
  """x, rounded to 255 levels of the largest entry along an axis, and back."""
  scale = np.abs(x).max(axis, keepdims=True) / 127
  return np.round(x / scale) * scale


def normal(seed, *shape, scale=1.0):
  return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_product_equals_numpy(shape):
  x, w = 10 ** normal(0, *shape), normal(1, 8, 5, scale=100)
  np.testing.assert_allclose(int8(x, w), reference(x, -1) @ reference(w, 0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(64, 8), (8, 8, 8)])
def test_gradients_are_right_on_average(shape):
  """Rounded by chance: their mean over many draws nears that of what the forward pass rounded."""
  x, w = normal(0, *shape), normal(1, 8, 5)
  dy = normal(2, *shape[:-1], 5, scale=1e-6)
  back = jax.jit(lambda dy: jax.vjp(int8, x, w)[1](dy))

  def expected(dy):
    flat = reference(x, -1).reshape(-1, 8).T @ dy.reshape(-1, 5)
    return dy @ reference(w, 0).T, flat

  # Changes that bfloat16 can tell change the draw.
  changed = [dy * (1 + normal(n, *dy.shape, scale=0.1)) for n in range(400)]
  draws = [back(jnp.array(each)) for each in changed]
  dx, dw = (np.mean(np.asarray(each), 0) for each in zip(*draws, strict=True))
  for mean, right, one, right_one in zip(
    (dx, dw), expected(np.mean(changed, 0)), draws[0], expected(changed[0]), strict=True
  ):
    error, noise = np.abs(mean - right).max(), np.abs(one - right_one).max()
    assert 0 < error < noise / 5 < 0.02 * np.abs(right).max()


def test_what_is_not_finite_stays_so():
  x = jnp.array([[1.0, jnp.inf], [1.0, 2.0]])
  y = np.asarray(int8(x, jnp.ones((2, 2))))
  assert not np.isfinite(y[0]).any() and np.isfinite(y[1]).all()


def test_zeros_stay_zeros():
  y, back = jax.vjp(int8, jnp.zeros((4, 8)), jnp.zeros((8, 2)))
  for array in (y, *back(jnp.zeros((4, 2)))):
    assert np.all(np.asarray(array) == 0)
