# SPDX-License-Identifier: Apache-2.0
"""Laws of `grouped_matmul`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers.grouped_matmul import grouped_matmul

SIZES = {
  "even": [10, 10, 10, 10],
  "uneven": [1, 25, 0, 14],
  "none_but_one": [0, 0, 40, 0],
  "fewer_than_rows": [3, 0, 9, 5],
  "none": [0, 0, 0, 0],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_product_and_gradients_equal_a_matrix_for_each_row(sizes):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (40, 6))
  w = jax.random.normal(keys[1], (4, 6, 5))
  dy = jax.random.normal(keys[2], (40, 5))
  groups = np.repeat(np.arange(4), sizes)
  used = (np.arange(40) < len(groups))[:, None]
  groups = np.resize(np.append(groups, 0), 40) * used[:, 0]

  def by_group(x, w):
    return jnp.where(used, grouped_matmul(x, w, jnp.array(sizes, jnp.int32)), 0)

  def by_row(x, w):
    return jnp.where(used, jnp.einsum("md,mdf->mf", x, w[groups]), 0)

  got, got_vjp = jax.vjp(by_group, x, w)
  expected, expected_vjp = jax.vjp(by_row, x, w)
  for a, b in zip((got, *got_vjp(dy)), (expected, *expected_vjp(dy)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_garbage_in_rows_of_no_group_reaches_no_gradient():
  sizes = jnp.array([3, 2], jnp.int32)
  w = jax.random.normal(jax.random.key(0), (2, 4, 4))
  x = jnp.ones((8, 4))
  dy = jnp.ones((8, 4)).at[5:].set(jnp.nan)
  dx, dw, _ = jax.vjp(grouped_matmul, x, w, sizes)[1](dy)
  assert np.all(np.isfinite(dx[:5])) and np.all(np.isfinite(dw))
