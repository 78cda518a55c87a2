# SPDX-License-Identifier: Apache-2.0
"""Products in 8 bits: against NumPy, and as the program that a GPU gets."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from paxlike import chips, kernels, topology
from paxlike.layers import fp8


def reference(x, dtype):
  """x, rounded to 8 bits and back."""
  scale = np.exp2(np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max))))
  return (x / scale).astype(dtype).astype(np.float32) * scale


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_product_and_gradients_equal_numpy(shape):
  random = np.random.default_rng(0)
  x = random.normal(size=shape).astype(np.float32)
  w = (100 * random.normal(size=(8, 5))).astype(np.float32)
  dy = (1e-6 * random.normal(size=(*shape[:-1], 5))).astype(np.float32)
  y, back = jax.vjp(fp8, x, w)
  dx, dw = back(jnp.array(dy))
  e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
  small_x, small_w, small_dy = reference(x, e4m3), reference(w, e4m3), reference(dy, e5m2)
  np.testing.assert_allclose(y, small_x @ small_w, rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(dx, small_dy @ small_w.T, rtol=1e-5, atol=1e-10)
  flat = small_x.reshape(-1, 8).T @ small_dy.reshape(-1, 5)
  np.testing.assert_allclose(dw, flat, rtol=1e-5, atol=1e-12)
  assert np.abs(y - x @ w).max() > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_beyond_the_range_of_half_precision_are_right(dtype):
  x, w = 8 * jnp.ones((2, 512), dtype), jnp.ones((512, 2), dtype) / 8
  assert np.all(np.asarray(fp8(x, w)) == 512)


def test_what_is_not_finite_stays_so():
  x = jnp.array([[1.0, jnp.inf], [1.0, 2.0]])
  assert not np.isfinite(np.asarray(fp8(x, jnp.ones((2, 2)))[0])).any()


def test_zeros_stay_zeros():
  x, w = jnp.zeros((4, 8)), jnp.ones((8, 2))
  y, back = jax.vjp(fp8, x, w)
  for array in (y, *back(jnp.zeros((4, 2)))):
    assert np.all(np.asarray(array) == 0)


def test_a_gpu_multiplies_in_8_bits_in_all_three_products(h200):
  where = SingleDeviceSharding(topology.devices()[0])

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)

  def step(x, w, dy):
    y, back = jax.vjp(fp8, jnp.tanh(x), w)
    return y, back(dy)

  compiled = jax.jit(step).lower(array(2048, 512), array(512, 1024), array(2048, 1024))
  options: Any = {"xla_gpu_enable_triton_gemm": False}
  text = compiled.compile(compiler_options=options).as_text()
  found = kernels.kernels(text or "", chips.CHIPS["H200"])
  products = [one for one in found if one.group.startswith("matmul")]
  assert [one.group for one in products] == ["matmul fp8"] * 3
  assert {one.flops for one in products} == {2 * 2048 * 512 * 1024}
