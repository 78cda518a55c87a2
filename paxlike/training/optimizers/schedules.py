# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: functions of completed updates."""

import math

import jax
import jax.numpy as jnp
import optax

from paxlike.config import ranges
from paxlike.config.configurable import configurable

# Completed updates -> learning rate.
Schedule = optax.Schedule


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


def _after_rampup(decay: Schedule, *, peak: float, warmup: int, decay_start: int) -> Schedule:
  return optax.join_schedules(
    [optax.linear_schedule(0, peak, warmup), optax.constant_schedule(peak), decay],
    [warmup, max(decay_start, warmup)],
  )
