# SPDX-License-Identifier: Apache-2.0
"""Attention by tokamax: by its implementation for any device, where tokamax is installed."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import tokamax
from paxlike.layers.attention import kernels
from paxlike.layers.attention.tokamax import starts


@pytest.fixture
def on_any_device():
  """The kernel, by plain XLA operations."""
  pytest.importorskip("tokamax")
  return functools.partial(tokamax, implementation="xla")


def inputs(heads=4, kv_heads=2, length=32):
  random = np.random.default_rng(0)
  q = random.normal(size=(2, length, heads, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, length, kv_heads, 8)).astype(np.float32)
  segments = np.sort(random.integers(1, 4, (2, length))).astype(np.int32)
  bias = random.normal(size=(heads, length, length)).astype(np.float32)
  return (q, k, v), segments, bias


def output_and_gradients(kernel, arrays, segments, **options):
  def value(q, k, v):
    y = kernel(q, k, v, scale=0.3, segments_BT=segments, **options)
    return jnp.sin(y).sum(), y

  return jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(*arrays)


def assert_alike(got, expected):
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  ("options", "has_bias"),
  [({}, False), ({"window": 5}, False), ({"window": 5, "soft_cap": 2.0}, False), ({}, True)],
)
def test_it_equals_plain_attention(on_any_device, packed, options, has_bias):
  arrays, segments, bias = inputs()
  segments = segments if packed else None
  options = {**options, "bias_NTS": bias if has_bias else None}
  expected = output_and_gradients(kernels.xla, arrays, segments, **options)
  assert_alike(output_and_gradients(on_any_device, arrays, segments, **options), expected)


def test_eight_devices_equal_one(on_any_device):
  arrays, segments, bias = inputs()
  options = {"window": 5, "bias_NTS": bias}
  expected = output_and_gradients(on_any_device, arrays, segments, **options)
  with jax.set_mesh(MeshSpec(ici={"data": 2, "tensor": 4}).build()):
    got = output_and_gradients(on_any_device, arrays, segments, **options)
  assert_alike(got, expected)


def test_what_the_device_has_not_is_said():
  pytest.importorskip("tokamax")
  q = jnp.ones((1, 8, 4, 64), jnp.bfloat16)
  with pytest.raises(UserError, match=r"kernel=tokamax: .*Use xla_chunked"):
    tokamax(q, q, q, scale=1.0, segments_BT=None)


def test_where_runs_began():
  segments = jnp.array([[1, 1, 2, 2, 2, 0], [3, 4, 4, 3, 3, 3]])
  assert starts(segments).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 3, 3, 3]]


def test_it_may_be_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, "tokamax", None)
  q = jnp.ones((1, 8, 4, 64), jnp.bfloat16)
  with pytest.raises(UserError, match=r"pip install 'paxlike\[tokamax\]'"):
    tokamax(q, q, q, scale=1.0, segments_BT=None)


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"sinks_N": jnp.ones(4)}, "not support sinks"),
    ({"bias_NTS": jnp.ones((4, 8, 8)), "soft_cap": 2.0}, "bias_NTS with soft_cap"),
  ],
)
def test_what_tokamax_has_not_is_refused(options, says):
  q = jnp.ones((1, 8, 4, 64), jnp.bfloat16)
  with pytest.raises(UserError, match=says):
    tokamax(q, q, q, scale=1.0, segments_BT=None, **options)
