# SPDX-License-Identifier: Apache-2.0
"""XLA for CPUs converts no operand of a matmul to float32, and no table."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo

from paxlike.devices import processor
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import flash_cpu, module
from paxlike.layers.embedding import Embedding
from paxlike.layers.moe.experts import BatchedForm
from paxlike.layers.moe.grouped_matmul import GroupedForm
from paxlike.layers.precision import cpu_dots, float32_sums
from paxlike.layers.precision.matmul import by_form, matmul


def dropless(x_MD, w_EDF):
  return by_form(x_MD, w_EDF, GroupedForm(jnp.array([8, 24], jnp.int32)))


def in_slots(x_ECD, w_EDF):
  return by_form(x_ECD, w_EDF, BatchedForm())


def tied_logits(x_BTD, table_VD):
  embedding = Embedding(128, 64, is_head=True, init=module.zeros, dtype=jnp.bfloat16)
  embedding.table.set_raw_value(table_VD)
  return embedding.attend(x_BTD)


def exact(x) -> Any:
  return np.asarray(x, np.float64)


def operands_of_dots(function, *arrays, count=1):
  """Returns the dtypes of operands of at least `count` dots of what is compiled."""
  found = {one.name: one for one in hlo.instructions(hlo.text(function, *arrays))}
  dots = [one for one in found.values() if one.operation == "dot"]
  assert len(dots) >= count
  return {shape.dtype for dot in dots for name in dot.operands for shape in found[name].outputs}


@pytest.mark.parametrize(
  "function, shapes",
  [
    (matmul, [(32, 16), (16, 64)]),
    (matmul, [(32, 64), (64, 16)]),
    (tied_logits, [(2, 16, 64), (128, 64)]),
    (tied_logits, [(2, 64, 64), (128, 64)]),
    (dropless, [(32, 16), (2, 16, 64)]),
    (in_slots, [(2, 32, 16), (2, 16, 64)]),
    (functools.partial(flash_cpu, scale=0.3, segments_BT=None), [(2, 128, 4, 16)] * 3),
  ],
)
def test_no_operand_of_a_matmul_and_its_gradients_is_converted(function, shapes):
  def outputs(*arrays):
    y, back = jax.vjp(function, *arrays)
    return y, back(y)

  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  assert operands_of_dots(outputs, *arrays, count=3) == {"bf16"}


@pytest.mark.parametrize("sizes", [(16, 80), (80, 16), (48, 48)])
@pytest.mark.parametrize(
  "dtype, from_intel, contracted",
  [(jnp.float32, False, 1), (jnp.float32, True, 0), (jnp.bfloat16, False, 1)],
)
def test_gradients_of_weights_have_the_order_that_is_fast(
  monkeypatch, sizes, dtype, from_intel, contracted
):
  monkeypatch.setattr(processor, "is_from_intel", lambda: from_intel)
  random: Any = np.random.default_rng(0)
  x, y = (jnp.asarray(random.normal(size=(64, size)), dtype) for size in sizes)
  error = 1e-5 if dtype == jnp.float32 else 2**-8
  found = cpu_dots.dot_of_rows(x, y)
  np.testing.assert_allclose(exact(found), exact(x).T @ exact(y), rtol=error, atol=error)
  program = hlo.text(lambda x, y: cpu_dots.dot_of_rows(x, y).T, x, y)
  (dot,) = (one for one in hlo.instructions(program) if one.operation == "dot")
  if dtype == jnp.bfloat16 or from_intel or sizes[0] < sizes[1]:
    assert dot.outputs[0].dims == (min(sizes), max(sizes))
    assert f"lhs_contracting_dims={{{contracted}}}" in dot.attributes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_several_devices_do_not_depend_on_the_processor_and_rewrite_nothing(monkeypatch, dtype):
  given = [jax.ShapeDtypeStruct((64, size), dtype) for size in (80, 16)]
  programs = set()
  for from_intel in (False, True):
    monkeypatch.setattr(processor, "is_from_intel", lambda answer=from_intel: answer)
    with jax.set_mesh(MeshSpec(ici={"fsdp": 2}).build(jax.devices()[:2])):
      programs.add(jax.jit(lambda x, y: cpu_dots.dot_of_rows(x, y)).lower(*given).as_text())
  (program,) = programs
  assert "reshape" not in program


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("size", [100, 512])
@pytest.mark.parametrize("axis", [-2, -1])
def test_few_rows_are_multiplied_as_they_are(num_rows, size, axis):
  random: Any = np.random.default_rng(0)
  a = jnp.asarray(random.normal(size=(num_rows, size)), jnp.bfloat16)
  b = jnp.asarray(random.normal(size=(size, 80) if axis == -2 else (80, size)), jnp.bfloat16)

  def product(a, b):
    return cpu_dots.dot(a, b, axis, dtype=jnp.float32)

  expected = exact(a) @ (exact(b) if axis == -2 else exact(b).T)
  np.testing.assert_allclose(product(a, b), expected, rtol=1e-4, atol=1e-4)
  if num_rows > 1 or size == 100:
    assert operands_of_dots(product, a, b) == {"bf16"}


def times_one_row(x_GK, w, axis):
  """Returns the product as decoding computes it; int8 has scales of 1, 2, ..."""
  if w.dtype == jnp.bfloat16:
    return cpu_dots.dot(x_GK, w[0], axis, dtype=jnp.float32)[0]
  scale_GF = jnp.ones((len(w), w.shape[2])) * (1 + jnp.arange(len(w)))[:, None]
  return cpu_dots.dot_of_one_row(x_GK, w, scale_GF)


@pytest.mark.parametrize(
  "dtype, num_blocks, axis",
  [(jnp.bfloat16, 1, -2), (jnp.bfloat16, 1, -1), (jnp.int8, 1, -2), (jnp.int8, 3, -2)],
)
def test_a_loop_multiplies_one_row_by_what_it_never_stores(dtype, num_blocks, axis):
  random: Any = np.random.default_rng(0)
  size, width = 256, 131
  shape = (num_blocks, size, width) if axis == -2 else (num_blocks, width, size)
  x = jnp.asarray(random.normal(size=(num_blocks, size)), jnp.bfloat16)
  w = jnp.asarray(random.integers(-100, 100, size=shape), dtype)
  w_GKF = exact(w) if axis == -2 else exact(w).swapaxes(1, 2)
  if dtype == jnp.int8:
    w_GKF *= 1 + np.arange(num_blocks)[:, None, None]
  expected = np.einsum("GK,GKF->F", exact(x), w_GKF)
  found = times_one_row(x, w, axis)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

  dy = random.normal(size=width)
  dx, *dw = jax.grad(
    lambda x, w: (times_one_row(x, w, axis) * dy).sum(), (0, 1) if dtype == jnp.bfloat16 else (0,)
  )(x, w)
  wanted = np.einsum("F,GKF->GK", dy, w_GKF)
  np.testing.assert_allclose(exact(dx), wanted, rtol=2**-8, atol=1e-2)
  for one in dw:
    outer = np.einsum("GK,F->GKF" if axis == -2 else "GK,F->GFK", exact(x), dy)
    np.testing.assert_allclose(exact(one), outer, rtol=2**-8, atol=1e-2)

  def loop(x, w):
    def step(x, unused):
      del unused
      return x + times_one_row(x, w, axis).sum().astype(x.dtype), None

    return jax.lax.scan(step, x, length=3)[0]

  program = hlo.text(loop, x, w, options={"xla_cpu_use_fusion_emitters": True})
  loops = {one.name for one in hlo.in_loops(program)}
  for one in hlo.instructions(program):
    if one.operation in ("fusion", "copy"):
      parts = 8 if one.name in loops else 32
      assert math.prod(one.outputs[0].dims) <= w.size // parts, one


@pytest.mark.parametrize("axis", [-2, -1])
def test_products_of_one_row_are_lowered_once_and_have_second_derivatives(axis):
  random: Any = np.random.default_rng(0)
  x, w = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((1, 256), (256, 256)))

  def cubes(x, w):
    return (cpu_dots.dot(x, w, axis, dtype=jnp.float32) ** 3).sum()

  def cubes_plainly(x, w):
    w = w.astype(jnp.float32)
    return ((x.astype(jnp.float32) @ (w if axis == -2 else w.T)) ** 3).sum()

  def squares_of_gradient(function):
    return lambda w: jnp.square(jax.grad(function)(x, w).astype(jnp.float32)).sum()

  found, expected = (jax.grad(squares_of_gradient(f))(w) for f in (cubes, cubes_plainly))
  np.testing.assert_allclose(
    exact(found), exact(expected), rtol=0.05, atol=0.05 * np.abs(exact(expected)).max()
  )

  program = jax.jit(lambda x, w: cubes(x, w) + cubes(2 * x, w)).lower(x, w).as_text()
  name = "_row_in_parts" if axis == -2 else "_columns_in_parts"
  assert len(re.findall(f"func.func private @{name}", program)) == 1


@pytest.mark.parametrize("axis, least", [(-2, 16), (-1, 256)])
def test_few_numbers_are_left_to_the_library(axis, least):
  assert cpu_dots.reads_once(1, least, axis)
  assert not cpu_dots.reads_once(1, least // 2, axis)


@pytest.mark.parametrize("dtype, error", [(jnp.float32, 2e-7), (jnp.bfloat16, 1e-5)])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_weights_of_integers_are_not_converted(dtype, error, num_blocks):
  random: Any = np.random.default_rng(0)
  x = jnp.asarray(random.normal(size=(num_blocks, 2, 512)), dtype)
  x = x.at[0, 0].set(0).at[:, 1, 7].set(100)
  w = jnp.asarray(random.integers(-127, 128, (num_blocks, 512, 80)), jnp.int8)
  expected = exact(x) @ exact(w)
  got = cpu_dots.dot_of_integers(x, w)
  np.testing.assert_allclose(got, expected, rtol=0, atol=error * np.abs(expected).max())
  assert operands_of_dots(cpu_dots.dot_of_integers, x, w) == {"s8"}
  dx = jax.grad(lambda x: (cpu_dots.dot_of_integers(x, w) * expected).sum())(x)
  assert dx.dtype == dtype
  wanted = expected @ exact(w).swapaxes(1, 2)
  np.testing.assert_allclose(exact(dx), wanted, atol=0.01 * np.abs(wanted).max())


def float32_of_fusions(function, *arrays):
  """Returns the shapes of float32 results of fusions."""
  program = hlo.text(function, *arrays, options={"xla_cpu_use_fusion_emitters": True})
  fused = [one.outputs[0] for one in hlo.instructions(program) if one.operation == "fusion"]
  return {one.dims for one in fused if one.dtype == "f32"}


def test_a_loop_looks_up_rows_of_a_table_that_is_not_converted():
  def rows(table_VD, ids_T):
    def one(total_D, id):
      x_1D: Any = float32_sums.lookup(table_VD, id[None], ("vocab", "model"))
      return total_D + x_1D[0].astype(jnp.float32), None

    return jax.lax.scan(one, jnp.zeros(64), ids_T)[0]

  table, ids = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((5,), jnp.int32)
  found = float32_of_fusions(rows, table, ids)
  assert found and table.shape not in found


def test_a_loop_over_blocks_converts_only_what_it_multiplies():
  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  sizes_E, rows = jax.ShapeDtypeStruct((4,), jnp.int32), 80 + 10  # A block more than there are.
  found = float32_of_fusions(
    lambda x, w, sizes_E: GroupedForm(sizes_E).outputs(x, w, jnp.bfloat16),
    *(array(80, 16), array(4, 16, 24), sizes_E),
  )
  assert (rows, 24) in found and not found & {(rows, 16), (4, 16, 24)}
  found = float32_of_fusions(
    lambda x, dy, sizes_E: GroupedForm(sizes_E).to_weights(x, dy, jnp.bfloat16),
    *(array(80, 16), array(80, 24), sizes_E),
  )
  assert (4, 16, 24) in found and not found & {(rows, 16), (rows, 24)}


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matrices_of_heads_are_transposed_ahead_of_a_loop(axis, dtype):
  num_heads, size, width = 4, 24, 32

  def decode(x_BNI, w_INO):
    def step(x_BNI, unused):
      del unused
      y_BNO = cpu_dots.dot_of_heads(x_BNI, w_INO.swapaxes(0, 1), axis)
      return x_BNI + y_BNO.sum(-1, keepdims=True), y_BNO

    return jax.lax.scan(step, x_BNI, length=3)

  random = np.random.default_rng(0)
  x_BNI = jnp.asarray(random.normal(size=(2, num_heads, (size, width)[axis])), dtype)
  w = jnp.asarray(random.normal(size=(size, num_heads, width)), dtype)
  expected = np.einsum("BNI,INO->BNO" if axis == -2 else "BNI,ONI->BNO", exact(x_BNI), exact(w))
  error = 1e-6 if dtype == jnp.float32 else 8e-3
  np.testing.assert_allclose(exact(decode(x_BNI, w)[1][0]), expected, atol=error * 20, rtol=error)

  loops = hlo.in_loops(hlo.text(decode, x_BNI, w))
  assert "dot" in {one.operation for one in loops}
  rewritten = [one for one in loops if one.operation in ("copy", "transpose", "convert")]
  assert w.size not in {math.prod(one.outputs[0].dims) for one in rewritten}
