# SPDX-License-Identifier: Apache-2.0
"""The forms of matmul in layers, each with the matmuls of its gradients.

A low-precision `Dot` supports all of them through the protocol `Product`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paxlike.devices import topology
from paxlike.layers.moe import grouped_matmul
from paxlike.layers.precision.rounding import Rounding


class Product(Protocol):
  """A form of matmul y = x w that contracts the last dim of x."""

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns y in the dtype of the operands; differentiable."""
    ...

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Returns y, accumulated and returned in `dtype`."""
    ...

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of x."""
    ...

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of w."""
    ...

  def mask_unused(self, x: jax.Array) -> jax.Array:
    """Returns x (or dy) with zeros for tokens that no weight multiplies."""
    ...

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the scale of a weight, broadcastable to y."""
    ...

  def column_amax(self, dy: jax.Array) -> jax.Array:
    """Returns the amax over tokens of each column of dy, broadcastable to dy and to w."""
    ...


class Dot(Protocol):
  """A low-precision matmul, forward and backward."""

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding | None:
    """Returns how to quantize a weight [..., *inputs, *outputs] once per step.

    None: the weight is not quantized ahead of the matmuls.

    Args:
      num_inputs: The number of input dims.
      num_outputs: The number of output dims.
    """
    ...

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Any) -> jax.Array:
    """Returns x times the quantized w; gradients go to w (straight-through estimator)."""
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
    in_dims: The dims that are flattened to D; empty: unknown.
    out_dims: The dims that are flattened to F.
  """

  in_dims: tuple[Dim, ...] = ()
  out_dims: tuple[Dim, ...] = ()

  @property
  def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the dims that are flattened to D, and to F."""
    inputs, outputs = (tuple(dim.size for dim in dims) for dims in (self.in_dims, self.out_dims))
    return inputs, outputs

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w, *self.sizes) if x.ndim == 2 else jnp.dot(x, w)

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _dot(x, w, ((x.ndim - 1,), (0,)), dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _dot(dy, w, ((dy.ndim - 1,), (1,)), dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    leading = tuple(range(dy.ndim - 1))
    return _dot(x, dy, (leading, leading), dtype)

  def mask_unused(self, x: jax.Array) -> jax.Array:
    return x

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale[0]

  def column_amax(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(tuple(range(dy.ndim - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul(
  x_MD: jax.Array,
  w_DF: jax.Array,
  inputs: tuple[int, ...] = (),
  outputs: tuple[int, ...] = (),
) -> Any:
  """Returns x w [M, F]; `inputs` and `outputs` are the sizes of the dims flattened to D and F."""
  return _forward(x_MD, w_DF, inputs, outputs)[0]


def _forward(
  x_MD: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Does not call `matmul`: remat policies do not see dots inside a custom_vjp.
  if _keeps_dims(inputs, outputs):
    y_MF = _over(x_MD.reshape(-1, *inputs), w_DF.reshape(*inputs, *outputs), 0)
  else:
    y_MF = x_MD @ w_DF
  return y_MF, (x_MD, w_DF)


def _backward(
  inputs: tuple[int, ...], outputs: tuple[int, ...], saved: Any, dy_MF: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_MD, w_DF = saved

  def transposed_first(x_MD: jax.Array, dy_MF: jax.Array) -> jax.Array:
    # XLA for CPUs takes up to twice as long to contract the leading dims of wide operands. Barriers
    # keep it from folding the transpose back into the dot.
    if x_MD.shape[1] >= dy_MF.shape[1]:
      return x_MD.T @ dy_MF
    return jax.lax.optimization_barrier(jax.lax.optimization_barrier(x_MD.T) @ dy_MF)

  dw_DF = jax.lax.platform_dependent(
    x_MD, dy_MF, cpu=transposed_first, default=lambda x_MD, dy_MF: x_MD.T @ dy_MF
  )
  # Not dy @ w.T: XLA would all-gather w.T in addition to w, which rematerialization needs.
  if not _keeps_dims(inputs, outputs):
    return _over(dy_MF, w_DF, 1), dw_DF
  w = w_DF.reshape(*inputs, *outputs)
  return _over(dy_MF.reshape(-1, *outputs), w, len(inputs)), dw_DF


matmul.defvjp(_forward, _backward)


def _keeps_dims(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
  """Returns whether a dot keeps all dims of the weight: on TPUs, if there are more than two.

  With remat, two matmuls read w; XLA for TPUs moves a reshape of w out of one of them, and then
  all-gathers w in both shapes.
  """
  return len(inputs) + len(outputs) > 2 and topology.devices()[0].platform == "tpu"


def _over(x: jax.Array, w: jax.Array, first: int) -> jax.Array:
  """Returns x w [M, -1], contracting all dims of x but the first with dims of w from `first` on."""
  axes = tuple(range(1, x.ndim))
  y = _dot(x, w, (axes, tuple(first + axis - 1 for axis in axes)), x.dtype)
  return y.reshape(len(x), -1)


class Placed(NamedTuple):
  """x [E, C, D] times w [E, D, F]: C capacity slots per expert."""

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ECD,EDF->ECF", x, w)

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECD,EDF->ECF", x, w, preferred_element_type=dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECF,EDF->ECD", dy, w, preferred_element_type=dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum("ECD,ECF->EDF", x, dy, preferred_element_type=dtype)

  def mask_unused(self, x: jax.Array) -> jax.Array:
    return x

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale

  def column_amax(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(1, keepdims=True)


class Sorted(NamedTuple):
  """x [M, D], tokens sorted by expert, times w [E, D, F]."""

  groups: grouped_matmul.Groups

  def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
    return grouped_matmul.grouped_matmul(x, w, self.groups)

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.outputs(x, w, self.groups, dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.to_inputs(dy, w, self.groups, dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    return grouped_matmul.to_weights(x, dy, self.groups, dtype)

  def mask_unused(self, x: jax.Array) -> jax.Array:
    return grouped_matmul.mask_unused(x, self.groups)

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.repeat(scale[:, 0], self.groups.sizes_E, axis=0, total_repeat_length=len(y))

  def column_amax(self, dy: jax.Array) -> jax.Array:
    return jnp.abs(dy).max(0)


def _dot(a: jax.Array, b: jax.Array, over: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any):
  return jax.lax.dot_general(a, b, (over, ((), ())), preferred_element_type=dtype)
