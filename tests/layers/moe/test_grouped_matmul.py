# SPDX-License-Identifier: Apache-2.0
"""Laws of `GroupedForm`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import SingleDeviceSharding

from paxlike.compilation import hlo_kernels
from paxlike.devices import chips, program_cache, topology
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.moe import grouped_matmul_triton
from paxlike.layers.moe.grouped_matmul import GroupedForm
from paxlike.layers.precision.matmul import by_form

pytestmark = pytest.mark.slow

SIZES = {
  "even": [10, 10, 10, 10],
  "uneven": [1, 25, 0, 14],
  "none_but_one": [0, 0, 40, 0],
  "fewer_than_rows": [3, 0, 9, 5],
  "none": [0, 0, 0, 0],
}


@pytest.fixture(params=["blocks", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
  """Products are those of CPUs, or those of GPUs, interpreted."""
  if request.param == "kernels":
    monkeypatch.setattr(topology, "has_triton", lambda device: True)
    for name in ("multiply", "multiply_transposed"):
      kernel = functools.partial(getattr(grouped_matmul_triton, name), interpret=True)
      monkeypatch.setattr(grouped_matmul_triton, name, kernel)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_product_and_gradients_equal_a_matrix_for_each_row(sizes):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (40, 6))
  w = jax.random.normal(keys[1], (4, 6, 5))
  dy = jax.random.normal(keys[2], (40, 5))
  groups = np.repeat(np.arange(4), sizes)
  used = (np.arange(40) < len(groups))[:, None]
  groups = np.resize(np.append(groups, 0), 40) * used[:, 0]

  def by_group(x, w):
    return jnp.where(used, by_form(x, w, GroupedForm(jnp.array(sizes, jnp.int32))), 0)

  def by_row(x, w):
    return jnp.where(used, jnp.einsum("md,mdf->mf", x, w[groups]), 0)

  got, got_vjp = jax.vjp(by_group, x, w)
  expected, expected_vjp = jax.vjp(by_row, x, w)
  for a, b in zip((got, *got_vjp(dy)), (expected, *expected_vjp(dy)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("first", [17, 18, 69, 70, 141, 281])
def test_parts_of_a_block_hold_all_rows_of_a_group(first):
  # Blocks have 70 rows, which four equal parts do not fill.
  sizes, random = [first, 282 - first], np.random.default_rng(0)
  x, w, dy = (
    jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((282, 6), (2, 6, 5), (282, 5))
  )
  form = GroupedForm(jnp.array(sizes, jnp.int32))
  got, got_vjp = jax.vjp(lambda x, w: by_form(x, w, form), x, w)
  of_row = np.repeat(np.arange(2), sizes)
  expected, expected_vjp = jax.vjp(lambda x, w: jnp.einsum("md,mdf->mf", x, w[of_row]), x, w)
  for a, b in zip((got, *got_vjp(dy)), (expected, *expected_vjp(dy)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.usefixtures("way")
def test_garbage_in_rows_of_no_group_reaches_no_gradient():
  groups = GroupedForm(jnp.array([3, 2], jnp.int32))
  w = jax.random.normal(jax.random.key(0), (2, 4, 4))
  x = jnp.ones((8, 4))
  dy = jnp.ones((8, 4)).at[5:].set(jnp.nan)
  dx, dw, _ = jax.vjp(by_form, x, w, groups)[1](dy)
  assert np.all(np.isfinite(dx[:5])) and np.all(np.isfinite(dw))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
  ("sizes", "num_inputs"), [([700, 0, 5, 300], 150), ([0, 1300, 0, 0], 256)], ids=str
)
def test_tiles_cover_all_rows_and_columns(sizes, num_inputs):
  M, F = 1300, 530
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (M, num_inputs), (4, num_inputs, F), (M, F)
  x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
  groups = GroupedForm(jnp.array(sizes, jnp.int32))
  y, back = jax.vjp(lambda x, w: by_form(x, w, groups), x, w)
  dx, dw = back(dy)
  end = 0
  for e, size in enumerate(sizes):
    first, end = end, end + size
    rows = slice(first, end)
    np.testing.assert_allclose(y[rows], x[rows] @ w[e], atol=1e-3)
    np.testing.assert_allclose(dx[rows], dy[rows] @ w[e].T, atol=1e-3)
    np.testing.assert_allclose(dw[e], x[rows].T @ dy[rows], atol=1e-3)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("names", [("model", "ffn"), ("ffn", "model")], ids=str)
def test_devices_that_share_the_dims_of_a_matrix_are_one(names):
  sizes = jnp.array([100, 0, 180, 10], jnp.int32)
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = (300, 24), (4, 24, 16), (300, 16)
  x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

  def product(x, w, dy):
    y, back = jax.vjp(lambda x, w: by_form(x, w, GroupedForm(sizes, *names)), x, w)
    return y[:290], *back(dy.at[290:].set(0))

  expected = jax.jit(product)(x, w, dy)
  with jax.set_mesh(MeshSpec(ici={"fsdp": 2, "tensor": 4}).build()):
    got = jax.jit(product)(x, w, dy)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("total", [8, 32])
@pytest.mark.parametrize(
  ("target", "chip", "dtype"),
  [
    ("h200-1", "H200", jnp.bfloat16),
    ("h200-1", "H200", jnp.float8_e4m3fn),
    ("h200-1", "H200", jnp.int8),
    ("v5e-4", "TPU v5e", jnp.bfloat16),
    ("v5p-8", "TPU v5p", jnp.bfloat16),
    ("v6e-4", "TPU v6", jnp.bfloat16),
  ],
  ids=str,
)
def test_accelerators_multiply_each_row_with_one_matrix(target, chip, dtype, total):
  M, E, D, F = 4096, 8, 512, 1024
  sums = jnp.int32 if dtype == jnp.int8 else jnp.bfloat16

  def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  def products(x, w, dy, sizes):
    groups = GroupedForm(sizes, total=total)
    forward, backward = groups.outputs(x, w, sums), groups.to_inputs(dy, w, sums)
    return forward, backward, groups.to_weights(x, dy, sums)

  of_gradient = jnp.float8_e5m2 if dtype == jnp.float8_e4m3fn else dtype
  with topology.target(target):
    where = SingleDeviceSharding(topology.devices()[0])
    arrays = array(M, D), array(E, D, F), array(M, F, dtype=of_gradient), array(E, dtype=jnp.int32)
    found = hlo_kernels.kernels(hlo.text(products, *arrays), chips.CHIPS[chip])
  flops = [one.flops for one in found if one.group.startswith("matmul")]
  assert flops == [2 * M * D * F * E / total] * 3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_gpu_loads_what_weights_gradients_need_while_it_multiplies(h200, dtype, tmp_path):
  where = SingleDeviceSharding(topology.devices()[0])
  shapes = ((4096, 512), dtype), ((4096, 1024), dtype), ((8,), jnp.int32)
  arrays = [jax.ShapeDtypeStruct(*shape, sharding=where) for shape in shapes]
  sums = jnp.int32 if dtype == jnp.int8 else dtype
  lowered = jax.jit(lambda x, dy, sizes: GroupedForm(sizes).to_weights(x, dy, sums)).lower(*arrays)
  with program_cache.usable(topology.devices()[0]):
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
  texts = [path.read_text() for path in tmp_path.glob("*.ptx")]
  [kernel] = [text for text in texts if ".entry grouped_matmul" in text]
  assert "cp.async" in kernel and "st.shared.b8" not in kernel


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8])
def test_kernels_are_given_no_array_that_pallas_counts_wrongly(dtype):
  """Those of 2 to 4 GiB in 8 bits it would count in 32, with a sign."""
  M, E, D, F = 2**18, 2, 2**13 + 2**12, 256

  def array(*shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  sizes, sums = array(E, dtype=jnp.int32), jnp.int32 if dtype == jnp.int8 else jnp.bfloat16
  calls = (
    (grouped_matmul_triton.multiply, (array(M, D), array(E, D, F), sizes)),
    (grouped_matmul_triton.multiply_transposed, (array(M, D), array(M, F), sizes)),
  )
  for kernel, arrays in calls:
    program = jax.make_jaxpr(functools.partial(kernel, dtype=sums))(*arrays)
    (call,) = [one for one in program.eqns if one.primitive.name == "pallas_call"]
    given = [operand.aval for operand in call.invars]
    assert max(array.size for array in given) == M * D
    assert not [array for array in given if array.itemsize == 1 and 2**31 < array.size <= 2**32]
