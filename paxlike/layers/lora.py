# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation of linear maps (Hu et al., 2021, arXiv:2106.09685)."""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers import module
from paxlike.layers.call_context import Context
from paxlike.layers.dropout import Dropout

# A regular expression that matches the names of LoRA weights.
WEIGHTS = r"(^|\.)lora\."


def scale_of(rank: int, alpha: float | None, *, rslora: bool = False) -> float:
  """Returns the multiplier of an adapter's output.

  alpha / rank or, `rslora`, alpha / sqrt(rank) (rsLoRA; Kalajdzievski, 2023,
  arXiv:2312.03732); 1 if alpha is None.
  """
  if alpha is None:
    return 1.0
  return alpha / (math.sqrt(rank) if rslora else rank)


class Base(Protocol):
  """The frozen linear map that an adapter is added to."""

  def multiply(self, x: jax.Array) -> jax.Array:
    """Returns [..., F] for x [..., D], without bias and adapter."""
    ...

  def frozen_matrix(self) -> jax.Array:
    """Returns the weight [D, F] in the compute dtype, without the adapter."""
    ...


@configurable
class Lora(module.Module):
  """The low-rank update scale * x a b that a linear map adds to its output.

  Attributes:
    scale: Multiplier of the update; see `scale_of`.
    dtype: The dtype of the matmuls.
  """

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    rank: ranges.Size,
    scale: ranges.Finite = 1.0,
    dropout: Callable[[], Dropout] | None = None,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.num_inputs = len(inputs)
    self.scale = scale
    self.dtype = dtype
    self.dropout = None if dropout is None else dropout()
    self._key = zlib.crc32(role.encode())
    low_rank = {"adapter": rank}
    num_inputs, num_outputs = (math.prod(dims.values()) for dims in (inputs, outputs))
    self.a = self.weight(
      {**inputs, **low_rank},
      init=init,
      fan_in=tuple(inputs),
      matmul=module.Matmul(num_inputs, rank),
      compute_dtype=dtype,
    )
    self.b = self.weight(
      {**low_rank, **outputs},
      init=module.zeros,
      matmul=module.Matmul(rank, num_outputs),
      compute_dtype=dtype,
    )

  def __call__(self, x: jax.Array, y: jax.Array, *, base: Base, context: Context | None):
    """Returns the adapted output [..., F] for inputs x [..., D] and the output y of `base`.

    D and F are the flattened inputs and outputs.
    """
    del base
    return y + self._update(self._dropped(x, context))

  def merged(self, w_DF: jax.Array) -> jax.Array:
    """Returns the weight [D, F] with the adapter merged into it, in the compute dtype."""
    a_DR, b_RF = self._matrices()
    return w_DF + a_DR @ b_RF * self.scale

  def _dropped(self, x: jax.Array, context: Context | None) -> jax.Array:
    if self.dropout is None or context is None:
      return x
    return self.dropout(x, context.fold(self._key))

  def _update(self, x: jax.Array) -> jax.Array:
    a_DR, b_RF = self._matrices()
    return (x.astype(self.dtype) @ a_DR) @ b_RF * self.scale

  def _matrices(self) -> tuple[jax.Array, jax.Array]:
    a, b = self.a[...].astype(self.dtype), self.b[...].astype(self.dtype)
    return a.reshape(math.prod(a.shape[:-1]), -1), b.reshape(b.shape[0], -1)


@configurable
class Dora(Lora):
  """LoRA with a trained magnitude of each output (DoRA; Liu et al., 2024, arXiv:2402.09353).

  With v = w + scale * a b, the adapted weight is m * v / norm(v) for each output (column of w). The
  norm has no gradient, as in section 4.3 of the paper. `magnitude` is m - norm(w): it is trained
  like m, and is 0 for the base model.
  """

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    rank: ranges.Size,
    scale: ranges.Finite = 1.0,
    dropout: Callable[[], Dropout] | None = None,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    super().__init__(
      inputs, outputs, role=role, rank=rank, scale=scale, dropout=dropout, init=init, dtype=dtype
    )
    self.magnitude = self.weight(outputs, init=module.zeros)

  def __call__(self, x: jax.Array, y: jax.Array, *, base: Base, context: Context | None):
    dropped = self._dropped(x, context)
    factor_F = self._factor(base.frozen_matrix())
    without = y if dropped is x else base.multiply(dropped)
    # In float32: a factor near 1 would be rounded to 1 in bfloat16.
    sum_ = without.astype(jnp.float32) + self._update(dropped).astype(jnp.float32)
    if without is y:
      return (sum_ * factor_F).astype(y.dtype)
    return (y + (sum_ * factor_F - without.astype(jnp.float32))).astype(y.dtype)

  def merged(self, w_DF: jax.Array) -> jax.Array:
    merged = super().merged(w_DF).astype(jnp.float32) * self._factor(w_DF)
    return merged.astype(w_DF.dtype)

  def _factor(self, w_DF: jax.Array) -> jax.Array:
    """Returns m / norm(v) of each output, float32 [F].

    norm(v)^2 is expanded into sums over the rank, so that v, of the size of the weight, is never
    computed.
    """
    w_DF = jax.lax.stop_gradient(w_DF)
    a_DR, b_RF = (jax.lax.stop_gradient(w) for w in self._matrices())
    squares_F = jnp.square(w_DF.astype(jnp.float32)).sum(0)
    b_RF = self.scale * b_RF.astype(jnp.float32)
    a_times_w_RF = jnp.dot(a_DR.T, w_DF, preferred_element_type=jnp.float32)
    gram_RR = jnp.dot(a_DR.T, a_DR, preferred_element_type=jnp.float32)
    added_F = (b_RF * (2 * a_times_w_RF + gram_RR @ b_RF)).sum(0)
    norm_F = jnp.sqrt(jnp.maximum(squares_F + added_F, 0))
    has_norm_F = norm_F > 0  # An output whose weights are all 0 stays 0.
    magnitude_F = jnp.sqrt(squares_F) + self.magnitude[...].reshape(-1)
    return jnp.where(has_norm_F, magnitude_F / jnp.where(has_norm_F, norm_F, 1), 1)
