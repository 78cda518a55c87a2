# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state: packing and sharding change nothing, and chunks equal steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.packed_layers import DIM, LAYERS, MESHES, MIXERS, differences, drawn, on, tokens

from paxlike.layers import Context, ShortConv
from paxlike.layers.recurrent import chunk_scan, delta_rule, shards, ssd


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_sequence_equals_its_documents_alone(name, shape):
  found = differences(name, shape)
  assert all(difference < 1e-5 for difference in found), found


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


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_short_convolution_has_the_gradients_of_its_sum(dtype, is_packed):
  definition, _ = drawn(lambda: ShortConv({"heads": 2, "head": 3}, use_bias=True))
  random = np.random.default_rng(0)
  x, dy = (jnp.asarray(random.normal(size=(2, 9, 2, 3)), dtype) for _ in range(2))
  w, b = jnp.asarray(random.normal(size=(2, 3, 4))), jnp.asarray(random.normal(size=(2, 3)))
  segments_BT = jnp.array([[1, 1, 1, 1, 2, 2, 3, 0, 0], [1] * 6 + [2] * 3])

  def own(x, w, b):
    return definition.bind({"w": w, "b": b})(x, segments_BT if is_packed else None)

  def summed(x, w, b):
    y = jnp.zeros(x.shape)
    for shift in range(4):
      before = jnp.pad(x, ((0, 0), (shift, 0), (0, 0), (0, 0)))[:, :9].astype(jnp.float32)
      if is_packed:
        segments = jnp.pad(segments_BT, ((0, 0), (shift, 0)))[:, :9]
        before = jnp.where((segments == segments_BT)[..., None, None], before, 0)
      y += before * w[..., 3 - shift]
    return jax.nn.silu(y + b).astype(dtype)

  (y, gradients), (expected, expected_gradients) = (
    (function(x, w, b), jax.vjp(function, x, w, b)[1](dy)) for function in (own, summed)
  )
  error = 2e-6 if dtype == jnp.float32 else 8e-3
  for a, b in zip((y, *gradients), (expected, *expected_gradients), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(*(np.asarray(c, np.float64) for c in (a, b)), rtol=error, atol=error)
