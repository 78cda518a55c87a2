# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: functions of the step, counted from 0."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from paxlike.config import ranges
from paxlike.config.configurable import configurable

# Step -> learning rate. A step whose update is dropped counts, too.
Schedule = optax.Schedule
DecayShape = Literal["linear", "sqrt", "cosine"]


@configurable(name="constant_schedule")
def constant(*, peak: ranges.Rate) -> Schedule:
  """The same rate at every step."""
  return optax.constant_schedule(peak)


@configurable
def linear_rampup_cosine_decay(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_start: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Fraction,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then cosine decay from `decay_start` to `decay_end`.

  The rate is 0 at step 0 and stays at `min_ratio * peak` after the decay. The decay never begins
  before the end of the warmup and takes at least one step.
  """
  decay = optax.cosine_decay_schedule(peak, max(decay_end - decay_start, 1), alpha=min_ratio)
  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


@configurable
def linear_rampup_exponential_decay(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_start: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Epsilon,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then exponential decay to `min_ratio * peak`.

  For the steps see `linear_rampup_cosine_decay`.
  """
  num_steps = max(decay_end - decay_start, 1)

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    return peak * jnp.exp(math.log(min_ratio) * jnp.minimum(count / num_steps, 1.0))

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


@configurable
def linear(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Fraction,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then linear decay to `min_ratio * peak` at `decay_end`."""
  decay = optax.linear_schedule(peak, min_ratio * peak, max(decay_end - warmup, 1))
  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=warmup)


@configurable
def inverse_sqrt(*, peak: ranges.Rate, warmup: ranges.NonNegative) -> Schedule:
  """Linear warmup from 0 to `peak`, then `peak * sqrt(warmup / step)` (Vaswani et al., 2017).

  A warmup of 0 steps counts as 1.
  """

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    return peak * jnp.sqrt(max(warmup, 1) / (jnp.asarray(count, jnp.float32) + max(warmup, 1)))

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=warmup)


@configurable
def cosine_restarts(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  cycles: ranges.Positive,
  min_ratio: ranges.Fraction,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then equal cycles of cosine decay until `decay_end`.

  Each begins at `peak` and ends at `min_ratio * peak` (Loshchilov and Hutter, 2017,
  arXiv:1608.03983). After the last one, the rate stays there.
  """
  length = max(decay_end - warmup, 1) / cycles

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    place = jnp.asarray(count, jnp.float32) / length
    share = jnp.where(place < cycles, place % 1.0, 1.0)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + jnp.cos(math.pi * share)))

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=warmup)


@configurable
def warmup_stable_decay(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_start: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Fraction,
  shape: DecayShape,
) -> Schedule:
  """Linear warmup from 0 to `peak`, the same rate until `decay_start`, then decay (WSD).

  Introduced by Hu et al. (2024, arXiv:2404.06395); Hägele et al. (2024, arXiv:2405.18392) compare
  shapes. At `decay_end` and after it, the rate is `min_ratio * peak`. The decay never begins before
  the end of the warmup.

  Args:
    peak: The rate of the stable phase.
    warmup: Steps of the warmup.
    decay_start: Step at which the decay starts.
    decay_end: Step at which it ends.
    min_ratio: The final rate as a fraction of `peak`.
    shape: Of the decay, in the fraction x of its steps: linear (1 - x), sqrt (1 - sqrt(x)), or
      cosine.
  """
  steps = max(decay_end - max(decay_start, warmup), 1)

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    x = jnp.minimum(jnp.asarray(count, jnp.float32) / steps, 1.0)
    left = {"linear": 1 - x, "sqrt": 1 - jnp.sqrt(x), "cosine": 0.5 * (1 + jnp.cos(math.pi * x))}
    return peak * (min_ratio + (1 - min_ratio) * left[shape])

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


@configurable
def ramp(*, first: ranges.Weight, last: ranges.Weight, steps: ranges.NonNegative) -> Schedule:
  """Changes linearly from `first` to `last` in `steps` steps; for weight decay."""
  return optax.linear_schedule(first, last, max(steps, 1))


def _after_rampup(decay: Schedule, *, peak: float, warmup: int, decay_start: int) -> Schedule:
  return optax.join_schedules(
    [optax.linear_schedule(0, peak, warmup), optax.constant_schedule(peak), decay],
    [warmup, max(decay_start, warmup)],
  )
