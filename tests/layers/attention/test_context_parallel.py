# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that devices share: they equal one device, and compute half."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers.attention import context_parallel, kernels
from paxlike.layers.attention.context_parallel import gathered, ring

pytestmark = pytest.mark.slow

LENGTH = 32
both = pytest.mark.parametrize("kernel", [ring, gathered], ids=kernels.name_of)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  """A chunk is several pieces of queries."""
  monkeypatch.setattr(context_parallel, "_PIECE", 2)


def inputs(*, heads=4, kv_heads=2, rows=2, width=8, value_width=8, length=LENGTH):
  random: Any = np.random.default_rng(0)

  def draw(*shape):
    return random.normal(size=shape).astype(np.float32)

  q, k = draw(rows, length, heads, width), draw(rows, length, kv_heads, width)
  return q, k, draw(rows, length, kv_heads, value_width), draw(heads)


def documents(rows=2, length=LENGTH):
  random: Any = np.random.default_rng(1)
  return np.sort(random.integers(0, 4, (rows, length))).astype(np.int32)[:, ::-1]


def output_and_gradients(kernel, given, *, has_sinks=False, packed=False, **options):
  def value(q, k, v, sinks):
    more = options | ({"sinks_N": sinks} if has_sinks else {})
    segments = documents(len(q), q.shape[1]) if packed else None
    y = kernel(q, k, v, scale=0.3, segments_BT=segments, **more)
    return jnp.sin(y.astype(jnp.float32)).sum(), y

  return jax.jit(jax.grad(value, (0, 1, 2, 3), has_aux=True))(*given)


def on(shape, kernel, given, **options):
  devices = jax.devices()[: math.prod(shape.values())]
  with jax.set_mesh(MeshSpec(ici=shape).build(devices)):
    return output_and_gradients(kernel, given, **options)


def assert_alike(got, expected, atol=2e-5):
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(np.float32(one), np.float32(other), atol=atol)


@both
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"packed": True},
    {"window": 1},
    {"window": 9},
    {"window": 13},
    {"soft_cap": 0.7},
    {"has_sinks": True},
    {"packed": True, "window": 7, "soft_cap": 2.0, "has_sinks": True},
    {"packed": True, "window": 21, "soft_cap": 2.0, "has_sinks": True},
  ],
  ids=str,
)
def test_devices_that_share_a_sequence_equal_one(kernel, options):
  expected = output_and_gradients(kernels.xla, inputs(), **options)
  assert_alike(on({"context": 4}, kernel, inputs(), **options), expected)


@both
@pytest.mark.parametrize(
  ("shape", "sizes"),
  [
    ({"context": 8}, {"kv_heads": 4}),
    ({"context": 2}, {"heads": 3, "kv_heads": 1, "rows": 1, "value_width": 4}),
    ({"context": 4, "tensor": 2}, {"kv_heads": 1}),
    ({"data": 2, "context": 2, "tensor": 2}, {}),
    ({"fsdp": 2, "context": 2, "tensor": 2}, {"rows": 3, "heads": 3, "kv_heads": 3}),
  ],
  ids=str,
)
def test_any_mesh_equals_one_device(kernel, shape, sizes):
  given, options = inputs(**sizes), {"packed": True, "has_sinks": True}
  expected = output_and_gradients(kernels.xla, given, **options)
  assert_alike(on(shape, kernel, given, **options), expected)


@both
@pytest.mark.parametrize("window", [None, 5])
def test_bfloat16_is_close(kernel, window):
  given = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
  exact = output_and_gradients(kernels.xla, inputs(), window=window)
  got = on({"context": 4}, kernel, given, window=window)
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
  assert_alike(got, exact, atol=0.03)


@both
@pytest.mark.parametrize(
  ("policy", "window"), [("nothing_saveable", 5), ("dots_saveable", None)], ids=str
)
def test_layers_in_a_loop_that_compute_it_again(kernel, policy, window):
  """Layers of different weights, which the loop hands to attention in each turn."""
  weights = jnp.linspace(0.5, 1.5, 3)

  def layers(kernel, q, k, v):
    def layer(x, weight):
      return kernel(x * weight, k, v, scale=0.3, segments_BT=None, window=window), None

    layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    return jnp.sin(jax.lax.scan(layer, q, weights)[0]).sum()

  def gradients(kernel):
    return jax.jit(jax.grad(functools.partial(layers, kernel), (0, 1, 2)))(*inputs()[:3])

  expected = gradients(kernels.xla)
  with jax.set_mesh(MeshSpec(ici={"context": 4}).build(jax.devices()[:4])):
    assert_alike(gradients(kernel), expected)


@both
def test_it_works_within_a_stage_of_a_pipeline(kernel):
  def value(kernel, q, k, v, sinks):
    return jnp.sin(kernel(q, k, v, scale=0.3, segments_BT=None, sinks_N=sinks)).sum()

  def on_stages(*given):
    whole = jax.P()
    gradient = jax.grad(functools.partial(value, kernel), (0, 1, 2, 3))
    return jax.shard_map(
      gradient, in_specs=whole, out_specs=whole, axis_names={"pipeline"}, check_vma=False
    )(*given)

  expected = jax.grad(functools.partial(value, kernels.xla), (0, 1, 2, 3))(*inputs())
  with jax.set_mesh(MeshSpec(ici={"pipeline": 2, "context": 2, "tensor": 2}).build()):
    assert_alike(jax.jit(on_stages)(*inputs()), expected)


@both
def test_what_cannot_be_shared_is_refused(kernel):
  name = kernels.name_of(kernel)
  q, k, v, _ = inputs(length=20)
  with pytest.raises(UserError, match=f"kernel={name} does not support bias_NTS"):
    kernel(q, k, v, scale=1.0, segments_BT=None, bias_NTS=jnp.ones((4, 20, 20)))


@both
def test_rows_of_any_length_are_shared(kernel):
  expected = output_and_gradients(kernels.xla, inputs(length=20), packed=True)
  assert_alike(on({"context": 4}, kernel, inputs(length=20), packed=True), expected)


@both
@pytest.mark.parametrize("shape", [{}, {"data": 2}], ids=str)
def test_devices_that_share_nothing_compute_as_usual(kernel, shape):
  options = {"has_sinks": True, "packed": True}
  expected = output_and_gradients(kernels.xla, inputs(), **options)
  assert_alike(on(shape, kernel, inputs(), **options), expected)


def compiled(kernel, num_devices, length, *, policy="everything_saveable", **options):
  """The program of one device that goes forward and back, for one head of 16."""

  def value(q, k, v):
    @functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def attend(q, k, v):
      return kernel(2 * q, k, v, scale=1.0, segments_BT=None, **options)

    return jnp.sin(attend(q, k, v)).sum()

  with jax.set_mesh(MeshSpec(ici={"context": num_devices}).build(jax.devices()[:num_devices])):
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(None, "context"))
    q = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32, sharding=sharding)
    return jax.jit(jax.grad(value, (0, 1, 2))).lower(q, q, q).compile()


@both
def test_half_of_the_products_are_computed(kernel):
  """Of 2C x 2C / C blocks a device computes 2C + 1 of each product: two forward, five back."""
  every_pair = 7 * 2 * 64 * 64 * 16 / 4
  got = hlo.matmul_flops(hlo.text(compiled(kernel, 4, 64)))
  assert got / every_pair == 9 / 16


@both
def test_a_window_leaves_little(kernel):
  """Of a piece of 2 queries, a window of 5 shows 6 keys."""
  got = hlo.matmul_flops(hlo.text(compiled(kernel, 4, 64, window=5)))
  assert got == 7 * 2 * 16 * 6 * 16


@both
def test_no_logits_are_saved(kernel, monkeypatch):
  """Not even by those who save all products."""
  monkeypatch.setattr(context_parallel, "_PIECE", 64)

  def temporary(length):
    analysis: Any = compiled(kernel, 4, length, policy="dots_saveable").memory_analysis()
    return analysis.temp_size_in_bytes

  assert temporary(4096) < 5 * temporary(1024)
