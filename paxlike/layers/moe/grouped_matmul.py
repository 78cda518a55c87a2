# SPDX-License-Identifier: Apache-2.0
"""Grouped (ragged) matmul: rows sorted by group, times one matrix per group.

`jax.lax.ragged_dot` is one kernel on TPUs. On GPUs and CPUs, XLA multiplies every row by every
matrix instead; so NVIDIA GPUs run Triton kernels, and CPUs loop over blocks of rows, each a plain
matmul.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.devices import mesh, topology
from paxlike.layers.precision import cpu_dots

_LARGEST_BLOCK = 256
# Of the last block of a group, only the parts that have rows of the group are multiplied.
_PARTS = 4
_LEAST_PART = 8  # Rows; smaller blocks have no parts.


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["sizes_E"],
  meta_fields=["input_dim", "output_dim", "total"],
)
@dataclasses.dataclass(frozen=True)
class GroupedForm:
  """The `MatmulForm` for rows sorted by group (by expert): x [M, D] times w [E, D, F].

  Attributes:
    sizes_E: int32, the number of rows of each group; groups are consecutive.
    input_dim: The dim name of D, which decides its sharding.
    output_dim: The dim name of F.
    total: The number of groups on all devices, if groups are sharded.
  """

  sizes_E: jax.Array
  input_dim: str | None = None
  output_dim: str | None = None
  total: int | None = None

  def outputs(self, x_MD: jax.Array, w_EDF: jax.Array, dtype: Any) -> jax.Array:
    """Returns y [M, F] in `dtype`; not differentiable, unlike `matmul.by_form`.

    Rows beyond the last group are unspecified but finite.
    """
    if _has_kernels():
      from paxlike.layers.moe import grouped_matmul_triton

      kernel = functools.partial(grouped_matmul_triton.multiply, dtype=dtype)
      return _per_device("MD,EDF->MF", kernel, x_MD, w_EDF, self)
    with self.scope():
      return jax.lax.platform_dependent(
        x_MD,
        w_EDF,
        self.sizes_E,
        cpu=functools.partial(_multiply_blocks, dtype=dtype),
        default=functools.partial(jax.lax.ragged_dot, preferred_element_type=dtype),
      )

  def to_inputs(self, dy_MF: jax.Array, w_EDF: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of x, [M, D]."""
    if _has_kernels():
      from paxlike.layers.moe import grouped_matmul_triton

      kernel = functools.partial(grouped_matmul_triton.multiply, dtype=dtype, transposed=True)
      return _per_device("MF,EDF->MD", kernel, dy_MF, w_EDF, self)
    with self.scope():
      return jax.lax.platform_dependent(
        self.mask_unused(dy_MF),
        w_EDF,
        self.sizes_E,
        cpu=functools.partial(_multiply_blocks, dtype=dtype, axis=-1),
        default=lambda dy_MF, w_EDF, sizes_E: jax.lax.ragged_dot(
          dy_MF, w_EDF.swapaxes(1, 2), sizes_E, preferred_element_type=dtype
        ),
      )

  def to_weights(self, x_MD: jax.Array, dy_MF: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of w, [E, D, F]."""
    if _has_kernels():
      from paxlike.layers.moe import grouped_matmul_triton

      kernel = functools.partial(grouped_matmul_triton.multiply_transposed, dtype=dtype)
      return _per_device("MD,MF->EDF", kernel, x_MD, dy_MF, self)
    with self.scope():
      return jax.lax.platform_dependent(
        x_MD,
        self.mask_unused(dy_MF),
        self.sizes_E,
        cpu=functools.partial(_multiply_transposed_blocks, dtype=dtype),
        default=functools.partial(_ragged_transposed, dtype=dtype),
      )

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the scale [E, 1, F] of a weight as [M, F]: for each row of y, that of its group."""
    return jnp.repeat(scale[:, 0], self.sizes_E, axis=0, total_repeat_length=len(y))

  def mask_unused(self, x_MD: jax.Array) -> jax.Array:
    """Returns x with zeros in rows that are in no group, which must not contribute to gradients."""
    used_M = jnp.arange(len(x_MD)) < self.sizes_E.sum()
    return jnp.where(used_M[:, None], x_MD, jnp.zeros((), x_MD.dtype))

  def scope(self) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that names how many of all groups are here.

    `paxlike.compilation.hlo_kernels` reads it in compiled programs.
    """
    here = len(self.sizes_E)
    return jax.named_scope(f"groups_{here}_of_{self.total or here}")


def _has_kernels() -> bool:
  """Returns whether the target devices, all of one kind, run Triton kernels."""
  return topology.has_triton(topology.devices()[0])


def _per_device(
  equation: str, kernel: Callable[..., jax.Array], a: jax.Array, b: jax.Array, groups: GroupedForm
) -> jax.Array:
  """Calls a kernel, which XLA cannot partition, on shards of D and F; all-reduces partial sums.

  `equation` names the dims of a, b and the result, as in einsum.
  """

  def named(a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    with groups.scope():
      return kernel(a, b, sizes_E)

  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes:
    return named(a, b, groups.sizes_E)
  *operands, result = equation.replace("->", ",").split(",")
  lengths = dict(zip("".join(operands), (*a.shape, *b.shape), strict=True))
  spec = mesh.partition((groups.input_dim, groups.output_dim), (lengths["D"], lengths["F"]), sizes)
  axis_of = dict(zip("DF", spec, strict=True))
  *of_operands, of_result = (
    PartitionSpec(*map(axis_of.get, letters)) for letters in (*operands, result)
  )
  summed = tuple(sorted(mesh.axes_of(spec) - mesh.axes_of(of_result)))

  def local(a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    y = named(a, b, sizes_E)
    return jax.lax.psum(y, summed) if summed else y

  on_all = mesh.on_each_device(local, (*of_operands, PartitionSpec()), of_result)
  return on_all(a, b, groups.sizes_E)


def _ragged_transposed(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, *, dtype: Any
) -> jax.Array:
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jax.lax.ragged_dot_general(x_MD, dy_MF, sizes_E, dims, preferred_element_type=dtype)


def _block_size(num_rows: int, num_groups: int) -> int:
  """Returns the rows of a block, 8 to 256: half of the mean group's.

  Larger blocks have more padding, smaller ones multiply more slowly.
  """
  return min(_LARGEST_BLOCK, max(8, num_rows // num_groups // 2))


def _multiply_blocks(
  x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, dtype: Any, axis: int = -2
) -> jax.Array:
  """Returns rows times matrices; `axis` is the dim of w that is contracted."""
  M, E, F = len(x_MD), len(w_EDF), w_EDF.shape[-3 - axis]
  size, sums = _block_size(M, E), cpu_dots.sums_of(dtype)
  blocks_E = -(-sizes_E // size)
  last_blocks_E = jnp.cumsum(blocks_E)
  starts_E = jnp.cumsum(sizes_E) - sizes_E
  x_MD = jnp.pad(x_MD, ((0, size), (0, 0)))

  def block(i: jax.Array, y_MF: jax.Array) -> jax.Array:
    e = jnp.searchsorted(last_blocks_E, i, side="right")
    first = starts_E[e] + (i - last_blocks_E[e] + blocks_E[e]) * size
    x, w = _rows(x_MD, first, size), _matrix(w_EDF, e)

    def of_first(count: int) -> jax.Array:
      y = cpu_dots.dot(x[:count], w, axis, dtype=sums)
      return jnp.pad(y, ((0, size - count), (0, 0)))

    y = _with_least(of_first, starts_E[e] + sizes_E[e] - first, size)
    # The last block of a group overlaps the next group, which overwrites these rows later.
    return jax.lax.dynamic_update_slice_in_dim(y_MF, y, first, 0)

  y_MF = jax.lax.fori_loop(0, last_blocks_E[-1], block, jnp.zeros((M + size, F), sums))
  return y_MF[:M].astype(dtype)


def _multiply_transposed_blocks(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, *, dtype: Any
) -> jax.Array:
  (M, D), F, E = x_MD.shape, dy_MF.shape[1], len(sizes_E)
  size, sums = _block_size(M, E), cpu_dots.sums_of(dtype)
  x_MD, dy_MF = (jnp.pad(rows, ((0, size), (0, 0))) for rows in (x_MD, dy_MF))
  ends_E = jnp.cumsum(sizes_E)

  def group(e: jax.Array, dw_EDF: jax.Array) -> jax.Array:
    def block(i: jax.Array, dw_DF: jax.Array) -> jax.Array:
      first = ends_E[e] - sizes_E[e] + i * size
      own = (first + jnp.arange(size) < ends_E[e])[:, None]
      x = _rows(x_MD, first, size)
      x = jnp.where(own, x, jnp.zeros((), x.dtype))
      dy = _rows(dy_MF, first, size)

      def of_first(count: int) -> jax.Array:
        return cpu_dots.dot(cpu_dots.transposed(x[:count]), dy[:count], -2, dtype=sums)

      return dw_DF + _with_least(of_first, ends_E[e] - first, size)

    dw_DF = jax.lax.fori_loop(0, -(-sizes_E[e] // size), block, jnp.zeros((D, F), sums))
    return jax.lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, e, 0)

  return jax.lax.fori_loop(0, E, group, jnp.zeros((E, D, F), sums)).astype(dtype)


def _with_least(function: Callable[[int], jax.Array], used: jax.Array, size: int) -> jax.Array:
  """Returns function(count) for the least count that covers the first `used` rows of a block.

  Counts are one, two or three quarters of `size`, or `size`. Under a mesh of several devices it is
  always `size`: pipelines compute several stages at once, for which `switch` would compute each
  branch.
  """
  step = size // _PARTS
  if step < _LEAST_PART or mesh.sizes_here(mesh.AXES):
    return function(size)
  counts = [step * parts for parts in range(1, _PARTS)] + [size]
  branches = [functools.partial(function, count) for count in counts]
  return jax.lax.switch(jnp.clip((used - 1) // step, 0, _PARTS - 1), branches)


def _rows(x_MD: jax.Array, first: jax.Array, size: int) -> jax.Array:
  """Returns `size` rows from `first` on."""
  return jax.lax.dynamic_slice_in_dim(*cpu_dots.tied(x_MD, first), size)


def _matrix(w_EDF: jax.Array, e: jax.Array) -> jax.Array:
  """Returns w[e]."""
  w_EDF, e = cpu_dots.tied(w_EDF, e)
  return w_EDF[e]
