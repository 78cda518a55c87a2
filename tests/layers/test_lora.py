# SPDX-License-Identifier: Apache-2.0
"""An adapted linear map is x W + scale (x A) B, and only A and B are trained."""

import functools

import jax
import numpy as np
import pytest

from paxlike import layers
from paxlike.layers.call_context import Context

RANK, SCALE = 3, 1.5


def make(inputs, outputs, *, kind=layers.Lora, **options):
  adapter = functools.partial(kind, rank=RANK, scale=SCALE, **options)
  return layers.Definition(
    layers.Linear(inputs, outputs, role="query", lora=adapter), trained=layers.lora.WEIGHTS
  )


def values(definition, seed=0):
  random = np.random.default_rng(seed)
  return {
    name: random.normal(size=spec.shape).astype(np.float32)
    for name, spec in definition.weights.items()
  }


@pytest.mark.parametrize(
  ("inputs", "outputs", "kind"),
  [
    ({"model": 6}, {"heads": 4, "head": 5}, layers.Lora),
    ({"heads": 4, "head": 5}, {"model": 6}, layers.Lora),
    ({"rank": 6}, {"ffn": 7}, layers.Lora),
    ({"model": 6}, {"heads": 4, "head": 5}, layers.Dora),
    ({"heads": 4, "head": 5}, {"model": 6}, layers.Dora),
  ],
)
def test_it_is_the_sum_of_two_products_and_with_dora_scaled(inputs, outputs, kind):
  definition = make(inputs, outputs, kind=kind)
  weights = values(definition)
  x = np.random.default_rng(1).normal(size=(2, 3, *inputs.values())).astype(np.float32)
  linear = definition.bind(weights)
  flat = x.reshape(2, 3, -1).astype(np.float64)
  w = weights["w"].reshape(flat.shape[-1], -1)
  a, b = weights["lora.a"].reshape(-1, RANK), weights["lora.b"].reshape(RANK, -1)
  v = w + SCALE * a @ b
  if kind is layers.Dora:
    v *= (np.linalg.norm(w, axis=0) + weights["lora.magnitude"].ravel()) / np.linalg.norm(v, axis=0)
  expected = (flat @ v).reshape(2, 3, *outputs.values())
  np.testing.assert_allclose(linear(x), expected, rtol=1e-4, atol=1e-4)
  merged = linear.matrix().reshape(w.shape)
  np.testing.assert_allclose(flat @ merged, expected.reshape(2, 3, -1), rtol=1e-4, atol=1e-4)


def test_only_the_adapter_is_trained_and_what_is_frozen_needs_no_float32():
  definition = make({"model": 6}, {"ffn": 7})
  assert definition.optimized(definition.weights).keys() == {"lora.a", "lora.b"}
  assert definition.frozen == ["w"]
  assert (definition.num_trained, definition.num_params) == (6 * 3 + 3 * 7, 6 * 3 + 3 * 7 + 42)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [layers.Lora, layers.Dora])
def test_a_new_adapter_is_the_base_bit_for_bit(kind, dtype):
  definition = make({"model": 6}, {"ffn": 7}, kind=kind, dtype=dtype)
  weights = values(definition)
  new = {n: np.zeros_like(w) for n, w in weights.items() if n in ("lora.b", "lora.magnitude")}
  weights["w"][:, 2] = 0  # Of an output that is always 0.
  x = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)
  linear = definition.bind(weights | new)
  np.testing.assert_array_equal(linear(x), linear.multiply(x.astype(linear.dtype)))
  np.testing.assert_array_equal(linear.matrix(), linear.frozen_matrix())


@pytest.mark.parametrize("kind", [layers.Lora, layers.Dora])
def test_dropout_is_of_what_the_adapter_is_given(kind):
  dropout = functools.partial(layers.Dropout, rate=0.5)
  definition = make({"model": 64}, {"ffn": 7}, kind=kind, dropout=dropout)
  weights = values(definition)
  linear, x = definition.bind(weights), np.ones((1, 1, 64), np.float32)
  without = linear(x, Context())
  dropped = [linear(x, Context(dropout=jax.random.key(seed))) for seed in range(400)]
  assert not np.allclose(dropped[0], dropped[1])
  np.testing.assert_allclose(np.mean(dropped, 0), without, atol=2.0)
  for name in definition.optimized(weights).keys() - {"lora.a"}:
    weights[name] = np.zeros_like(weights[name])
  np.testing.assert_allclose(
    definition.bind(weights)(x, Context(dropout=jax.random.key(0))), x @ weights["w"], rtol=1e-5
  )
