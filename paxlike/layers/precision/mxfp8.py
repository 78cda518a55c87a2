# SPDX-License-Identifier: Apache-2.0
"""Matmuls in MXFP8: e4m3 with a power-of-two scale per block of 32 along the contracted dim.

The format is that of the OCP Microscaling specification, version 1.0. A scale is rounded up, to the
smallest power of two for which a block's scaled amax does not exceed 448: Mishra et al. (2025,
arXiv:2506.08027) found that pre-training needs this, and NVIDIA's and JAX's own quantizers do the
same. The specification's example rounds down and saturates.

The operands of all three matmuls (forward, dx, dw) are quantized along their contracted dims, so
weights, activations and cotangents are quantized twice each. NVIDIA GPUs from Blackwell on multiply
the quantized operands (`jax.nn.scaled_matmul`, cuDNN). Other devices dequantize them, exactly, and
multiply in float32. Contracted dims are padded with zeros to a multiple of 32.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.config.configurable import configurable
from paxlike.devices import mesh, topology
from paxlike.layers.precision.matmul import Dim, Dot, LinearForm, MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand

BLOCK = 32
_VALUES, _SCALES = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
# 448, the largest e4m3, is 0.875 * 2**9. Scales are at least 2**-126: e8m0 also has 2**-127, but it
# is subnormal in float32, which most devices flush to zero.
_LARGEST, _EXPONENT, _LEAST, _BIAS = 0.875, 9, -126, 127


@configurable
@dataclasses.dataclass(frozen=True)
class MxFp8(Dot):
  """A `Dot` for linear maps."""

  @property
  def operands(self) -> str:
    return "fp8"

  def quantized(self, w: jax.Array) -> None:
    """Returns None: each matmul quantizes its operands along its own contracted dim."""

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    assert isinstance(form, LinearForm)
    return _multiply(form, x, w)


class QuantizedBlocks(NamedTuple):
  """A quantized array: `values` in e4m3 [..., K], times `scales` in e8m0 [..., K / 32]."""

  values: jax.Array
  scales: jax.Array

  def dequantized(self) -> jax.Array:
    """Returns the float32 array."""
    blocks = self.values.reshape(*self.scales.shape, BLOCK).astype(jnp.float32)
    return (blocks * self.scales.astype(jnp.float32)[..., None]).reshape(self.values.shape)


def quantized(x: jax.Array) -> QuantizedBlocks:
  """Returns x [..., K] quantized along its last dim, which is padded to whole blocks.

  A block with a non-finite entry has the scale NaN.
  """
  padding = -x.shape[-1] % BLOCK
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]).astype(jnp.float32)
  blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
  largest = jnp.abs(blocks).max(-1)
  fraction, exponent = jnp.frexp(largest)
  exponent = jnp.where(fraction > _LARGEST, exponent + 1, exponent) - _EXPONENT
  exponent = jnp.where(largest > 0, jnp.maximum(exponent, _LEAST), _LEAST)
  bits = jnp.where(jnp.isfinite(largest), exponent + _BIAS, 255).astype(jnp.uint8)
  values = (blocks * jnp.ldexp(jnp.float32(1), -exponent)[..., None]).astype(_VALUES)
  return QuantizedBlocks(values.reshape(x.shape), jax.lax.bitcast_convert_type(bits, _SCALES))


@jax.custom_vjp
def _multiply(form: LinearForm, x: jax.Array, w_DF: jax.Array) -> jax.Array:
  return _forward(form, x, w_DF)[0]


def _forward(form: LinearForm, x: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, Any]:
  rows, inputs, outputs = _dims(form, x, w_DF)
  y = _matmul(x, w_DF.T, _MatmulDims(rows, outputs, (inputs,)), x.dtype)
  return y, (form, x, w_DF)


def _backward(saved: Any, dy: jax.Array) -> tuple[None, jax.Array, jax.Array]:
  form, x, w_DF = saved
  rows, inputs, outputs = _dims(form, x, w_DF)
  dx = _matmul(dy, w_DF, _MatmulDims(rows, inputs, (outputs,)), dy.dtype)
  x_D, dy_F = (jnp.moveaxis(array, -1, 0) for array in (x, dy))  # Tokens last.
  return None, dx, _matmul(x_D, dy_F, _MatmulDims((inputs,), outputs, rows), w_DF.dtype)


_multiply.defvjp(_forward, _backward)


def _dims(form: LinearForm, x: jax.Array, w_DF: jax.Array) -> tuple[tuple[Dim, ...], Dim, Dim]:
  """Returns the leading dims of x, D and F, with the names and sizes that decide their sharding.

  If D or F is several flattened dims, the mesh shards the first.
  """
  names = ("batch", "time")[: x.ndim - 1]
  rows = tuple(Dim(name, size) for name, size in zip(names, x.shape, strict=False))
  inputs, outputs = (
    dims[0] if dims else Dim(None, size)
    for dims, size in zip((form.in_dims, form.out_dims), w_DF.shape, strict=True)
  )
  return rows, inputs, outputs


class _MatmulDims(NamedTuple):
  """The dims of a matmul: a [*rows, *contracted], b [columns, *contracted], y [*rows, columns]."""

  rows: tuple[Dim, ...]
  columns: Dim
  contracted: tuple[Dim, ...]

  def partition(self, sizes: Mapping[str, int]) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the PartitionSpecs of y and of the contracted dims.

    The dim "model" is not sharded, because weights are all-gathered over fsdp.
    """
    dims = (*self.rows, self.columns, *self.contracted)
    names = tuple(None if dim.name == "model" else dim.name for dim in dims)
    spec = mesh.partition(names, tuple(dim.size for dim in dims), sizes)
    place = len(self.rows) + 1
    return PartitionSpec(*spec[:place]), PartitionSpec(*spec[place:])

  def scattered(self, axes: Collection[str], sizes: Mapping[str, int]) -> int | None:
    """Returns the dim of y to reduce-scatter over fsdp instead of all-reducing over `axes`, if any.

    It is the "model" dim of a weight gradient, which is sharded over fsdp.
    """
    for place, dim in enumerate((*self.rows, self.columns)):
      if dim.name == "model" and "fsdp" in axes and dim.size % sizes["fsdp"] == 0:
        return place
    return None


def _matmul(a: jax.Array, b: jax.Array, form: _MatmulDims, dtype: Any) -> jax.Array:
  """Returns y in `dtype`; quantizes both operands along their last dims.

  On a mesh, each device multiplies its shards: XLA cannot partition the call, and JAX's own
  partitioning rule all-gathers tokens, and activations over tensor, instead of all-reducing partial
  sums. Weights are all-gathered in 8 bits, and their gradients reduce-scattered.
  """
  in_blocks = quantized(a), quantized(b)
  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes:
    return _block_scaled(*in_blocks, form, dtype)
  *others, last = form.contracted
  # Shards must be whole blocks.
  last = Dim(last.name, math.gcd(last.size, in_blocks[0].scales.shape[-1]))
  form = form._replace(contracted=(*others, last))
  of_y, of_contracted = form.partition(sizes)
  axes = mesh.axes_of(of_contracted)
  scattered = form.scattered(axes, sizes)

  def local(a: QuantizedBlocks, b: QuantizedBlocks) -> jax.Array:
    y, to_sum = _block_scaled(a, b, form, dtype), axes
    if scattered is not None:
      y = jax.lax.psum_scatter(y, "fsdp", scatter_dimension=scattered, tiled=True)
      to_sum = axes - {"fsdp"}
    return jax.lax.psum(y, tuple(sorted(to_sum))) if to_sum else y

  *of_rows, of_columns = of_y
  of_a, of_b = PartitionSpec(*of_rows, *of_contracted), PartitionSpec(of_columns, *of_contracted)
  if scattered is not None:
    of_y = PartitionSpec(*(("fsdp" if n == scattered else axis) for n, axis in enumerate(of_y)))
  on_all = mesh.on_each_device(local, (of_a, of_b), of_y)
  return on_all(*in_blocks)


def _block_scaled(
  a: QuantizedBlocks, b: QuantizedBlocks, form: _MatmulDims, dtype: Any
) -> jax.Array:
  """Returns y on one device."""

  def flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, math.prod(x.shape[x.ndim - len(form.contracted) :]))

  flat_a, flat_b = (QuantizedBlocks(*map(flat, one)) for one in (a, b))
  # Not `platform_dependent`, which would hide the matmul from remat policies.
  multiply = _by_cudnn if topology.multiplies_mxfp8(topology.devices()[0]) else _emulated
  return multiply(flat_a, flat_b, dtype).reshape(*a.values.shape[: len(form.rows)], -1)


def _by_cudnn(a: QuantizedBlocks, b: QuantizedBlocks, dtype: Any) -> jax.Array:
  values, scales = zip(*((x[None] for x in one) for one in (a, b)), strict=True)
  return jax.nn.scaled_matmul(*values, *scales, preferred_element_type=dtype)[0]


def _emulated(a: QuantizedBlocks, b: QuantizedBlocks, dtype: Any) -> jax.Array:
  # Without a barrier, XLA would remove the conversions to 8 bits and back.
  a, b = jax.lax.optimization_barrier((a, b))
  return (a.dequantized() @ b.dequantized().T).astype(dtype)
