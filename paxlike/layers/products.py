# SPDX-License-Identifier: Apache-2.0
"""Products of rows with weights, in the shapes that layers need, each with those of its gradients.

What multiplies in few bits, a `Dot`, is written once for all of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paxlike import topology
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


class Dim(NamedTuple):
  """A named dim of a weight."""

  name: str | None
  size: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plain:
  """x [..., D] times w [D, F].

  Attributes:
    in_dims: The dims that D joins; none: they are not known.
    out_dims: Those that F joins.
  """

  in_dims: tuple[Dim, ...] = ()
  out_dims: tuple[Dim, ...] = ()

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    if x.ndim != 2:
      return jnp.dot(x, w)
    inputs, outputs = (tuple(dim.size for dim in dims) for dims in (self.in_dims, self.out_dims))
    return _matmul(x, w, inputs, outputs)

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


def _product(
  x_MD: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> jax.Array:
  """Returns x w; `inputs` and `outputs` are the sizes of the dims that D and F join."""
  if _keeps_dims(inputs, outputs):
    return _over(x_MD.reshape(-1, *inputs), w_DF.reshape(*inputs, *outputs), 0)
  return x_MD @ w_DF


_matmul = functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))(_product)


def _forward(
  x_MD: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Not _matmul, in which policies of rematerialization would find no product to save.
  return _product(x_MD, w_DF, inputs, outputs), (x_MD, w_DF)


def _backward(
  inputs: tuple[int, ...], outputs: tuple[int, ...], saved: Any, dy_MF: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_MD, w_DF = saved

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
  if not _keeps_dims(inputs, outputs):
    return _over(dy_MF, w_DF, 1), dw_DF
  w = w_DF.reshape(*inputs, *outputs)
  return _over(dy_MF.reshape(-1, *outputs), w, len(inputs)), dw_DF


_matmul.defvjp(_forward, _backward)


def _keeps_dims(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
  """Returns whether a weight is multiplied in all its dims: on TPUs, if they are more than two.

  XLA for TPUs moves a reshape of w out of one of the products in which rematerialization needs w,
  and then all-gathers w in both shapes.
  """
  return len(inputs) + len(outputs) > 2 and topology.devices()[0].platform == "tpu"


def _over(x: jax.Array, w: jax.Array, first: int) -> jax.Array:
  """Returns x w as a matrix, summed over all dims of x but one and those of w from `first` on."""
  axes = tuple(range(1, x.ndim))
  y = _dot(x, w, (axes, tuple(first + axis - 1 for axis in axes)), x.dtype)
  return y.reshape(len(x), -1)


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
