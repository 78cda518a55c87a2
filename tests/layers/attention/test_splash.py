# SPDX-License-Identifier: Apache-2.0
"""Attention by the Pallas kernel for TPUs: interpreted, and lowered for a TPU that is not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import splash
from paxlike.layers.attention import kernels
from paxlike.layers.attention.splash import block_size

interpreted = functools.partial(splash, interpret=True)


def inputs(length, *, heads=2, kv_heads=2, rows=2, width=16, value_width=16):
  random = np.random.default_rng(0)
  q = random.normal(size=(rows, length, heads, width)).astype(np.float32)
  k = random.normal(size=(rows, length, kv_heads, width)).astype(np.float32)
  v = random.normal(size=(rows, length, kv_heads, value_width)).astype(np.float32)
  sinks = random.normal(size=heads).astype(np.float32)
  segments = np.sort(random.integers(1, 4, (rows, length))).astype(np.int32)
  return q, k, v, sinks, segments


def output_and_gradients(kernel, q, k, v, sinks, segments, **options):
  def value(q, k, v, sinks):
    y = kernel(q, k, v, scale=0.3, segments_BT=segments, sinks_N=sinks, **options)
    return jnp.sin(y).sum(), y

  wanted = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
  return jax.jit(jax.grad(value, wanted, has_aux=True))(q, k, v, sinks)


def assert_alike(got, expected):
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("length", "sizes", "has_sinks", "options"),
  [
    (384, {"rows": 1}, False, {}),
    (384, {"heads": 4}, True, {"window": 130}),
    (200, {"kv_heads": 1, "width": 24, "value_width": 8}, False, {"soft_cap": 2.0}),
  ],
  ids=["packed", "grouped, sinks, window", "filled up, narrow values, soft cap"],
)
def test_it_has_the_gradient_of_plain_attention(length, sizes, has_sinks, options):
  q, k, v, sinks, segments = inputs(length, **sizes)
  given = (q, k, v, sinks if has_sinks else None, segments)
  expected = output_and_gradients(kernels.xla, *given, **options)
  assert_alike(output_and_gradients(interpreted, *given, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "heads", "kv_heads"),
  [
    ({"data": 2, "tensor": 4}, 8, 2),
    ({"fsdp": 2, "context": 2, "tensor": 2}, 3, 3),
  ],
  ids=["more devices than keys", "heads that do not divide"],
)
def test_eight_devices_equal_one(shape, heads, kv_heads):
  given = inputs(128, heads=heads, kv_heads=kv_heads, width=8, value_width=8)
  expected = output_and_gradients(interpreted, *given, window=40)
  with jax.set_mesh(MeshSpec(ici=shape).build()):
    got = output_and_gradients(interpreted, *given, window=40)
  assert_alike(got, expected)


@pytest.mark.parametrize(
  ("head_dim", "kv_heads", "packed", "options"),
  [(64, 4, True, {}), (128, 2, True, {"window": 512, "soft_cap": 50.0}), (128, 1, False, {})],
)
def test_it_is_the_kernel_without_a_mask_in_memory(head_dim, kv_heads, packed, options):
  def value(q, k, v, segments):
    y = splash(q, k, v, scale=0.1, segments_BT=segments, **options)
    return y.astype(jnp.float32).sum()

  q = jax.ShapeDtypeStruct((2, 2048, 4, head_dim), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((2, 2048, kv_heads, head_dim), jnp.bfloat16)
  segments = jax.ShapeDtypeStruct((2, 2048), jnp.int32) if packed else None
  traced = jax.jit(jax.grad(value, (0, 1, 2))).trace(q, k, k, segments)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert text.count("@tpu_custom_call") == 3
  for part in ("fwd", "dq", "dkv"):
    assert f"splash_mha_{part}" in text
  assert "2048x2048" not in text


def test_a_bias_is_refused():
  q = jnp.ones((1, 8, 4, 64), jnp.bfloat16)
  with pytest.raises(UserError, match="splash does not support bias"):
    splash(q, q, q, scale=1.0, segments_BT=None, bias_NTS=jnp.ones((4, 8, 8)))


@pytest.mark.parametrize(("length", "size"), [(128, 128), (768, 256), (2048, 512), (8192, 512)])
def test_blocks_divide_the_length(length, size):
  assert block_size(length) == size
