# SPDX-License-Identifier: Apache-2.0
"""Matmuls in MXFP8."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from helpers.program import TINY, run

from paxlike import layers
from paxlike.devices import mesh, topology
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.precision import mxfp8
from paxlike.layers.precision.matmul import Dim, LinearForm

pytestmark = pytest.mark.slow

CALL = "__cudnn$blockScaledDot"
DOT = mxfp8.MxFp8()


def reference(x):
  """The numbers that MXFP8 has for float64 x, by its definition, and the scales' exponents."""
  blocks = x.reshape(*x.shape[:-1], -1, 32)
  largest = np.abs(blocks).max(-1)
  with np.errstate(divide="ignore"):
    exponents = np.maximum(np.ceil(np.log2(largest / 448)), -126)
  scaled = np.abs(blocks) / 2.0 ** exponents[..., None]
  # e4m3 has three bits after the first, and none below 2**-9.
  _, binade = np.frexp(scaled)
  step = 2.0 ** (np.maximum(binade - 1, -6) - 3)
  rounded = np.minimum(np.round(scaled / step) * step, 448)
  values = np.sign(blocks) * rounded * 2.0 ** exponents[..., None]
  return values.reshape(x.shape), exponents


def numbers(seed, shape):
  """Numbers of very different sizes, all float32."""
  random = np.random.default_rng(seed)
  return (random.normal(size=shape) * 2.0 ** random.integers(-12, 12, shape)).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_are_those_of_the_format(dtype):
  x = numbers(1, (64, 128)) * 2.0 ** np.arange(-100, 92, 3, dtype=np.float32)[:, None]
  x[0, :32] = 0
  x[1, :32] = 448  # The largest that no scale is needed for.
  x[2, :32] = 450
  x[3, :32] = 2.0**-124
  x = np.asarray(jnp.asarray(x, dtype), np.float64)
  small = mxfp8.quantized(jnp.asarray(x, dtype))
  values, exponents = reference(x)
  np.testing.assert_array_equal(np.asarray(small.dequantized(), np.float64), values)
  bits = np.asarray(jax.lax.bitcast_convert_type(small.scales, jnp.uint8), np.int32)
  np.testing.assert_array_equal(bits - 127, exponents)
  assert (bits[0, 0], bits[1, 0], bits[2, 0], bits[3, 0]) == (1, 127, 128, 1)


def test_numbers_are_those_of_jax():
  from jax._src.cudnn import scaled_matmul_stablehlo

  x = jnp.asarray(numbers(2, (1, 64, 128)))
  config = jax.nn.get_scaled_dot_general_config("mxfp8")
  for got, expected in zip(
    mxfp8.quantized(x), scaled_matmul_stablehlo.quantize(x, config), strict=True
  ):
    np.testing.assert_array_equal(got.view(jnp.uint8), expected.view(jnp.uint8))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(bad):
  x = np.ones((1, 64), np.float32)
  x[0, 3] = bad
  small = mxfp8.quantized(jnp.asarray(x)).dequantized()
  assert np.isnan(small[0, :32]).all() and (small[0, 32:] == 1).all()


def products(product, x, w, dy):
  """y, dx and dw."""
  y, backward = jax.vjp(lambda x, w: DOT(product, x, w, None), x, w)
  return y, *backward(dy)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(128, 64), (100, 40)])
def test_every_matmul_has_both_operands_in_the_format(num_inputs, num_outputs):
  """Each along the dim that is summed over, padded to blocks."""
  tokens, pad = 96, lambda n: -n % 32
  x, w, dy = (
    numbers(seed, shape)
    for seed, shape in enumerate(
      [(tokens, num_inputs), (num_inputs, num_outputs), (tokens, num_outputs)]
    )
  )

  def by_hand(a, b):
    """Sums over the last dim of both."""
    width = ((0, 0), (0, pad(a.shape[1])))
    a, b = (reference(np.pad(one.astype(np.float64), width))[0] for one in (a, b))
    return a @ b.T

  expected = by_hand(x, w.T), by_hand(dy, w), by_hand(x.T, dy.T)
  found = jax.jit(products)(LinearForm(), x, w, dy)
  for got, right in zip(found, expected, strict=True):
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())
  for got, exact in zip(expected, (x @ w, dy @ w.T, x.T @ dy), strict=True):
    assert 0.01 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.06


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX has it for CUDA only")
def test_what_is_emulated_is_what_jax_says_that_the_call_does():
  a, b = (mxfp8.quantized(jnp.asarray(numbers(seed, (64, 128)))) for seed in (3, 4))
  called, emulated = mxfp8._by_cudnn(a, b, jnp.float32), mxfp8._emulated(a, b, jnp.float32)
  np.testing.assert_allclose(emulated, called, rtol=1e-5)


DENSE = (("model", "ffn"), ("ffn", "model"))
MIXES = ({"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2})


def on_mesh(names, mix):
  """A step of a linear map between dims of these names, and its arguments on a mesh."""
  on = MeshSpec(ici=mix).build()
  rows, shape = (("batch", "time"), (8, 64)) if "context" in mix else (("batch",), (512,))
  sizes = (128, 256)
  product = LinearForm(*((Dim(*dim),) for dim in zip(names, sizes, strict=True)))
  of_x, of_y = ((*rows, None if name == "model" else name) for name in names)

  def step(x, w, dy):
    y, dx, dw = products(product, x, w, dy)
    return y, mesh.constrain(dx, *of_x), mesh.constrain(dw, *names)

  dims = {of_x: (*shape, sizes[0]), names: sizes, of_y: (*shape, sizes[1])}
  arrays = [
    jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=mesh.sharding(on, dim, size))
    for dim, size in dims.items()
  ]
  return on, jax.jit(step), arrays


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("names", DENSE)
def test_sharded_matmuls_are_those_of_one_device(names, mix):
  on, step, arrays = on_mesh(names, mix)
  whole = [jnp.asarray(numbers(n, one.shape), jnp.bfloat16) for n, one in enumerate(arrays)]
  parts = [jax.device_put(one, like.sharding) for one, like in zip(whole, arrays, strict=True)]
  expected = step(*whole)
  with jax.set_mesh(on):
    found = step(*parts)
  for got, right in zip(found, expected, strict=True):
    got, right = (np.asarray(one, np.float32) for one in (got, right))
    # Sums of partial sums in bfloat16.
    np.testing.assert_allclose(got, right, rtol=0.02, atol=0.01 * np.abs(right).max())


@pytest.fixture
def b200(request):
  """Programs are made for these B200s, which are not there."""
  with topology.target(f"b200-{request.param}"):
    yield


@pytest.mark.slow
@pytest.mark.parametrize("b200", [8], indirect=True)
@pytest.mark.parametrize(
  ("names", "mix"), [(DENSE[0], MIXES[0]), (DENSE[0], MIXES[1]), (DENSE[1], MIXES[1])]
)
def test_on_a_mesh_of_gpus_each_multiplies_its_part(b200, names, mix):
  on, step, arrays = on_mesh(names, mix)
  with jax.set_mesh(on):
    program = hlo.text(step, *arrays)
  assert hlo.num_calls(program, CALL) == 3
  sent = hlo.collectives(program)
  gathers = [one for one in sent if one.operation.startswith("all-gather")]
  gathered = {array.dtype for one in gathers for array in one.outputs}
  if "fsdp" in mix and names[0] == "model":
    assert "f8e4m3fn" in gathered
    assert any(one.operation.startswith("reduce-scatter") for one in sent)
  if names[0] == "model":
    assert "bf16" not in gathered


@pytest.mark.parametrize("b200", [1], indirect=True)
def test_a_linear_map_has_no_other_matmuls_on_blackwell(b200):
  where = jax.sharding.SingleDeviceSharding(topology.devices()[0])
  linear = layers.Linear(
    {"model": 128}, {"ffn": 256}, role="up", dtype=jnp.bfloat16, dot=mxfp8.MxFp8
  )
  definition = layers.Definition(linear)

  def loss(params, x):
    return (definition.bind(params)(x).astype(jnp.float32) ** 2).sum()

  params = {
    name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)
    for name, spec in definition.weights.items()
  }
  x = jax.ShapeDtypeStruct((4, 64, 128), jnp.bfloat16, sharding=where)
  program = hlo.text(jax.grad(loss, (0, 1)), params, x)
  assert hlo.num_calls(program, CALL) == 3
  assert not hlo.matmuls(program)


def test_gpus_before_blackwell_are_refused(capsys):
  flags = ("--mode=compile", "--topology=h100-1", "--fdl.QUANTIZATION=mxfp8")
  assert run(*TINY, *flags) == 2
  error = capsys.readouterr().err
  assert re.search(r"QUANTIZATION=mxfp8 needs .* Blackwell on, .* NVIDIA H100: use fp8", error)
