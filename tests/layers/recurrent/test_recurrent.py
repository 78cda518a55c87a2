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

from paxlike import layers
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import Context, Definition
from paxlike.layers.recurrent import chunk_scan, delta_rule, shards, ssd
from paxlike.layers.recurrent.short_conv import ShortConv

DIM, LENGTHS = 24, (37, 51, 40)


class Row(NamedTuple):
  """A layer: `build` returns its abstract module, `call` its outputs [B, T, ...]."""

  build: Callable[[], Any]
  call: Callable[[Any, Any, Context], jax.Array]


def mix(module, x_BTD, context):
  return module(x_BTD, context)[0]


def convolve(module, x_BTD, context):
  return module(x_BTD.reshape(*x_BTD.shape[:2], 4, 6), context.segments_BT)


def gated_delta_net() -> Any:
  roles = ("query", "key", "value", "output_gate", "beta", "decay", "output")
  linears: Any = {role: functools.partial(layers.Linear, role=role) for role in roles}
  return layers.GatedDeltaNet(
    DIM,
    num_heads=4,
    num_key_heads=2,
    key_dim=6,
    value_dim=5,
    chunk=16,
    conv=layers.ShortConv,
    norm=layers.RmsNorm,
    **linears,
  )


def mamba2() -> Any:
  roles = ("query", "key", "value", "gate", "step", "output")
  linears: Any = {role: functools.partial(layers.Linear, role=role) for role in roles}
  return layers.Mamba2(
    DIM,
    num_heads=4,
    head_dim=6,
    state_dim=5,
    num_groups=2,
    chunk=16,
    conv=functools.partial(layers.ShortConv, use_bias=True),
    **linears,
    norm=layers.GroupedRmsNorm,
  )


LAYERS = {
  "gated_delta_net": Row(gated_delta_net, mix),
  "mamba2": Row(mamba2, mix),
  "short_conv": Row(lambda: ShortConv({"heads": 4, "head": 6}, use_bias=True), convolve),
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


@functools.cache
def documents_alone(name):
  """Returns (outputs, gradients of inputs, gradients of weights) of documents by themselves."""
  inputs = zip(*(np.split(z, np.cumsum(LENGTHS)[:-1], axis=1) for z in data()), strict=True)
  each = [outputs_and_gradients(LAYERS[name], x, None, dy) for x, dy in inputs]
  outputs, of_x = (np.concatenate(z, 1) for z in zip(*((y, g[1]) for g, y in each), strict=True))
  return outputs, of_x, jax.tree.map(lambda *z: sum(z), *(g[0] for g, _ in each))


def data():
  return tokens(2, sum(LENGTHS), DIM), tokens(2, sum(LENGTHS), DIM)[::-1] / 8


@pytest.mark.parametrize("shape", [{}, {"context": 2}, {"context": 4}, {"tensor": 2, "context": 2}])
@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_sequence_equals_its_documents_alone(name, shape):
  x, dy = data()
  segments = np.repeat([[1, 2, 3]], LENGTHS, axis=1).repeat(2, axis=0).astype(np.int32)
  (of_weights, of_x), y = on(shape, outputs_and_gradients, LAYERS[name], x, segments, dy)
  outputs, of_inputs, expected = documents_alone(name)
  np.testing.assert_allclose(y, outputs, atol=1e-5)
  np.testing.assert_allclose(of_x, of_inputs, atol=1e-5)
  for weight, gradient in of_weights.items():
    largest = np.abs(expected[weight]).max()
    np.testing.assert_allclose(gradient, expected[weight], atol=1e-5 * max(1, largest))


@pytest.mark.parametrize("name", MIXERS)
def test_decoding_equals_the_whole_sequence(name):
  """Prompts of several lengths are prefilled; a free slot, at position -1, keeps its cache."""
  definition, weights = drawn(LAYERS[name].build)
  mixer, x = definition.bind(weights), tokens(3, 30, DIM)
  whole = jax.jit(lambda x: mixer(x, Context())[0])(x)
  lengths, steps = np.array([5, 20, 2]), 6

  @jax.jit
  def called(x, positions, cache):
    return mixer(x, Context(positions_BT=positions), cache)[:2]

  positions = np.arange(20)[None] + np.zeros((3, 1), np.int32)
  positions = np.where(positions < lengths[:, None], positions, -1)
  y, cache = called(x[:, :20], positions, mixer.empty_cache(3, 30, jnp.float32))
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(y[row, :length], whole[row, :length], atol=1e-5)
  for step in range(steps):
    at = (lengths + step)[:, None]
    y, cache = called(np.take_along_axis(x, at[..., None], 1), at, cache)
    expected = np.take_along_axis(whole, at[..., None], 1)
    np.testing.assert_allclose(y, expected, atol=1e-5)
  _, same = called(x[:, :1], np.full((3, 1), -1), cache)
  jax.tree.map(np.testing.assert_array_equal, same, cache)


def test_the_gated_delta_rule_equals_its_recurrence():
  random: Any = np.random.default_rng(0)
  (B, T, K, N, H, V), f = (2, 45, 2, 4, 6, 5), np.float32
  q, k = (random.normal(size=(B, T, K, H)).astype(f) for _ in range(2))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v, first = random.normal(size=(B, T, N, V)).astype(f), random.normal(size=(B, N, H, V)).astype(f)
  g, beta = -random.exponential(size=(B, T, N)).astype(f), random.random((B, T, N)).astype(f)
  k[:, 8:30] = k[:, 8:9]  # Repeated keys without decay are the hardest system of equations.
  g[:, 8:30], beta[:, 8:30] = 0, 1
  rule = jax.jit(functools.partial(delta_rule.chunked, chunk=32, num_devices=1))
  got = rule(v, q, k, g, beta, None, first)
  q, k, state = np.repeat(q, 2, axis=2), np.repeat(k, 2, axis=2), first
  for t in range(T):
    state = state * np.exp(g[:, t, :, None, None])
    new = beta[:, t, :, None] * (v[:, t] - np.einsum("bnhv,bnh->bnv", state, k[:, t]))
    state = state + k[:, t, :, :, None] * new[:, :, None]
    expected = np.einsum("bnhv,bnh->bnv", state, q[:, t])
    np.testing.assert_allclose(got[0][:, t], expected, atol=1e-5)
  np.testing.assert_allclose(got[1], state, atol=1e-5)


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
  y, last = jax.jit(functools.partial(ssd.chunked, chunk=16, num_devices=1))(*given, segments)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_allclose(last, state, atol=1e-5)
