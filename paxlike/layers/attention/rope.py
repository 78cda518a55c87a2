# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., 2021)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.errors import ArgumentError, UserError
from paxlike.layers.module import Module
from paxlike.layers.precision import cpu_dots

# Frequencies (radians per token) of each pair of dims -> frequencies for longer contexts.
Scaling = Callable[[np.ndarray], np.ndarray]


@configurable
class Rope(Module):
  """Rotates pairs of dims by angles proportional to a token's position.

  Attributes:
    theta: Base of the frequencies.
    scaling: Changes the frequencies for longer contexts.
    magnitude: Multiplier of the result (YaRN's "attention factor").
    interleaved: Whether x[2i] is paired with x[2i + 1] instead of x[i] with x[i + H/2].
    share: The share of a head's dims that is rotated, the first ones: H above is their number. The
      other dims do not depend on the position.
  """

  def __init__(
    self,
    head_dim: ranges.Size,
    *,
    theta: ranges.Base = 10_000.0,
    scaling: Scaling | None = None,
    magnitude: ranges.Factor = 1.0,
    interleaved: bool = False,
    share: ranges.Share = 1.0,
  ):
    rotated = int(head_dim * share)
    if rotated % 2 or not rotated:
      of = f" x {share=}" if share < 1 else ""
      raise ArgumentError(f"{head_dim=}{of} must be even: rotary positions rotate pairs of dims.")
    frequencies = theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if scaling is not None:
      frequencies = scaling(frequencies)
    self.frequencies = tuple(map(float, frequencies))
    self.magnitude = magnitude
    self.interleaved = interleaved

  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
    """Returns x rotated, in its dtype; without positions, they are 0 to T - 1.

    Interleaved pairs are returned as two halves: dot products do not depend on the order of dims.
    """
    if positions_BT is None:
      positions_BT = jnp.arange(x_BTNH.shape[1])[None]
    angles = positions_BT[..., None].astype(jnp.float32) * self.rates(positions_BT)
    cos, sin = jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude
    if cpu_dots.on_cpu():
      # XLA for CPUs fuses them into the products, which compute them again for each head. It does
      # not fuse a concatenation, which the barrier keeps from being simplified away.
      waves = jax.lax.optimization_barrier(jnp.concatenate([cos, sin], axis=-1))
      cos, sin = jnp.split(waves, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    if self._rotates_by_matmul(x_BTNH):
      return _rotated(x_BTNH, _twice(cos), _twice(sin))
    x_BTNH, dtype = x_BTNH.astype(jnp.float32), x_BTNH.dtype
    x_BTNH, others = jnp.split(x_BTNH, [2 * len(self.frequencies)], axis=-1)
    if self.interleaved:
      first, second = x_BTNH[..., 0::2], x_BTNH[..., 1::2]
    else:
      first, second = jnp.split(x_BTNH, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, others], axis=-1).astype(dtype)

  def _rotates_by_matmul(self, x_BTNH: jax.Array) -> bool:
    """Returns whether a matmul exchanges the halves of heads: on TPUs, in bfloat16.

    Else XLA for TPUs writes each half as an array, whose last dim it pads to 128 numbers.
    """
    H = x_BTNH.shape[-1]
    is_padded = H // 2 % 128 != 0
    is_whole = 2 * len(self.frequencies) == H and not self.interleaved
    return is_padded and is_whole and x_BTNH.dtype == jnp.bfloat16 and topology.is_tpu()

  def rates(self, positions_BT: jax.Array) -> jax.Array:
    """Returns the frequencies, [H/2] or [B, T, H/2], in radians per token."""
    del positions_BT
    return jnp.array(self.frequencies, jnp.float32)


def _twice(x: jax.Array) -> jax.Array:
  """Returns x for both halves of the last dim."""
  return jnp.concatenate([x, x], axis=-1)


# A custom_vjp, so that no remat policy saves the float32 product, and gradients are rounded once.
@jax.custom_vjp
def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Returns the bfloat16 x [..., H] rotated.

  cos and sin, float32 [..., H] with two equal halves, have no gradients.
  """
  H = x.shape[-1]
  # x times this is (-second half, first half): exactly, if all are finite.
  rotate_half_HH = np.roll(np.eye(H, dtype=np.float32), H // 2, axis=1)
  rotate_half_HH[H // 2 :] *= -1
  other = jnp.dot(x, jnp.asarray(rotate_half_HH, x.dtype), preferred_element_type=jnp.float32)
  return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)


_rotated.defvjp(
  lambda x, cos, sin: (_rotated(x, cos, sin), (cos, sin)),
  lambda waves, dy: (_rotated(dy, waves[0], -waves[1]), None, None),
)


@configurable
class LongRope(Rope):
  """LongRoPE (Ding et al., 2024): factors divide the frequencies; long documents have their own.

  Attributes:
    original_length: Documents of up to this many tokens have the short factors.
  """

  def __init__(
    self,
    head_dim: ranges.Size,
    *,
    short_factors: tuple[ranges.PositiveFloat, ...],
    long_factors: tuple[ranges.PositiveFloat, ...],
    original_length: ranges.Size,
    theta: ranges.Base = 10_000.0,
    magnitude: ranges.Factor = 1.0,
    share: ranges.Share = 1.0,
  ):
    """The factors are divisors, one for each frequency; see `Rope` for the rest."""
    super().__init__(head_dim, theta=theta, magnitude=magnitude, share=share)
    plain = self.frequencies
    for factors in (short_factors, long_factors):
      if len(factors) != len(plain):
        raise ArgumentError(
          f"LongRoPE has {len(factors)} factors for {len(plain)} frequencies: give one for each."
        )
    self.frequencies = tuple(f / by for f, by in zip(plain, short_factors, strict=True))
    self.long_frequencies = tuple(f / by for f, by in zip(plain, long_factors, strict=True))
    self.original_length = original_length

  def rates(self, positions_BT: jax.Array) -> jax.Array:
    is_long_BT = _lengths(positions_BT) > self.original_length
    short, long = (jnp.array(f, jnp.float32) for f in (self.frequencies, self.long_frequencies))
    return jnp.where(is_long_BT[..., None], long, short)


def _lengths(positions_BT: jax.Array) -> jax.Array:
  """Returns [B, T]: the number of tokens of the document that each token is in."""
  num_tokens = positions_BT.shape[1]
  is_last_BT = jnp.diff(positions_BT, append=-1) <= 0
  places_BT = jnp.where(is_last_BT, jnp.arange(num_tokens), num_tokens - 1)
  last_BT = jax.lax.cummin(places_BT, axis=1, reverse=True)
  return jnp.take_along_axis(positions_BT, last_BT, axis=1) + 1


@configurable(name="rope.linear")
def linear(frequencies: np.ndarray, *, factor: ranges.Stretch) -> np.ndarray:
  """Position interpolation (Chen et al., 2023): divides all frequencies."""
  return frequencies / factor


@configurable(name="rope.proportional")
def proportional(frequencies: np.ndarray, *, share: ranges.Share) -> np.ndarray:
  """Keeps the highest frequencies, a share of all, and does not rotate the others (Gemma 4)."""
  kept = int(share * len(frequencies))
  return np.concatenate([frequencies[:kept], np.zeros(len(frequencies) - kept)])


@configurable(name="rope.half")
def half(frequencies: np.ndarray, *, slowest: ranges.Share) -> np.ndarray:
  """Rotates half of all pairs, from 1 radian per token down to `slowest`, and leaves the others.

  Source: github.com/KellerJordan/modded-nanogpt ("half-truncate RoPE").
  """
  rotated = slowest ** np.linspace(0, 1, len(frequencies) // 2)
  return np.concatenate([rotated, np.zeros(len(frequencies) - len(rotated))])


@configurable(name="rope.llama3")
def llama3(
  frequencies: np.ndarray,
  *,
  factor: ranges.Stretch,
  original_length: ranges.Size,
  low: ranges.PositiveFloat = 1.0,
  high: ranges.PositiveFloat = 4.0,
) -> np.ndarray:
  """The scaling of Llama 3.1: divides low frequencies, keeps high ones, interpolates between.

  Args:
    frequencies: Radians per token.
    factor: Divisor of the low frequencies.
    original_length: The context length before scaling.
    low: Rotations within the original context up to which a frequency is divided by `factor`.
    high: Rotations from which a frequency is unchanged.
  """
  if high < low:
    raise UserError(f"rotary scaling of Llama 3.1: high={high} must be at least low={low}.")
  turns = original_length * frequencies / (2 * math.pi)
  kept = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)
  return frequencies * (kept + (1 - kept) / factor)


@configurable(name="rope.yarn")
def yarn(
  frequencies: np.ndarray,
  *,
  theta: ranges.Base,
  factor: ranges.Stretch,
  original_length: ranges.Size,
  fast: ranges.PositiveFloat = 32.0,
  slow: ranges.PositiveFloat = 1.0,
  truncate: bool = True,
) -> np.ndarray:
  """YaRN (Peng et al., 2023): divides low frequencies, keeps high ones, ramps between.

  Args:
    frequencies: Radians per token.
    theta: Base of the frequencies.
    factor: Divisor of the low frequencies.
    original_length: The context length before scaling.
    fast: Rotations within the original context from which a frequency is unchanged (beta_fast).
    slow: Rotations up to which it is divided by `factor` (beta_slow).
    truncate: Whether the ramp begins and ends at whole dims.
  """
  half = len(frequencies)

  def dim_of(turns: float) -> float:
    return half * math.log(original_length / (turns * 2 * math.pi)) / math.log(theta)

  first, last = dim_of(fast), dim_of(slow)
  if truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * half - 1)
  slowed = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
  return frequencies * (1 - slowed + slowed / factor)


def longrope_magnitude(factor: float, original_length: float) -> float:
  """Returns LongRoPE's multiplier of rotated queries and keys, for `factor` times the context."""
  return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0
