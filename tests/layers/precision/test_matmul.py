# SPDX-License-Identifier: Apache-2.0
"""Products that keep the dims of heads are plain, and so is each row of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jaxprs

from paxlike.devices import topology
from paxlike.layers import Definition, ExpertLinear, Fp8, Int8, Linear
from paxlike.layers.moe.experts import BatchedForm
from paxlike.layers.precision.matmul import LinearForm

DOTS = {"exact": None, "fp8": Fp8(), "int8": Int8()}


def multiply(dot, product, x, w):
  if dot is None:
    return product.outputs(x, w, x.dtype)
  return dot(product, x, w, dot.quantized(w))


def check(got, expected, *, dot):
  """FP8 has one scale for all rows; rounding by chance draws anew for another place."""
  largest = np.abs(expected).max()
  tolerance = {"exact": 1e-6, "fp8": 0.05, "int8": 0.03}[dot]
  np.testing.assert_allclose(got, expected, atol=tolerance * largest)


@pytest.fixture(params=DOTS)
def name(request):
  return request.param


def arrays(*shapes):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("leading", [(3, 5), (5,), ()])
@pytest.mark.parametrize(
  ("inputs", "outputs"),
  [
    ({"model": 6}, {"heads": 2, "head": 4}),
    ({"heads": 2, "head": 4}, {"model": 6}),
    ({"heads": 2, "head": 4}, {"groups": 3, "group": 2}),
  ],
)
def test_tpus_multiply_heads_without_flattening_them(inputs, outputs, leading):
  definition = Definition(Linear(inputs, outputs, role="query"))
  x, dy, w = arrays(
    (*leading, *inputs.values()),
    (*leading, *outputs.values()),
    (*inputs.values(), *outputs.values()),
  )

  def both():
    y, backward = jax.vjp(lambda x, w: definition.bind({"w": w})(x), x, w)
    return y, *backward(dy)

  expected = both()
  with topology.target("v5e-4"):
    found = both()
    program = jax.make_jaxpr(both)().jaxpr
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  dots = [one for one, _ in jaxprs.equations(program) if one.primitive.name == "dot_general"]
  assert [dot.outvars[0].aval.shape for dot in dots] == [dy.shape, x.shape, w.shape]


@pytest.mark.slow
def test_placed_is_plain_for_each_expert(name):
  x, w, dy = arrays((3, 16, 8), (3, 8, 5), (3, 16, 5))
  w *= jnp.array([1.0, 100.0, 0.01])[:, None, None]
  y, back = jax.vjp(lambda x, w: multiply(DOTS[name], BatchedForm(), x, w), x, w)
  dx, dw = back(dy)
  for e in range(3):
    alone, back = jax.vjp(lambda x, w: multiply(DOTS[name], LinearForm(), x, w), x[e], w[e])
    for got, expected in zip((y[e], dx[e], dw[e]), (alone, *back(dy[e])), strict=True):
      check(got, expected, dot=name)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[4, 7, 5], [0, 10, 2]])
def test_sorted_is_plain_for_each_expert_whatever_rows_of_none_hold(name, sizes):
  used = sum(sizes)
  x, w, dy = arrays((16, 8), (3, 8, 5), (16, 5))
  w *= jnp.array([1.0, 100.0, 0.01])[:, None, None]
  x, dy = (rows.at[used:].set(1e6) for rows in (x, dy))
  definition = Definition(
    ExpertLinear(3, {"model": 8}, {"ffn": 5}, 1, role="up", dot=DOTS[name] and (lambda: DOTS[name]))
  )

  def experts(x, w):
    rounded = definition.quantize_operands({"w": w})
    return definition.bind({"w": w}, rounded).sorted(x, jnp.array(sizes, jnp.int32))

  y, back = jax.vjp(experts, x, w)
  dx, dw = back(dy)
  ends = np.cumsum(sizes)
  for e, (first, end) in enumerate(zip(ends - sizes, ends, strict=True)):
    if first == end:
      assert np.all(np.asarray(dw[e]) == 0)
      continue
    rows = slice(first, end)
    alone, back = jax.vjp(lambda x, w: multiply(DOTS[name], LinearForm(), x, w), x[rows], w[e])
    for got, expected in zip((y[rows], dx[rows], dw[e]), (alone, *back(dy[rows])), strict=True):
      check(got, expected, dot=name)
