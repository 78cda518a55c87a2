# SPDX-License-Identifier: Apache-2.0
"""Gradients that are sums of many bfloat16 numbers, as exact as the last bits of their result."""

import functools
import types

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


TABLE_DIMS = ("vocab", "model")


def value_and_gradient(table, ids, dy):
  value, backward = jax.vjp(lambda table: float32_sums.lookup(table, ids, TABLE_DIMS), table)
  return value, backward(dy)[0]


# Each of four devices has 64 of the table's 256 columns, padded to 128. Those of 4 x 2,048 tokens
# are as large as the table.
@pytest.mark.parametrize(("length", "gathers"), [(2047, False), (2048, True)])
def test_tpus_gather_a_table_that_is_smaller_than_the_rows(length, gathers):
  with topology.target("v5e-4"):
    devices = MeshSpec(ici={"fsdp": 4}).build()
    shape = (4, length)
    ids = jax.ShapeDtypeStruct(shape, "int32", sharding=sharding(devices, ("batch", None), shape))
    table = sharded(devices, TABLE_DIMS, (4096, 256))
    dy = sharded(devices, ("batch", "time", None), (*shape, 256))
    with jax.set_mesh(devices):
      text = jax.jit(value_and_gradient).lower(table, ids, dy).compile().as_text() or ""
  lines = [one for lines in hlo_text.computations(text).values() for one in lines]
  exchanges = [one for one in lines if one.operation.startswith("all-to-all")]
  # Rows are exchanged in their own dtype.
  assert {one.outputs[0].dtype for one in exchanges} == (set() if gathers else {"bf16"})
  # All-gathers of ids are int32.
  sent = [array for one in lines if one.operation.startswith("all-gather") for array in one.outputs]
  assert any(array.dtype == "bf16" and 256 in array.dims for array in sent) == gathers


@pytest.mark.parametrize(
  ("vocab_size", "batch_size", "ici"),
  [
    (64, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
    (63, 8, {"data": 2, "fsdp": 2, "tensor": 2}),  # `tensor` does not divide it.
    (64, 3, {"data": 2, "fsdp": 2, "tensor": 2}),  # Nor do `data` and `fsdp`.
    (64, 8, {"fsdp": 2, "expert": 2, "context": 2}),
  ],
)
def test_a_gathered_table_gives_the_same_rows_and_gradient(
  monkeypatch, vocab_size, batch_size, ici
):
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(vocab_size, 16)), jnp.float32)
  ids = jnp.asarray(rng.integers(vocab_size, size=(batch_size, 32)), jnp.int32)
  dy = jnp.asarray(rng.normal(size=(batch_size, 32, 16)), jnp.float32)
  expected = value_and_gradient(table, ids, dy)
  devices = MeshSpec(ici=ici).build()
  monkeypatch.setattr(topology, "devices", lambda: [types.SimpleNamespace(platform="tpu")])
  with jax.set_mesh(devices):
    lowered = jax.jit(value_and_gradient).lower(table, ids, dy)
    compiled = lowered.compile()
  found = compiled(table, ids, dy)
  assert "all_gather" in lowered.as_text()
  computations = hlo_text.computations(compiled.as_text() or "").values()
  sums = [one for lines in computations for one in lines if one.operation.startswith("all-reduce")]
  # Devices that do not share the table sum the columns that they keep, not all of them.
  assert not [one for one in sums for array in one.outputs if array.dims[1:] == (16,)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


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
