# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., 2021)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import ArgumentError, UserError
from paxlike.layers.module import Module

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
    angles = positions_BT[..., None].astype(jnp.float32) * jnp.array(self.frequencies, jnp.float32)
    cos = (jnp.cos(angles) * self.magnitude)[:, :, None]
    sin = (jnp.sin(angles) * self.magnitude)[:, :, None]
    x_BTNH, dtype = x_BTNH.astype(jnp.float32), x_BTNH.dtype
    x_BTNH, others = jnp.split(x_BTNH, [2 * len(self.frequencies)], axis=-1)
    if self.interleaved:
      first, second = x_BTNH[..., 0::2], x_BTNH[..., 1::2]
    else:
      first, second = jnp.split(x_BTNH, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, others], axis=-1).astype(dtype)


@configurable(name="rope.linear")
def linear(frequencies: np.ndarray, *, factor: ranges.Stretch) -> np.ndarray:
  """Position interpolation (Chen et al., 2023): divides all frequencies."""
  return frequencies / factor


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
  if high <= low:
    raise UserError(f"rotary scaling of Llama 3.1: high={high} must be more than low={low}.")
  turns = original_length * frequencies / (2 * math.pi)
  kept = np.clip((turns - low) / (high - low), 0, 1)
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
