# SPDX-License-Identifier: Apache-2.0
"""Products in 8-bit floating point: against NumPy, and as the program that a GPU gets."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import SingleDeviceSharding

from paxlike.compilation import hlo_kernels
from paxlike.devices import chips, topology
from paxlike.layers import DelayedFp8, Fp8
from paxlike.layers.precision.fp8 import quantized_per_tensor
from paxlike.layers.precision.matmul import LinearForm
from paxlike.layers.precision.rounding import QuantizedOperand

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def fp8(x, w):
  """x [..., D] times w [D, F]."""
  return Fp8()(LinearForm(), x, w)


def reference(x, dtype):
  """x, rounded to 8 bits and back."""
  scale = np.exp2(np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max))))
  return (x / scale).astype(dtype).astype(np.float32) * scale


def normal(seed, *shape, scale=1.0):
  return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@pytest.mark.parametrize("for_gpu", [False, True])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_product_and_gradients_equal_numpy(shape, for_gpu, monkeypatch):
  monkeypatch.setattr(topology, "is_gpu", lambda: for_gpu)
  x, w = normal(0, *shape), normal(1, 8, 5, scale=100)
  dy = normal(2, *shape[:-1], 5, scale=1e-6)
  y, back = jax.vjp(fp8, x, w)
  dx, dw = back(jnp.array(dy))
  small_x, small_w, small_dy = reference(x, E4M3), reference(w, E4M3), reference(dy, E5M2)
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


def delayed(x, w, inputs, gradients):
  """The product with these histories of largest entries."""
  dot = DelayedFp8(history=3)
  dot.inputs.set_value(inputs)
  dot.gradients.set_value(gradients)
  return dot(LinearForm(), x, w, dot.quantized(w))


def test_delayed_scales_are_those_of_the_largest_seen_and_more_is_cut_off():
  x, w = jnp.array([[1.0, 1000.0]]), jnp.eye(2)
  y = delayed(x, w, jnp.array([3.0, 400.0, 0]), jnp.zeros(3))
  np.testing.assert_array_equal(y, [[1.0, 448.0]])
  y = delayed(x, w, jnp.array([3.0, 800.0, 0]), jnp.zeros(3))
  np.testing.assert_array_equal(y, [[1.0, 896.0]])


def test_delayed_scales_equal_current_ones_when_the_last_step_was_the_same():
  x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 5, scale=1e-6)
  seen = (jnp.zeros(3).at[1].set(np.abs(x).max()), jnp.zeros(3).at[2].set(np.abs(dy).max()))
  y, back = jax.vjp(lambda x, w: delayed(x, w, *seen), x, w)
  expected, expected_back = jax.vjp(fp8, x, w)
  for a, b in zip((y, *back(dy)), (expected, *expected_back(dy)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_gradient_of_a_history_is_what_comes_into_it():
  x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 5, scale=1e-6)
  seen = jnp.array([5.0, 6.0, 7.0])
  _, back = jax.vjp(lambda inputs, gradients: delayed(x, w, inputs, gradients), seen, seen)
  inputs, gradients = back(jnp.array(dy))
  np.testing.assert_array_equal(inputs, [np.abs(x).max(), 0, 0])
  np.testing.assert_array_equal(gradients, [np.abs(dy).max(), 0, 0])
  update = DelayedFp8(history=3).inputs.update
  layers = update(jnp.stack([seen, seen]), jnp.stack([inputs, inputs]))
  np.testing.assert_array_equal(layers[:, 1:], [[5.0, 6.0]] * 2)


def test_rounding_has_a_scale_for_each_layer_and_expert():
  w = jnp.stack([jnp.eye(4), 1e4 * jnp.eye(4)])
  small = Fp8().quantized(w)
  assert isinstance(small, QuantizedOperand) and small.scale.shape == (2, 1, 1)
  for layer in range(2):
    alone = quantized_per_tensor(w[layer], jnp.float8_e4m3fn, jnp.abs(w[layer]).max())
    np.testing.assert_array_equal(small.values[layer], alone.values)
    np.testing.assert_array_equal(small.scale[layer, 0, 0], alone.scale)


@pytest.mark.parametrize("largest", [1e-38, 1e-6, 3.0, 1e30])
def test_weights_of_bfloat16_are_rounded_once(largest):
  w = jnp.array(normal(0, 8, 5, scale=largest), jnp.bfloat16)
  rounded, expected = Fp8.quantized(w), Fp8.quantized(w.astype(jnp.float32))
  np.testing.assert_array_equal(rounded.values, expected.values)
  np.testing.assert_array_equal(rounded.scale, expected.scale)
  assert np.isfinite(np.asarray(rounded.values, np.float32)).all()


@pytest.mark.parametrize("product", [fp8, lambda x, w: delayed(x, w, jnp.ones(3), jnp.ones(3))])
def test_a_gpu_multiplies_in_8_bits_in_all_three_products(h200, product):
  where = SingleDeviceSharding(topology.devices()[0])

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)

  def step(x, w, dy):
    y, back = jax.vjp(product, jnp.tanh(x), w)
    return y, back(dy)

  arrays = array(2048, 512), array(512, 1024), array(2048, 1024)
  text = hlo.text(step, *arrays, options={"xla_gpu_enable_triton_gemm": False})
  found = hlo_kernels.kernels(text, chips.CHIPS["H200"])
  products = [one for one in found if one.group.startswith("matmul")]
  assert [one.group for one in products] == ["matmul fp8"] * 3
  assert {one.flops for one in products} == {2 * 2048 * 512 * 1024}
