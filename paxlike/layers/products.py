# SPDX-License-Identifier: Apache-2.0
"""Products of rows with weights, in the shapes that layers need, each with those of its gradients.

What multiplies in few bits, a `Dot`, is written once for all of them.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paxlike.layers import grouped_matmul
from paxlike.layers.rounding import Rounding


class Product(Protocol):
  """A shape of products y = x w; the last dim of x is summed over."""

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns y in the dtype of the operands; it has a gradient."""
    ...

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Returns y with sums, and in, `dtype`."""
    ...

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of x."""
    ...

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of w."""
    ...

  def used(self, x: jax.Array) -> jax.Array:
    """Returns x, or dy, with zeros in the rows that no weight multiplies."""
    ...

  def of_rows(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the scale of a weight so that it broadcasts to y."""
    ...

  def largest_of_rows(self, dy: jax.Array) -> jax.Array:
    """Returns the largest of each column of dy, so that it broadcasts to dy and to w."""
    ...


class Dot(Protocol):
  """Multiplies in few bits, and in the gradients."""

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding | None:
    """Returns how a weight is rounded whose last dims are so many inputs and outputs.

    None: it is rounded, if at all, in every product.
    """
    ...

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Any) -> jax.Array:
    """Returns the product of x with what w was rounded to; the gradient is that of w."""
    ...


class Plain(NamedTuple):
  """x [..., D] times w [D, F]; `exact` also takes a w whose first `num_inputs` dims are D."""

  num_inputs: int = 1

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    if x.ndim == 2:
      return _matmul(x, w, self.num_inputs)
    return jnp.dot(x, w.reshape(x.shape[-1], -1))

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _dot(x, w, ((x.ndim - 1,), (0,)), dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _dot(dy, w, ((dy.ndim - 1,), (1,)), dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    leading = tuple(range(dy.ndim - 1))
    return _dot(x, dy, (leading, leading), dtype)

  def used(self, x: jax.Array) -> jax.Array:
    return x

  def of_rows(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale[0]

  def largest_of_rows(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(tuple(range(dy.ndim - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_MD: jax.Array, w: jax.Array, num_inputs: int) -> jax.Array:
  """Returns [M, F] for w [*D, *F]."""
  return _over_dims(x_MD, w, (0, num_inputs))


def _over_dims(x: jax.Array, w: jax.Array, dims: tuple[int, int]) -> jax.Array:
  """Returns x, a matrix, times w, summed over those dims of w."""
  summed = tuple(range(*dims))

  def as_matrices(x: jax.Array, w: jax.Array) -> jax.Array:
    if dims[0] == 0:
      return x @ w.reshape(x.shape[1], -1)
    return _dot(x, w.reshape(-1, x.shape[1]), ((1,), (1,)), x.dtype)

  def as_it_is(x: jax.Array, w: jax.Array) -> jax.Array:
    x = x.reshape(len(x), *(w.shape[dim] for dim in summed))
    y = _dot(x, w, (tuple(range(1, x.ndim)), summed), x.dtype)
    return y.reshape(len(x), -1)

  # XLA for TPUs takes a reshape of w out of one of the products in which rematerialization needs w,
  # and then all-gathers w in both shapes.
  if w.ndim > 2:
    return jax.lax.platform_dependent(x, w, tpu=as_it_is, default=as_matrices)
  return as_matrices(x, w)


def _matmul_backward(num_inputs: int, saved: Any, dy_MF: jax.Array) -> tuple[jax.Array, jax.Array]:
  x_MD, w = saved

  def transposed_first(x_MD: jax.Array, dy_MF: jax.Array) -> jax.Array:
    # XLA for CPUs takes up to twice as long for a product over the rows of both, if it is wide.
    # Barriers keep it from making one again.
    if x_MD.shape[1] >= dy_MF.shape[1]:
      return x_MD.T @ dy_MF
    return jax.lax.optimization_barrier(jax.lax.optimization_barrier(x_MD.T) @ dy_MF)

  dw_DF = jax.lax.platform_dependent(
    x_MD, dy_MF, cpu=transposed_first, default=lambda x_MD, dy_MF: x_MD.T @ dy_MF
  )
  # Not dy @ w.T: XLA would all-gather w.T besides the w that rematerialization multiplies with.
  return _over_dims(dy_MF, w, (num_inputs, w.ndim)), dw_DF.reshape(w.shape)


_matmul.defvjp(lambda x_MD, w, num: (_matmul(x_MD, w, num), (x_MD, w)), _matmul_backward)


class Placed(NamedTuple):
  """x [E, C, D] times w [E, D, F]: C rows for each expert."""

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ECD,EDF->ECF", x, w)

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECD,EDF->ECF", x, w, preferred_element_type=dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECF,EDF->ECD", dy, w, preferred_element_type=dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECD,ECF->EDF", x, dy, preferred_element_type=dtype)

  def used(self, x: jax.Array) -> jax.Array:
    return x

  def of_rows(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale

  def largest_of_rows(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(1, keepdims=True)


class Sorted(NamedTuple):
  """x [M, D], the rows in the order of their experts, times w [E, D, F]."""

  groups: grouped_matmul.Groups

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    return grouped_matmul.grouped_matmul(x, w, self.groups)

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.outputs(x, w, self.groups, dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.to_inputs(dy, w, self.groups, dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.to_weights(x, dy, self.groups, dtype)

  def used(self, x: jax.Array) -> jax.Array:
    return grouped_matmul.used(x, self.groups)

  def of_rows(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.repeat(scale[:, 0], self.groups.sizes_E, axis=0, total_repeat_length=len(y))

  def largest_of_rows(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(0)


def _dot(a: jax.Array, b: jax.Array, over: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any):
  return jax.lax.dot_general(a, b, (over, ((), ())), preferred_element_type=dtype)
