# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.layers.precision.rounding import in_dtype, stochastic_round


def test_chance_is_fair_whatever_the_shape():
  x = jnp.linspace(-3, 3, 120_000)
  for shape in ((120_000,), (300, 400), (10, 12, 1000)):
    rounded = stochastic_round(x.reshape(shape)).reshape(-1)
    assert np.abs(np.asarray(rounded - x)).max() < 1
    bins = np.asarray(rounded - x).reshape(120, -1).mean(1)
    assert np.abs(bins).max() < 0.07  # Four and a half standard deviations.


def test_what_is_added_many_times_to_bfloat16_is_not_lost():
  def add(step, x):
    return in_dtype(x.astype(jnp.float32) + 1e-4, jnp.bfloat16, draw=step)

  x = jax.lax.fori_loop(0, 1000, add, jnp.ones(2000, jnp.bfloat16))
  np.testing.assert_allclose(x.astype(jnp.float32).mean(), 1.1, atol=2e-3)
  for value in (jnp.inf, -jnp.inf, jnp.nan, 0.0, 1.5):
    given = jnp.full(8, value, jnp.float32)
    got = in_dtype(given, jnp.bfloat16, draw=jnp.array(3))
    np.testing.assert_array_equal(got.astype(jnp.float32), given)
