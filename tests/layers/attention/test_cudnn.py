# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN: compiled for a GPU that is not there, so without its numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import SingleDeviceSharding

from paxlike.devices import mesh, topology
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import cudnn
from paxlike.layers.attention import cudnn as cudnn_attention
from paxlike.layers.attention import kernels

QUERIES, KEYS = (("batch", "time", heads, None) for heads in ("heads", "kv_heads"))


def program(kernel, *, length=256, packed=False, kv_heads=4, query_width=64, **options):
  """The program of a gradient, as text."""
  where = SingleDeviceSharding(topology.devices()[0])

  def value(q, k, v, segments):
    return kernel(q, k, v, scale=0.1, segments_BT=segments, **options).astype(jnp.float32).sum()

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  q, k = array(2, length, 4, query_width), array(2, length, kv_heads, query_width)
  v = array(2, length, kv_heads, 64)
  segments = array(2, length, dtype=jnp.int32) if packed else None
  return hlo.text(jax.grad(value, (0, 1, 2)), q, k, v, segments)


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    {"packed": True},
    pytest.param({"kv_heads": 2}, marks=pytest.mark.slow),
    {"packed": True, "kv_heads": 1, "window": 32},
    pytest.param({"packed": True, "query_width": 96}, marks=pytest.mark.slow),
    {"length": 255},
    pytest.param({"length": 255, "packed": True}, marks=pytest.mark.slow),
  ],
  ids=[
    "packed",
    "grouped",
    "packed, grouped, window",
    "values narrower",
    "odd length",
    "odd length, packed",
  ],
)
def test_it_is_the_fused_kernel_without_a_mask_in_memory(h200, options):
  text = program(cudnn, **options)
  assert hlo.num_calls(text, "__cudnn$fmhaSoftmax") == 1
  assert hlo.num_calls(text, "__cudnn$fmhaSoftmaxBackward") == 1
  assert "256,256" not in text


@pytest.mark.slow
def test_another_kernel_is_none_of_cudnn(h200):
  assert "__cudnn" not in program(kernels.xla, packed=True)


def program_on(sizes, *, kv_heads, length=256, packed=True):
  """The program of a gradient on a mesh, as text."""
  with topology.target(f"h200-{math.prod(sizes.values())}"):
    built = MeshSpec(ici=sizes).build()

  def array(dims, shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(built, dims, shape))

  q, k = array(QUERIES, (8, length, 8, 64)), array(KEYS, (8, length, kv_heads, 64))
  segments = array(("batch", "time"), (8, length), jnp.int32) if packed else None

  def value(q, k, v, segments):
    return cudnn(q, k, v, scale=0.1, segments_BT=segments).astype(jnp.float32).sum()

  with jax.set_mesh(built):
    return hlo.text(jax.grad(value, (0, 1, 2)), q, k, k, segments)


def outputs(program):
  """Dtype and shape of the first output of each call of the kernel, forward and backward."""
  return [one.outputs[0][:2] for one in hlo.custom_calls(program, "__cudnn$fmhaSoftmax")]


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_on_a_mesh_each_device_has_its_rows_and_heads(h200, kv_heads):
  text = program_on({"data": 2, "fsdp": 2, "tensor": 2}, kv_heads=kv_heads)
  assert outputs(text) == [("bf16", (2, 4, 256, 64))] * 2
  assert not hlo.collectives(text)


@pytest.mark.parametrize(
  ("sizes", "kv_heads", "packed", "output"),
  [
    ({"tensor": 2}, 1, False, (8, 4, 256, 64)),
    ({"fsdp": 2, "tensor": 4}, 2, True, (4, 2, 256, 64)),
    ({"context": 4}, 8, False, (8, 8, 256, 64)),
    ({"context": 2, "tensor": 4}, 1, True, (8, 2, 256, 64)),
  ],
)
def test_each_device_has_whole_rows_and_the_keys_of_its_heads(
  h200, sizes, kv_heads, packed, output
):
  text = program_on(sizes, kv_heads=kv_heads, packed=packed)
  assert outputs(text) == [("bf16", output)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(
  ("sizes", "length"),
  [
    ({"fsdp": 2, "tensor": 4}, 8),
    ({"context": 4, "tensor": 2}, 8),
    ({"data": 4, "tensor": 2}, 7),
    ({}, 7),
  ],
  ids=str,
)
def test_what_devices_compute_is_the_whole(monkeypatch, sizes, length, kv_heads):
  """With another kernel in the place of cuDNN's, which no CPU has."""
  random = np.random.default_rng(0)
  shapes = [(4, length, heads, 8) for heads in (8, kv_heads, kv_heads)]
  q, k, v = (jnp.array(random.normal(size=shape), jnp.float32) for shape in shapes)
  segments = jnp.array(np.sort(random.integers(1, 4, (4, length))), jnp.int32)

  def attend(q, k, v, segments_BT, options, max_segments):
    assert q.shape[1] == 8
    y = kernels.xla(q, k, v, **options | {"segments_BT": segments_BT})
    fits_B = kernels.segment_starts(segments_BT).sum(1) <= max_segments
    return jnp.where(fits_B[:, None, None, None], y, jnp.nan)

  def value(kernel, q, k, v):
    y = kernel(*(x.astype(jnp.bfloat16) for x in (q, k, v)), scale=0.3, segments_BT=segments)
    return jnp.square(y.astype(jnp.float32)).sum()

  monkeypatch.setattr(cudnn_attention, "_attend", attend)
  by_kernel = jax.value_and_grad(value, (1, 2, 3))
  expected = by_kernel(kernels.xla, q, k, v)
  with jax.set_mesh(MeshSpec(ici=sizes).build(jax.devices()[: math.prod(sizes.values())])):
    kernel = functools.partial(cudnn, max_segments=3)
    got = jax.jit(functools.partial(by_kernel, kernel))(q, k, v)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2), got, expected)


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"soft_cap": 50.0}, "soft_cap"),
    ({"sinks_N": jnp.ones(4)}, "sinks"),
    ({"bias_NTS": jnp.ones((4, 8, 8))}, "bias"),
  ],
)
def test_what_cudnn_has_not_is_refused(options, says):
  q = jnp.ones((1, 8, 4, 64), jnp.bfloat16)
  with pytest.raises(UserError, match=says):
    cudnn(q, q, q, scale=1.0, segments_BT=None, **options)


@pytest.mark.parametrize(
  ("dtype", "head_dim", "says"),
  [
    (jnp.float32, 64, "dtype=float32"),
    (jnp.bfloat16, 60, "heads of 60"),
    (jnp.bfloat16, 264, "264"),
  ],
)
def test_what_is_not_to_its_taste_is_refused(dtype, head_dim, says):
  q = jnp.ones((1, 8, 4, head_dim), dtype)
  with pytest.raises(UserError, match=says):
    cudnn(q, q, q, scale=1.0, segments_BT=None)
