# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state: packing and sharding change nothing, and chunks equal steps."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.devices.mesh import MeshSpec
from paxlike.layers import Context, Definition, Linear
from paxlike.layers.recurrent import chunk_scan, shards, ssd
from paxlike.layers.recurrent.mamba2 import GroupedRmsNorm, Mamba2
from paxlike.layers.recurrent.short_conv import ShortConv

DIM = 24


class Row(NamedTuple):
  """A layer: `build` returns its abstract module, `call` its outputs [B, T, ...]."""

  build: Callable[[], Any]
  call: Callable[[Any, Any, Context], jax.Array]


def mix(module, x_BTD, context):
  return module(x_BTD, context)[0]


def convolve(module, x_BTD, context):
  return module(x_BTD.reshape(*x_BTD.shape[:2], 4, 6), context.segments_BT)


def mamba2():
  linear = functools.partial(Linear, role="any")
  maps = dict.fromkeys(("gate", "value", "key", "query", "step", "output"), linear)
  return Mamba2(
    DIM,
    num_heads=4,
    head_dim=6,
    state_dim=5,
    num_groups=2,
    conv=functools.partial(ShortConv, use_bias=True),
    norm=GroupedRmsNorm,
    chunk=16,
    **maps,
  )


LAYERS = {
  "short_conv": Row(lambda: ShortConv({"heads": 4, "head": 6}, use_bias=True), convolve),
  "mamba2": Row(mamba2, mix),
}
MIXERS = {name: row for name, row in LAYERS.items() if row.call is mix}


def drawn(build):
  """Returns (definition, weights around those that are usual)."""
  definition, random = Definition(build()), np.random.default_rng(0)
  weights = {
    name: np.float32(random.normal(size=spec.shape) / math.sqrt(max(spec.fan_in, 1)))
    for name, spec in definition.weights.items()
  }
  return definition, weights


def tokens(*shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def outputs_and_gradients(row, x, segments, dy):
  definition, weights = drawn(row.build)

  def value(weights, x):
    y = row.call(definition.bind(weights), x, Context(segments_BT=segments))
    return (y.reshape(*y.shape[:2], -1) * dy).sum(), y

  return jax.jit(jax.grad(value, (0, 1), has_aux=True))(weights, x)


def on(shape, function, *arguments):
  devices = jax.devices()[: math.prod(shape.values())]
  with jax.set_mesh(MeshSpec(ici=shape).build(devices)):
    return function(*arguments)


@pytest.mark.parametrize("shape", [{}, {"context": 2}, {"context": 4}, {"tensor": 2, "context": 2}])
@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_sequence_equals_its_documents_alone(name, shape):
  lengths = [37, 51, 40]
  x, dy = tokens(2, 128, DIM), tokens(2, 128, DIM)[::-1]
  segments = np.repeat([[1, 2, 3]], lengths, axis=1).repeat(2, axis=0).astype(np.int32)
  (of_weights, of_x), y = on(shape, outputs_and_gradients, LAYERS[name], x, segments, dy)
  alone = [
    outputs_and_gradients(LAYERS[name], a, None, b)
    for a, b in zip(*(np.split(z, np.cumsum(lengths)[:-1], axis=1) for z in (x, dy)), strict=True)
  ]
  np.testing.assert_allclose(y, np.concatenate([y for _, y in alone], 1), atol=1e-5)
  np.testing.assert_allclose(of_x, np.concatenate([g[1] for g, _ in alone], 1), atol=1e-5)
  for weight, gradient in of_weights.items():
    expected = sum(g[0][weight] for g, _ in alone)
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_states_are_passed_from_chunk_to_chunk(scalar, devices):
  random: Any = np.random.default_rng(0)
  transitions = random.normal(size=(8, 2, 3) if scalar else (8, 2, 3, 4, 4)) / 2
  updates, state = random.normal(size=(8, 2, 3, 4, 5)), random.normal(size=(2, 3, 4, 5))
  expected, first = [], state
  for a, u in zip(transitions, updates, strict=True):
    expected.append(state)
    state = (a[..., None, None] * state if scalar else a @ state) + u

  def of_device(a, u, *, num_devices):
    before, last = chunk_scan.states(
      jnp.moveaxis(a, 1, 0), jnp.moveaxis(u, 1, 0), jnp.float32(first), num_devices=num_devices
    )
    return jnp.moveaxis(before, 0, 1), shards.of_last(last, num_devices)

  a, u = (np.moveaxis(z, 0, 1).astype(np.float32) for z in (transitions, updates))
  dims = [("batch", "time", *(None,) * (z.ndim - 2)) for z in (a, u)]
  outputs = [(u.shape, dims[1]), (state.shape, (None,) * 4)]
  call = functools.partial(shards.on_shards, of_device, [(a, dims[0]), (u, dims[1])], outputs)
  before, last = on({"context": devices}, jax.jit(call))
  np.testing.assert_allclose(np.moveaxis(before, 1, 0), expected, atol=1e-5)
  np.testing.assert_allclose(last, state, atol=1e-5)


def test_the_chunks_of_mamba2_equal_its_recurrence():
  random: Any = np.random.default_rng(0)
  B, T, N, G, H, S = 2, 61, 6, 2, 4, 5
  v, k, q = (random.normal(size=(B, T, *dims)) for dims in ((N, H), (G, S), (G, S)))
  decays = -np.exp(3 * random.normal(size=(B, T, N)))  # Some keep all, some keep nothing.
  segments = np.sort(random.integers(0, 4, (B, T)), axis=1)
  state, expected = np.zeros((B, N, H, S)), np.zeros((B, T, N, H))
  for t in range(T):
    same = segments[:, t] == segments[:, t - 1] if t else np.zeros(B)
    key, query = (np.repeat(x[:, t], N // G, axis=1)[:, :, None] for x in (k, q))
    state = np.exp(decays[:, t])[..., None, None] * state * same[:, None, None, None]
    state += v[:, t, ..., None] * key
    expected[:, t] = (state * query).sum(-1)
  given = [np.float32(x) for x in (v, decays, k, q)]
  y, last = ssd.chunked(*given, segments, chunk=16, num_devices=1)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_allclose(last, state, atol=1e-5)
