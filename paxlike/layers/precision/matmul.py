# SPDX-License-Identifier: Apache-2.0
"""Matmuls of linear layers, and the protocols of low-precision matmuls.

A low-precision `Dot` (FP8, INT8) quantizes operands, and is the same for linear layers and experts.
The `MatmulForm` that it is given knows their shapes, and multiplies them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from paxlike.devices import topology
from paxlike.layers.precision import cpu_dots
from paxlike.layers.precision.rounding import QuantizedOperand


class MatmulForm(Protocol):
  """A form of matmul y = x w that contracts the last dim of x: plain, batched or grouped by expert.

  A `Dot` quantizes the operands, and multiplies them by these methods.
  """

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any, /) -> jax.Array:
    """Returns y, accumulated and returned in `dtype`."""
    ...

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any, /) -> jax.Array:
    """Returns the gradient of x."""
    ...

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any, /) -> jax.Array:
    """Returns the gradient of w."""
    ...

  def broadcast_scale(self, scale: jax.Array, y: jax.Array, /) -> jax.Array:
    """Returns the scale of a weight, broadcastable to y."""
    ...


class Dot(Protocol):
  """A low-precision matmul, forward and backward."""

  @property
  def operands(self) -> str | None:
    """The format of its operands, "fp8" or "int8"; None: the compute dtype."""
    ...

  def quantized(self, w: jax.Array) -> QuantizedOperand | None:
    """Returns the quantized matrices [..., D, F], once per step (`Definition.quantize_operands`).

    None: the weight is not quantized ahead of the matmuls.
    """
    ...

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    """Returns x times the quantized w; gradients go to w (straight-through estimator).

    `w8` is the quantized w of this step; without it, this matmul quantizes w.
    """
    ...

  def finished(self, y: jax.Array) -> jax.Array:
    """Returns y; called on products, bias included, that XLA could compute with what follows."""
    return y


class Dim(NamedTuple):
  """A named dim of a weight."""

  name: str | None
  size: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LinearForm:
  """The `MatmulForm` of linear layers: x [..., D] times w [D, F].

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

  def outputs(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=dtype)

  def to_inputs(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    dims = (((dy.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(dy, w, dims, preferred_element_type=dtype)

  def to_weights(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    tokens = tuple(range(dy.ndim - 1))
    dims = ((tokens, tokens), ((), ()))
    return jax.lax.dot_general(x, dy, dims, preferred_element_type=dtype)

  def broadcast_scale(self, scale: jax.Array, y: jax.Array) -> jax.Array:
    return scale[0]


@jax.custom_vjp
def by_form(x: jax.Array, w: jax.Array, form: MatmulForm) -> Any:
  """Returns x w in the dtype of x; `form`, a pytree, computes it and its gradients.

  There is no forward-mode derivative.
  """
  return form.outputs(x, w, x.dtype)


def _form_forward(x: jax.Array, w: jax.Array, form: MatmulForm) -> tuple[jax.Array, Any]:
  return form.outputs(x, w, x.dtype), (x, w, form)  # See `_forward`.


def _form_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x, w, form = saved
  return form.to_inputs(dy, w, x.dtype), form.to_weights(x, dy, w.dtype), None


by_form.defvjp(_form_forward, _form_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul(
  x: jax.Array,
  w_DF: jax.Array,
  inputs: tuple[int, ...] = (),
  outputs: tuple[int, ...] = (),
) -> Any:
  """Returns x w, [..., F], for x [..., D].

  There is no forward-mode derivative.

  Args:
    x: The input, best as [M, D], or with all its dims if `keeps_dims`.
    w_DF: The weight.
    inputs: The sizes of the dims that are flattened to D; empty: one dim.
    outputs: The sizes of the dims that are flattened to F; empty: one dim.
  """
  return _product(x, w_DF, inputs, outputs)


def keeps_dims() -> bool:
  """Returns whether matmuls are fastest on unflattened dims (batch, time, heads ...): on TPUs.

  XLA for TPUs writes heads in the layout that attention reads. If the gradient of the weight then
  reads them as [M, F], XLA copies them. With remat, two matmuls read w, and if one of them reads it
  as [D, F], XLA all-gathers it in both shapes.
  """
  return topology.is_tpu()


def _forward(
  x: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Does not call `matmul`: remat policies do not see dots inside a custom_vjp.
  return _product(x, w_DF, inputs, outputs), (x, w_DF)


def _product(
  x: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> jax.Array:
  if x.ndim == 2 and not keeps_dims():
    return cpu_dots.dot(x, w_DF, -2) if cpu_dots.on_cpu() else x @ w_DF
  inputs, outputs = _kept(w_DF, inputs, outputs)
  *leading, _ = x.shape
  x, w = x.reshape(*leading, *inputs), w_DF.reshape(*inputs, *outputs)
  y = _contracted(x, w, [(len(leading) + n, n) for n in range(len(inputs))])
  return y.reshape(*leading, -1)


def _backward(
  inputs: tuple[int, ...], outputs: tuple[int, ...], saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, w_DF = saved
  if x.ndim == 2 and not keeps_dims():
    if cpu_dots.on_cpu():
      return cpu_dots.dot(dy, w_DF, -1), cpu_dots.dot_of_rows(x, dy)
    # Not dy @ w.T: XLA would all-gather w.T in addition to w, which rematerialization needs.
    return _contracted(dy, w_DF, [(1, 1)]), x.T @ dy
  inputs, outputs = _kept(w_DF, inputs, outputs)
  *leading, _ = shape = x.shape
  x, dy = x.reshape(*leading, *inputs), dy.reshape(*leading, *outputs)
  w = w_DF.reshape(*inputs, *outputs)
  dx = _contracted(dy, w, [(len(leading) + n, len(inputs) + n) for n in range(len(outputs))])
  dw = _contracted(x, dy, [(n, n) for n in range(len(leading))])
  return dx.reshape(shape), dw.reshape(w_DF.shape)


matmul.defvjp(_forward, _backward)


def _kept(
  w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the sizes of the dims of D and of F that matmuls keep."""
  D, F = w_DF.shape
  return (inputs or (D,), outputs or (F,)) if keeps_dims() else ((D,), (F,))


def _contracted(x: jax.Array, y: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
  """Returns the product of x and y that contracts pairs of (dim of x, dim of y)."""
  dims = (([of_x for of_x, _ in pairs], [of_y for _, of_y in pairs]), ((), ()))
  return jax.lax.dot_general(x, y, dims, preferred_element_type=x.dtype)
