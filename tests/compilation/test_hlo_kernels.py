# SPDX-License-Identifier: Apache-2.0
"""What is read from a compiled program is what was asked of the compiler."""

import jax
import jax.numpy as jnp
import pytest
from helpers import hlo
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from paxlike import layers
from paxlike.compilation import hlo_kernels
from paxlike.devices import chips, topology
from paxlike.devices.kernel_rates import KernelRates
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.precision import weight_only

H200 = chips.CHIPS["H200"]
RATES = KernelRates(matmul=0.7, bandwidth=0.9, launch=2e-6)


def compiled(function, *shapes, dtype=jnp.bfloat16, **options):
  """The kernels of a function of arrays."""
  where = SingleDeviceSharding(topology.devices()[0])
  arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in shapes]
  options = {"xla_gpu_enable_triton_gemm": False, **options}
  return hlo_kernels.kernels(hlo.text(function, *arrays, options=options), H200, RATES)


@pytest.mark.parametrize("triton", [False, True])
def test_a_product_has_the_flops_and_bytes_of_its_matrices(h200, triton):
  sizes = (4096, 1024), (1024, 8192)
  found = compiled(jnp.dot, *sizes, xla_gpu_enable_triton_gemm=triton)
  (product,) = [one for one in found if one.group == "matmul"]
  assert product.count == 1
  assert product.flops == 2 * 4096 * 1024 * 8192
  assert product.nbytes == 2 * (4096 * 1024 + 1024 * 8192 + 4096 * 8192)
  assert product.seconds == pytest.approx(product.flops / (989.5e12 * 0.7) + 2e-6)


@pytest.mark.parametrize(
  ("dtype", "group"),
  [
    (jnp.float8_e4m3fn, "matmul fp8"),
    (jnp.int8, "matmul int8"),
    (jnp.float32, "matmul tf32"),
    (jnp.bfloat16, "matmul"),
  ],
)
def test_products_are_told_apart_by_dtype(h200, dtype, group):
  def product(x, w):
    dims = (((1,), (1,)), ((), ()))
    out = {jnp.float32: jnp.float32, jnp.int8: jnp.int32}.get(dtype, jnp.bfloat16)
    return jax.lax.dot_general(x, w, dims, preferred_element_type=out)

  found = compiled(product, (512, 256), (1024, 256), dtype=dtype)
  assert [one.flops for one in found if one.group == group] == [2 * 512 * 256 * 1024]


@pytest.mark.parametrize("scheme", [weight_only.int8_columns, weight_only.int4])
def test_a_weight_that_is_held_in_few_bits_is_read_in_them(h200, scheme):
  def place(array):
    where = SingleDeviceSharding(topology.devices()[0])
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

  w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 8192), (8, 4096)))
  held = jax.tree.map(place, jax.eval_shape(lambda w: scheme(w, axis=-2), w))
  program = hlo.text(lambda held, x: held.multiply(x), held, place(x))
  found = hlo_kernels.kernels(program, H200)
  assert [one.group for one in found] == ["matmul", "memory"]
  assert hlo_kernels.total(found).nbytes < 0.55 * 2 * w.size


def test_a_loop_counts_as_often_as_it_runs(h200):
  def function(x, w):
    return jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ w), x)

  found = compiled(function, (512, 512), (512, 512))
  total = hlo_kernels.total([one for one in found if one.group == "matmul"])
  assert total.count == 50
  assert total.flops == 50 * 2 * 512**3


@pytest.mark.parametrize(
  ("window", "pairs"), [(None, 1024 * 1024 / 2), (256, 256 * 1024 - 256 * 256 / 2)]
)
def test_attention_counts_the_pairs_that_are_seen(h200, window, pairs):
  def value(q):
    return layers.cudnn(q, q, q, scale=1.0, segments_BT=None, window=window).sum()

  found = compiled(jax.grad(value), (2, 1024, 4, 64))
  forward, backward = [one.flops for one in found if one.group == "attention"]
  assert forward == 4 * pairs * 2 * 4 * 64
  assert backward == 10 * pairs * 2 * 4 * 64


def test_transposes_are_told_from_what_keeps_its_order(h200):
  (moved,) = compiled(lambda x: jnp.tanh(x.T).copy(), (4096, 2048))
  assert moved.group == "transpose"
  (kept,) = compiled(jnp.tanh, (4096, 2048))
  assert kept.group == "memory"
  for one in (moved, kept):
    assert one.nbytes == 2 * 2 * 4096 * 2048
    assert one.seconds == pytest.approx(one.nbytes / (0.9 * 4.8e12) + 2e-6)


def test_an_array_with_an_updated_slice_is_read_whole(h200):
  """As the gradients of a scan are by the optimizer: XLA moves the last layer's out of the loop."""

  def update(x, row, y):
    return jax.lax.dynamic_update_slice(x, row, (3, 0)) * 2 + y

  (one,) = compiled(update, (512, 1024), (1, 1024), (512, 1024))
  assert one.nbytes == 2 * (3 * 512 * 1024 + 1024)


def test_of_a_slice_in_a_fusion_within_a_fusion_only_the_slice_is_read():
  """As the gradient of a weight reads the stacked inputs of layers on TPUs."""
  program = """HloModule program, is_scheduled=true

%layer (stack: bf16[64,8,128], i: s32[]) -> bf16[8,128] {
  %stack = bf16[64,8,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,8,128]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero)
  ROOT %flat = bf16[8,128]{1,0} bitcast(%one)
}

%gradient (dy: bf16[8,256], all: bf16[64,8,128], at: s32[]) -> bf16[128,256] {
  %dy = bf16[8,256]{1,0} parameter(0)
  %all = bf16[64,8,128]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %x = bf16[8,128]{1,0} fusion(%all, %at), kind=kLoop, calls=%layer
  ROOT %dw = bf16[128,256]{1,0} dot(%x, %dy), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}

ENTRY %main (dy: bf16[8,256], x: bf16[64,8,128], n: s32[]) -> bf16[128,256] {
  %dy = bf16[8,256]{1,0} parameter(0)
  %x = bf16[64,8,128]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %fusion = bf16[128,256]{1,0} fusion(%dy, %x, %n), kind=kOutput, calls=%gradient
}
"""
  (one,) = hlo_kernels.kernels(program, chips.CHIPS["TPU v5e"])
  assert one.nbytes == 2 * (8 * 128 + 8 * 256 + 128 * 256) + 4


def test_sums_are_ordered_by_time():
  one = hlo_kernels.HloKernel("matmul", "a", 3, 10.0, 5.0, 1.0, "x")
  other = hlo_kernels.HloKernel("memory", "b", 1, 7.0, 0.0, 4.0, "y")
  names, sums = zip(*hlo_kernels.grouped([one, other, one], "group"), strict=True)
  assert names == ("matmul", "memory")
  assert (sums[0].count, sums[0].nbytes, sums[0].flops, sums[0].seconds) == (6, 60, 30, 6)


def test_no_copy_is_taken_for_the_grouped_product_that_it_is_named_after():
  program = """HloModule program, is_scheduled=true

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  ROOT %copy = bf16[8,4]{0,1} copy(%x), metadata={op_name="f/groups_1_of_2/grouped_matmul/call"}
}
"""
  (copy,) = hlo_kernels.kernels(program, H200)
  assert (copy.group, copy.flops) == ("transpose", 0)


@pytest.mark.slow
def test_matmuls_of_a_program_for_tpus_have_the_flops_of_the_model():
  """Also those with batch dims, which become convolutions with padding, and in unrolled loops."""
  with topology.target("v5e-4"):
    made = MeshSpec(ici=(1, 2, 2)).build()

    def spec(*axes: str | None) -> NamedSharding:
      return NamedSharding(made, PartitionSpec(*axes))

    def step(x_BTD: jax.Array, w_LDF: jax.Array, k_BSD: jax.Array) -> jax.Array:
      def layer(x_BTD: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(x_BTD @ w_DF) @ w_DF.T), None

      x_BTD, _ = jax.lax.scan(layer, x_BTD, w_LDF)
      return jnp.einsum("btd,bsd->bts", x_BTD, k_BSD)

    b, t, d, f, layers = 8, 1024, 2048, 4096, 3
    arguments = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
      for shape, sharding in (
        ((b, t, d), spec("fsdp", None, None)),
        ((layers, d, f), spec(None, "fsdp", "tensor")),
        ((b, t, d), spec("fsdp", None, None)),
      )
    ]
    text = (
      jax.jit(step, out_shardings=spec("fsdp", None, None)).lower(*arguments).compile().as_text()
    )
  found = hlo_kernels.kernels(text or "", chips.CHIPS["TPU v5e"])
  expected = layers * 2 * 2 * b * t * d * f / 4 + 2 * b * t * t * d / 2
  assert hlo_kernels.total(found).flops == pytest.approx(expected, rel=0.01)
