# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that devices share: they equal one device, and compute half."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers import attention_kernels, context_attention
from paxlike.layers.context_attention import gathered, ring
from paxlike.mesh import MeshSpec

LENGTH = 32
both = pytest.mark.parametrize("kernel", [ring, gathered], ids=attention_kernels.name_of)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
  """A chunk is several pieces of queries."""
  monkeypatch.setattr(context_attention, "_PIECE", 2)


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
    {"window": 3},
    {"window": 13},
    {"soft_cap": 0.7},
    {"has_sinks": True},
    {"packed": True, "window": 7, "soft_cap": 2.0, "has_sinks": True},
  ],
  ids=lambda options: ", ".join(options) or "plain",
)
def test_devices_that_share_a_sequence_equal_one(kernel, options):
  expected = output_and_gradients(attention_kernels.xla, inputs(), **options)
  assert_alike(on({"context": 4}, kernel, inputs(), **options), expected)
