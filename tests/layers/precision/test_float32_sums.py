# SPDX-License-Identifier: Apache-2.0
"""Gradients that are sums of many bfloat16 numbers, as exact as the last bits of their result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.compilation import hlo_text
from paxlike.devices import topology
from paxlike.devices.mesh import MeshSpec, sharding
from paxlike.layers import ExpertLinear, Linear, PositionEmbedding, module
from paxlike.layers.module import Definition
from paxlike.layers.precision import float32_sums

ROWS, WIDTH = 4096, 8
# What bfloat16 itself rounds.
close = functools.partial(np.testing.assert_allclose, rtol=2**-8, atol=1e-6)
DY = (1 + np.random.default_rng(0).random((ROWS, WIDTH))).astype(np.float32)


def gradient(function, weight):
  def value(weight):
    return (function(weight).reshape(ROWS, WIDTH) * jnp.asarray(DY, jnp.bfloat16)).sum()

  found = jax.grad(lambda weight: value(weight).astype(jnp.float32))(weight)
  return np.asarray(found, np.float64)


EXACT = np.asarray(jnp.asarray(DY, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("shape", [(WIDTH,), (64, WIDTH), (1, 64, WIDTH)])
def test_what_is_added_to_many_rows(shape):
  x = jnp.zeros((ROWS // 64, 64, WIDTH), jnp.bfloat16)
  b = jnp.zeros(shape, jnp.bfloat16)
  expected = EXACT.reshape(-1, 64, WIDTH).sum(0)
  expected = expected.sum(0) if len(shape) == 1 else expected.reshape(shape)
  close(gradient(lambda b: float32_sums.add(x, b), b), expected)


def test_a_row_that_is_looked_up_often():
  rows = jnp.arange(ROWS) % 3 // 2
  table = jnp.zeros((5, WIDTH), jnp.bfloat16)
  expected = np.zeros((5, WIDTH))
  np.add.at(expected, np.asarray(rows), EXACT)
  found = gradient(lambda table: float32_sums.lookup(table, rows, ("vocab", "model")), table)
  close(found, expected)


def test_devices_exchange_the_rows_of_gradients_as_they_are():
  with topology.target("v5e-4"):
    devices = MeshSpec(ici={"fsdp": 4}).build()
    ids = jax.ShapeDtypeStruct((8, 512), "int32", sharding=sharding(devices, ("batch",), (8,)))
    table_dims, x_dims = ("vocab", "model"), ("batch", "time", None)
    table = sharded(devices, table_dims, (4096, 256))

    def gradient(table, ids, dy):
      return jax.vjp(lambda table: float32_sums.lookup(table, ids, table_dims), table)[1](dy)

    with jax.set_mesh(devices):
      lowered = jax.jit(gradient).lower(table, ids, sharded(devices, x_dims, (8, 512, 256)))
      text = lowered.compile().as_text() or ""
  [exchange] = (
    one
    for lines in hlo_text.computations(text).values()
    for one in lines
    if one.operation.startswith("all-to-all")
  )
  assert exchange.outputs[0].dtype == "bf16"


def sharded(devices, dims, shape):
  return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding(devices, dims, shape))


def linear():
  layer = Linear({"in": 2}, {"out": WIDTH}, role="up", use_bias=True, dtype=jnp.bfloat16)
  return layer, lambda layer: layer(X), EXACT.sum(0)


def experts(apply, first):
  sizes = (2, {"in": 2}, {"out": WIDTH}, 1)
  layer = ExpertLinear(*sizes, role="up", use_bias=True, dtype=jnp.bfloat16)
  return layer, apply, np.stack([EXACT[:first].sum(0), EXACT[first:].sum(0)])


def positions():
  layer = PositionEmbedding(WIDTH, max_len=3, init=module.zeros, dtype=jnp.bfloat16)
  rows = np.zeros((3, WIDTH))
  rows[1] = EXACT.sum(0)
  return layer, lambda layer: layer(3, jnp.ones(ROWS, int)), rows


X = jnp.zeros((ROWS, 2), jnp.bfloat16)
SIZES = jnp.array([ROWS // 4, 3 * ROWS // 4])


@pytest.mark.parametrize(
  ("case", "name"),
  [
    (linear(), "b"),
    (experts(lambda layer: layer.sorted(X, SIZES), ROWS // 4), "b"),
    (experts(lambda layer: layer.placed(X.reshape(2, -1, 2)), ROWS // 2), "b"),
    (positions(), "table"),
  ],
)
def test_layers_sum_so(case, name):
  layer, apply, expected = case
  definition = Definition(layer)
  params = {key: jnp.zeros(w.shape, jnp.bfloat16) for key, w in definition.weights.items()}
  found = gradient(lambda w: apply(definition.bind(params | {name: w})), params[name])
  close(found, expected)
