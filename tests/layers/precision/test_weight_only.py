# SPDX-License-Identifier: Apache-2.0
"""Weights in few bits, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.errors import UserError
from paxlike.layers import Linear
from paxlike.layers.module import Definition
from paxlike.layers.precision import weight_only as q

LEVELS = np.array(q._NF4, np.float32)


# By scheme: rows of a block and the largest whole number.
KINDS = {"int8": (64, 127), "int8_columns": (256, 127), "int4": (128, 7), "nf4": (64, None)}


def reference(w: np.ndarray, *, kind: str) -> np.ndarray:
  """Rounds each column of [D, F] in blocks of rows."""
  found = np.zeros_like(w)
  rows, most = KINDS[kind]
  for first in range(0, len(w), rows):
    for column in range(w.shape[1]):
      block = w[first : first + rows, column]
      scale = np.abs(block).max() or 1
      if most is not None:
        rounded = np.round(block / scale * most) / most
      else:
        rounded = LEVELS[np.abs(block[:, None] / scale - LEVELS).argmin(1)]
      found[first : first + rows, column] = scale * rounded
  return found


@pytest.mark.parametrize(
  ("kind", "error", "size"),
  [
    ("int8", 0.0059, 8.5),
    ("int8_columns", 0.0069, 8.125),
    ("int4", 0.116, 4.25),
    ("nf4", 0.0917, 4.5),
  ],
)
def test_blocks_are_rounded_as_by_numpy(kind, error, size):
  w = np.array(jax.random.normal(jax.random.key(0), (256, 128)))
  w[64:128, 3] = 0
  held = getattr(q, kind)(jnp.array(w), axis=-2)
  found = np.asarray(held.dequantized(jnp.float32))
  np.testing.assert_allclose(found, reference(w, kind=kind), atol=1e-6)
  lost, whole = q.squares(jnp.array(w), held)
  # Of a normal distribution.
  assert np.sqrt(lost / whole) == pytest.approx(error, rel=0.02)
  bits = held.scales.size * 32 + held.values.size * 8
  assert bits / w.size == size


@pytest.mark.parametrize("num_rows", [1, 3, 32, 65])
@pytest.mark.parametrize("scheme", [q.int8, q.int8_columns, q.int4])
def test_few_rows_are_multiplied_with_what_is_held(scheme, num_rows):
  w = jax.random.normal(jax.random.key(0), (2, 128, 48))
  x = jax.random.normal(jax.random.key(1), (num_rows, 256))
  held = scheme(w, axis=-2)
  expected = x @ held.dequantized(jnp.float32).reshape(256, 48)
  np.testing.assert_allclose(held.multiply(x), expected, rtol=1e-4, atol=1e-3)
  assert held.reads_less(num_rows) == (num_rows <= (32 if scheme is q.int8 else 64))


@pytest.mark.slow
def test_blocks_lie_along_the_inputs_whatever_stands_before():
  w = jax.random.normal(jax.random.key(0), (3, 4, 128, 32))
  held = q.nf4(w, axis=-2)
  assert held.values.shape == (3, 4, 128, 16) and held.scales.shape == (3, 4, 2, 32)
  one = q.nf4(w[1, 2], axis=-2)
  np.testing.assert_array_equal(held.dequantized(jnp.float32)[1, 2], one.dequantized(jnp.float32))
  assert q.int8(w[..., :30, :], axis=-2).scales.shape == (3, 4, 15, 32)
  with pytest.raises(UserError, match="use int8"):
    q.nf4(w[..., :31], axis=-2)


@pytest.mark.parametrize("scheme", [q.int8, q.int8_columns, q.int4, q.nf4])
def test_a_map_multiplies_with_what_is_held_and_keeps_no_whole_of_it(scheme):
  inputs, outputs = {"heads": 2, "head": 64}, {"model": 96}
  definition = Definition(Linear(inputs, outputs, role="output", scheme=scheme), trained="none")
  spec = definition.weights["w"]
  w = jax.random.normal(jax.random.key(0), spec.shape)
  held = spec.stored(w)
  assert isinstance(held, q.Quantized) and held.scales.shape == (2, 1, 96)
  x = jax.random.normal(jax.random.key(1), (3, 2, 64))

  def apply(x):
    return definition.bind({"w": held})(x)

  y, backward = jax.vjp(apply, x)
  whole = np.asarray(held.dequantized(jnp.float32)).reshape(128, 96)
  np.testing.assert_allclose(y, np.asarray(x).reshape(3, 128) @ whole, rtol=1e-4, atol=1e-4)
  dy = np.ones((3, 96), np.float32)
  np.testing.assert_allclose(
    backward(jnp.array(dy))[0].reshape(3, 128), dy @ whole.T, rtol=1e-4, atol=1e-4
  )
  kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.dtype == jnp.float32]
  assert max(leaf.size for leaf in kept) < w.size


def test_what_is_trained_is_held_whole():
  linear = Linear({"model": 64}, {"ffn": 64}, role="up", scheme=q.nf4)
  spec = Definition(linear).weights["w"]
  w = jnp.ones((64, 64))
  assert spec.stored(w) is w and spec.stored_dtype == jnp.float32
