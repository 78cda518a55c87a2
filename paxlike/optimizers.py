# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules, composed from optax."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Completed updates -> learning rate.
Schedule = optax.Schedule


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A gradient transformation, and the schedule in it so that it can be shown."""

  transform: optax.GradientTransformation
  learning_rate: Schedule


def matrices(params: dict[str, Any]) -> dict[str, bool]:
  """Marks weight matrices and tables, not biases and norms."""
  return {name: name.rsplit(".", 1)[-1] in ("w", "table") for name in params}


def everything(params: dict[str, Any]) -> dict[str, bool]:
  """Marks every parameter."""
  return dict.fromkeys(params, True)


def adamw(
  *,
  learning_rate: Schedule,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  decayed: Callable[[dict[str, Any]], dict[str, bool]] = everything,
  clip_norm: float | None,
) -> Optimizer:
  """AdamW (Loshchilov and Hutter, 2019) after clipping by global norm.

  Args:
    learning_rate: Multiplies both the Adam step and the weight decay.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of squared gradients.
    eps: Added outside the root.
    weight_decay: Decoupled.
    decayed: Marks the parameters that decay.
    clip_norm: Largest norm of all gradients together; None does not clip.
  """
  clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
  transform = optax.chain(
    clip,
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
    optax.add_decayed_weights(weight_decay, mask=decayed),
    optax.scale_by_learning_rate(learning_rate),
  )
  return Optimizer(transform, learning_rate)


def constant(*, peak: float) -> Schedule:
  """The same rate at every step."""
  return optax.constant_schedule(peak)


def linear_rampup_cosine_decay(
  *, peak: float, warmup: int, decay_start: int, decay_end: int, min_ratio: float
) -> Schedule:
  """From 0 to `peak` over `warmup` steps; from `decay_start` to `decay_end` down along a cosine.

  Ends at, and stays at, `min_ratio * peak`. Step 0 has rate 0.
  """
  decay = optax.cosine_decay_schedule(peak, max(decay_end - decay_start, 1), alpha=min_ratio)
  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


def linear_rampup_exponential_decay(
  *, peak: float, warmup: int, decay_start: int, decay_end: int, min_ratio: float
) -> Schedule:
  """From 0 to `peak` over `warmup` steps, then geometrically down to `min_ratio * peak`."""
  num_steps = max(decay_end - decay_start, 1)

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    return peak * jnp.exp(math.log(min_ratio) * jnp.minimum(count / num_steps, 1.0))

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


def _after_rampup(decay: Schedule, *, peak: float, warmup: int, decay_start: int) -> Schedule:
  return optax.join_schedules(
    [optax.linear_schedule(0, peak, warmup), optax.constant_schedule(peak), decay],
    [warmup, max(decay_start, warmup)],
  )
