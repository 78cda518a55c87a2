# SPDX-License-Identifier: Apache-2.0
"""Matmuls of linear layers, and the protocols of low-precision matmuls.

A low-precision `Dot` (FP8, INT8) quantizes operands, and is the same for linear layers and experts.
The `MatmulForm` that it is given knows their shapes, and multiplies them.
"""

import dataclasses
import functools
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
  x_MD: jax.Array,
  w_DF: jax.Array,
  inputs: tuple[int, ...] = (),
  outputs: tuple[int, ...] = (),
) -> Any:
  """Returns x w [M, F]; `inputs` and `outputs` are the sizes of the dims flattened to D and F."""
  return _product(x_MD, w_DF, inputs, outputs)


def _forward(
  x_MD: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Does not call `matmul`: remat policies do not see dots inside a custom_vjp (as one row is).
  return _product(x_MD, w_DF, inputs, outputs), (x_MD, w_DF)


def _product(
  x_MD: jax.Array, w_DF: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> jax.Array:
  if _keeps_dims(inputs, outputs):
    return _over(x_MD.reshape(-1, *inputs), w_DF.reshape(*inputs, *outputs), 0)
  return cpu_dots.dot(x_MD, w_DF, -2) if cpu_dots.on_cpu() else x_MD @ w_DF


def _backward(
  inputs: tuple[int, ...], outputs: tuple[int, ...], saved: Any, dy_MF: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_MD, w_DF = saved
  if cpu_dots.on_cpu():
    return cpu_dots.dot(dy_MF, w_DF, -1), cpu_dots.dot_of_rows(x_MD, dy_MF)
  dw_DF = x_MD.T @ dy_MF
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
  dims = ((axes, tuple(first + axis - 1 for axis in axes)), ((), ()))
  y = jax.lax.dot_general(x, w, dims, preferred_element_type=x.dtype)
  return y.reshape(len(x), -1)
