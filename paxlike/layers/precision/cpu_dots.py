# SPDX-License-Identifier: Apache-2.0
"""Dots that XLA for CPUs computes fast.

It converts the operands of most dots in bfloat16 to float32, which takes twice as long where the
processor has instructions for bfloat16 (AVX512-BF16, AMX). A dot keeps its operands if it

- accumulates in float32,
- has at most one batch dim, the first,
- contracts the last dim of its first operand, and
- has no operand that is itself the result of a transposition: the compiler sees that as an array of
  another layout, and the library takes only the default one.

`dot` sees to the first three, its callers to the last one, by `transposed`. One row, as of a text
that is decoded, is multiplied without the library: see `dot_of_one_row`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paxlike.devices import mesh, processor, topology

_FEW_ROWS = 4
_BLOCK = 256  # Contracted numbers.
# Parts of a matrix, by its contracted dim.
_PARTS = {-2: 8, -1: 16}
# From so many contracted numbers on, parts are faster than the library.
_LEAST_CONTRACTED = {-2: 16, -1: 256}
# Rows of a result of which threads can have equal shares.
_ALIGNED = 64


def on_cpu() -> bool:
  """Returns whether the target devices, all of one kind, are CPUs."""
  return topology.devices()[0].platform == "cpu"


def dot(a: jax.Array, b: jax.Array, axis: int, *, dtype: Any = None) -> jax.Array:
  """Returns the product of a [..., M, D] and b over its `axis`; sums of bfloat16 are float32.

  Where `reads_once` holds and b is bfloat16, there is no forward-mode derivative.

  Args:
    a: [M, D] or, with a batch dim, [G, M, D].
    b: [D, F] or [F, D]; with a batch dim, [G, D, F] or [G, F, D].
    axis: Of b: the one of D, -2 or -1.
    dtype: Of the result; None: that of a.
  """
  dtype = a.dtype if dtype is None else dtype
  if b.ndim == 2 and b.dtype == jnp.bfloat16 and reads_once(len(a), a.shape[1], axis):
    y_F = dot_of_one_row(a, b[None], None) if axis == -2 else _dot_of_row_and_columns(a[0], b)
    return y_F[None].astype(dtype)
  if a.dtype not in (jnp.bfloat16, jnp.int8) or not 0 < a.shape[-2] <= _FEW_ROWS:
    return _dot(a, b, axis, sums_of(dtype)).astype(dtype)
  # For one row XLA has a loop of its own, ten times slower than the library with two rows.
  rows = jnp.concatenate([a, jnp.zeros_like(a)], -2) if a.shape[-2] == 1 else a
  if a.ndim == 2 and axis == -2 and len(b) % _BLOCK == 0 and not mesh.sizes_here(mesh.AXES):
    # With few rows most of the time goes to arranging b, which is faster block by block.
    rows_GMK = _rewritten(rows.reshape(len(rows), -1, _BLOCK).swapaxes(0, 1))
    y = _dot(rows_GMK, b.reshape(-1, _BLOCK, b.shape[1]), axis, sums_of(dtype)).sum(0)
  else:
    y = _dot(rows, b, axis, sums_of(dtype))
  return y[..., : a.shape[-2], :].astype(dtype)


def _dot(a: jax.Array, b: jax.Array, axis: int, sums: Any) -> jax.Array:
  batch = tuple(range(a.ndim - 2))
  dims = (((a.ndim - 1,), (b.ndim + axis,)), (batch, batch))
  return jax.lax.dot_general(a, b, dims, preferred_element_type=sums)


def dot_of_heads(x_BNI: jax.Array, w_NIO: jax.Array, axis: int) -> jax.Array:
  """Returns x of each head times its own matrix, [B, N, O], for few B.

  Args:
    x_BNI: One vector per head.
    w_NIO: The matrices, a transposed weight: [N, I, O] if `axis` is -2, [N, O, I] if it is -1.
    axis: Of w, the one of I.
  """
  if not on_cpu():
    return jnp.einsum("BNI,NIO->BNO", x_BNI, w_NIO if axis == -2 else w_NIO.swapaxes(1, 2))
  # The barrier keeps the product from undoing the transposition, to make another one in each step,
  # number by number. XLA moves it ahead of the loop of steps, where layers are unrolled.
  return dot(x_BNI.swapaxes(0, 1), jax.lax.optimization_barrier(w_NIO), axis).swapaxes(0, 1)


def reads_once(num_rows: int, num_inputs: int, axis: int = -2) -> bool:
  """Returns whether rows are multiplied in parts of a matrix, contracting `num_inputs` numbers."""
  on_one_device = not mesh.sizes_here(mesh.AXES)
  divides = num_inputs % _PARTS[axis] == 0 and num_inputs >= _LEAST_CONTRACTED[axis]
  return num_rows == 1 and divides and on_cpu() and on_one_device


@jax.custom_vjp
def dot_of_one_row(x_GK: jax.Array, w_GKF: jax.Array, scale_GF: jax.Array | None) -> Any:
  """Returns the sum over blocks of x w times the block's scale, float32 [F]; reads w once.

  The library would arrange w in another order, which takes longer than to multiply one row. Here,
  parts of w are multiplied and added up number by number, at the speed of memory. The sums of the
  parts, an eighth of w in float32, are stored and read again. There is no forward-mode derivative.

  Args:
    x_GK: A row in G blocks.
    w_GKF: bfloat16 or int8; `reads_once` must hold for K.
    scale_GF: float32; None: 1.
  """
  return _row_in_parts(x_GK, w_GKF, scale_GF)


@jax.jit  # Traced and lowered once for all matrices of a shape.
def _row_in_parts(x_GK: jax.Array, w_GKF: jax.Array, scale_GF: jax.Array | None) -> jax.Array:
  # Tied to the row, so that no loop takes or converts the parts ahead.
  x_GK, w_GKF = jax.lax.optimization_barrier((x_GK, w_GKF))
  x_GPK = x_GK.astype(jnp.float32).reshape(len(x_GK), _PARTS[-2], -1)
  parts_GKF = enumerate(_parts(w_GKF, -2))
  y_GKF: Any = sum(x_GPK[:, p, :, None] * part_GKF for p, part_GKF in parts_GKF)
  if scale_GF is not None:
    y_GKF *= scale_GF[:, None]
  y_MF = y_GKF.reshape(-1, y_GKF.shape[-1])
  return (jnp.ones((1, len(y_MF)), jnp.float32) @ y_MF)[0]


def _row_backward(saved: tuple[Any, ...], dy_F: jax.Array) -> tuple[Any, ...]:
  def product(x_GK: jax.Array, w_GKF: jax.Array, scale_GF: jax.Array | None) -> jax.Array:
    y_GF = jnp.einsum("GK,GKF->GF", x_GK.astype(jnp.float32), w_GKF.astype(jnp.float32))
    return (y_GF if scale_GF is None else y_GF * scale_GF).sum(0)

  return jax.vjp(product, *saved)[1](dy_F)


dot_of_one_row.defvjp(lambda *given: (dot_of_one_row(*given), given), _row_backward)


@jax.custom_vjp
def _dot_of_row_and_columns(x_K: jax.Array, w_FK: jax.Array) -> jax.Array:
  """Returns x w.T, float32 [F], as `dot_of_one_row` does; w is bfloat16."""
  return _columns_in_parts(x_K, w_FK)


@jax.jit  # As above.
def _columns_in_parts(x_K: jax.Array, w_FK: jax.Array) -> jax.Array:
  x_K, w_FK = jax.lax.optimization_barrier((x_K.astype(jnp.float32), w_FK))
  # If threads have unequal shares, the loop of the last one may not be vectorized.
  most = len(w_FK) // _ALIGNED * _ALIGNED
  x_PK = x_K.reshape(_PARTS[-1], -1)
  y_FK: Any = sum(x_PK[p] * part_FK for p, part_FK in enumerate(_parts(w_FK, -1, most)))
  y_F = (y_FK @ jnp.ones((y_FK.shape[1], 1), jnp.float32))[:, 0]
  return jnp.append(y_F, w_FK[most:].astype(jnp.float32) @ x_K)


def _row_and_columns_backward(
  saved: tuple[jax.Array, jax.Array], dy_F: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_K, w_FK = saved
  dx_K, dw_FK = dy_F @ w_FK.astype(jnp.float32), jnp.outer(dy_F, x_K.astype(jnp.float32))
  return dx_K.astype(x_K.dtype), dw_FK.astype(w_FK.dtype)


_dot_of_row_and_columns.defvjp(
  lambda *given: (_dot_of_row_and_columns(*given), given), _row_and_columns_backward
)


def _parts(w: jax.Array, axis: int, most: int | None = None) -> list[jax.Array]:
  """Returns w[:most] in parts along `axis`, in float32, which XLA fuses with what uses them."""
  at = w.ndim + axis
  shape = (*w.shape[:at], _PARTS[axis], -1, *w.shape[at + 1 :])
  # Of bfloat16, XLA would convert the whole array to take a part; so they are taken of its bits.
  # It fuses no operation that has 16 users; so half of the parts are of another dtype.
  kinds = (jnp.uint16, jnp.int16) if w.dtype == jnp.bfloat16 else (w.dtype, w.dtype)
  arrays = [jax.lax.bitcast_convert_type(w, kind).reshape(shape)[:most] for kind in kinds]
  places = range(_PARTS[axis])
  parts = [jax.lax.index_in_dim(arrays[p % 2], p, at, keepdims=False) for p in places]
  return [_as_float32(part) for part in jax.lax.optimization_barrier(parts)]


def _as_float32(part: jax.Array) -> jax.Array:
  """Returns integers, or the bits of bfloat16, in float32."""
  if part.dtype == jnp.int8:
    return part.astype(jnp.float32)
  wide = jnp.uint32 if part.dtype == jnp.uint16 else jnp.int32
  return jax.lax.bitcast_convert_type(part.astype(wide) << 16, jnp.float32)


def has_few(num_rows: int) -> bool:
  """Returns whether `dot_of_integers` of so many rows is faster than a dot with w converted."""
  return 0 < num_rows <= _FEW_ROWS and on_cpu()


@jax.custom_vjp
def dot_of_integers(x_GMK: jax.Array, w_GKF: jax.Array) -> jax.Array:
  """Returns x w [G, M, F], float32, for a w of int8.

  XLA would convert w to the dtype of x, which takes longer than the product. Instead each row of x
  becomes several rows of int8: the digits, to the base of 128, of its numbers. So these are rounded
  to 2**-29 of the row's largest, or 2**-22 if x is bfloat16. There is no forward-mode derivative.
  """
  num_digits = 3 if x_GMK.dtype == jnp.bfloat16 else 4
  x_GMK = x_GMK.astype(jnp.float32)
  unit_GM1 = jnp.maximum(jnp.abs(x_GMK).max(-1, keepdims=True), 1e-30) / 127
  left_GMK, digits = x_GMK / unit_GM1, []
  for _ in range(num_digits):
    digits.append(jnp.round(left_GMK))
    left_GMK = (left_GMK - digits[-1]) * 128
  rows = jnp.concatenate(digits, 1).astype(jnp.int8)
  G, M, _ = x_GMK.shape
  sums = (
    dot(rows[0], w_GKF[0], -2, dtype=jnp.int32) if G == 1 else dot(rows, w_GKF, -2, dtype=jnp.int32)
  )
  by_place = jnp.split(sums.astype(jnp.float32).reshape(G, num_digits * M, -1), num_digits, 1)
  return sum(y_GMF / 128**place for place, y_GMF in enumerate(by_place)) * unit_GM1


def _integers_backward(
  saved: tuple[jax.Array, jax.Array], dy_GMF: jax.Array
) -> tuple[jax.Array, None]:
  x_GMK, w_GKF = saved
  return jnp.einsum("GMF,GKF->GMK", dy_GMF, w_GKF.astype(dy_GMF.dtype)).astype(x_GMK.dtype), None


dot_of_integers.defvjp(lambda *given: (dot_of_integers(*given), given), _integers_backward)


@jax.custom_vjp
def dot_of_columns(x_MD: jax.Array, w_FD: jax.Array) -> jax.Array:
  """Returns x w.T [M, F]; neither it nor its gradients transpose w."""
  return dot(x_MD, w_FD, -1)


def _columns_backward(
  saved: tuple[jax.Array, jax.Array], dy_MF: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_MD, w_FD = saved
  # The transpose of the smaller product: dy may be much larger than w.
  return dot(dy_MF, w_FD, -2), dot_of_rows(x_MD, dy_MF).T


dot_of_columns.defvjp(lambda *given: (dot_of_columns(*given), given), _columns_backward)


def dot_of_rows(x_MD: jax.Array, y_MF: jax.Array) -> jax.Array:
  """Returns x.T y [D, F], such as the gradient of a weight."""
  in_bfloat16, D, F = x_MD.dtype == jnp.bfloat16, x_MD.shape[1], y_MF.shape[1]
  on_one_device = not mesh.sizes_here(mesh.AXES)
  # Processes of one program must agree on it, and may be on different processors.
  on_intel = on_one_device and processor.is_from_intel()
  if not in_bfloat16 and not on_intel and D >= F:
    return x_MD.T @ y_MF
  if D > F and on_one_device:  # Sharded, it would be all-gathered to be rewritten.
    # The narrower operand comes first. What follows wants the default layout.
    return _rewritten(dot_of_rows(y_MF, x_MD).T)
  # The barriers keep XLA from computing y.T x instead where the result is transposed afterwards.
  if not in_bfloat16 and on_intel:
    return jax.lax.optimization_barrier(x_MD.T @ y_MF)
  # In float32, to transpose x first halves the time on AMD's processors, and is slower on Intel's.
  return jax.lax.optimization_barrier(dot(transposed(x_MD), y_MF, -2))


def sums_of(dtype: Any) -> Any:
  """Returns the dtype in which to sum a result of `dtype`.

  XLA for CPUs also copies whole arrays of bfloat16 of which a slice is updated.
  """
  return jnp.float32 if dtype == jnp.bfloat16 else dtype


def tied(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns both, tied together: a loop that reads x[index] then converts only that part of x.

  XLA of JAX 0.10 converts an array of bfloat16 to float32 ahead of a loop that reads parts of it.
  """
  return jax.lax.optimization_barrier((x, index)) if x.dtype == jnp.bfloat16 else (x, index)


def transposed(x: jax.Array) -> jax.Array:
  """Returns x [..., M, D] as [..., D, M], which no dot takes back to contract the first dim."""
  y = x.swapaxes(-1, -2)
  # Sharded, it would be all-gathered to be rewritten.
  rewrites = x.dtype == jnp.bfloat16 and not mesh.sizes_here(mesh.AXES)
  return _rewritten(y) if rewrites else jax.lax.optimization_barrier(y)


def _rewritten(x: jax.Array) -> jax.Array:
  """Returns x stored anew in the default layout; a transposition may be no more than a layout."""
  return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)
