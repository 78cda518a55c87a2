# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation of linear maps (Hu et al., 2021, arXiv:2106.09685)."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers import module
from paxlike.layers.call_context import Context
from paxlike.layers.dropout import Dropout
from paxlike.layers.precision import float32_sums

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

  def __init__(self, inputs: Mapping[str, int], outputs: Mapping[str, int], **others: Any):
    """See `Lora` for the arguments."""
    super().__init__(inputs, outputs, **others)
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


@configurable
class ExpertLora(module.Module):
  """A low-rank update scale * x a b per expert; see `Lora`."""

  def __init__(
    self,
    num_experts: ranges.Size,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    num_chosen: ranges.Size,
    *,
    rank: ranges.Size,
    scale: ranges.Finite = 1.0,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.scale = scale
    self.dtype = dtype
    ((self._input, num_inputs),), ((self._output, num_outputs),) = inputs.items(), outputs.items()
    experts, low_rank = {"experts": num_experts}, {"adapter": rank}

    def matmul(inputs: int, outputs: int) -> module.Matmul:
      sizes = num_chosen * inputs, num_chosen * outputs
      return module.Matmul(*sizes, share=num_chosen / num_experts)

    self.a = self.weight(
      {**experts, **inputs, **low_rank},
      init=init,
      fan_in=tuple(inputs),
      matmul=matmul(num_inputs, rank),
      compute_dtype=dtype,
    )
    self.b = self.weight(
      {**experts, **low_rank, **outputs},
      init=module.zeros,
      matmul=matmul(rank, num_outputs),
      compute_dtype=dtype,
    )

  def __call__(
    self, x: jax.Array, y: jax.Array, *, multiply: Callable[[jax.Array, jax.Array, str, str], Any]
  ) -> jax.Array:
    """Returns the adapted output for the inputs x and the output y of the experts.

    `multiply(x, w, input_dim, output_dim)` multiplies the tokens of each expert by its matrix of
    w [E, input_dim, output_dim].
    """
    a_EDR, b_ERF = self.a[...].astype(self.dtype), self.b[...].astype(self.dtype)
    low = multiply(x.astype(self.dtype), a_EDR, self._input, "adapter")
    return y + multiply(low, b_ERF, "adapter", self._output) * self.scale


@configurable
class EmbeddingLora(module.Module):
  """The low-rank update scale * a b of an embedding table; a begins at zero, as in PEFT.

  So the vectors of tokens that are not in the data do not change.
  """

  def __init__(
    self,
    vocab_size: ranges.Size,
    dim: ranges.Size,
    *,
    rank: ranges.Size,
    scale: ranges.Finite = 1.0,
    std: ranges.Weight = 1.0,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    """`std` is the standard deviation of the initial b."""
    self.scale = scale
    self.dtype = dtype
    vocab, low_rank = {"vocab": vocab_size}, {"adapter": rank}
    self.a = self.weight({**vocab, **low_rank}, init=module.zeros, compute_dtype=dtype)
    self.b = self.weight(
      {**low_rank, "model": dim},
      init=functools.partial(module.gaussian, std=std),
      matmul=module.Matmul(rank, dim),
      compute_dtype=dtype,
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Returns the update [..., D] of the vectors of tokens [...]."""
    a_VR = self.a[...].astype(self.dtype)
    low: Any = float32_sums.lookup(a_VR, tokens, ("vocab", "adapter"))
    return low @ self.b[...].astype(self.dtype) * self.scale

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns the update [..., V] of the logits for x [..., D], if the table is also the head."""
    a_VR, b_RD = self.a[...].astype(self.dtype), self.b[...].astype(self.dtype)
    return (x.astype(self.dtype) @ b_RD.T) @ a_VR.T * self.scale
