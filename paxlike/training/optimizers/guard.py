# SPDX-License-Identifier: Apache-2.0
"""Finds spikes of the loss and of the gradient norm, and keeps them from the weights."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable

Action = Literal["report", "skip", "clip", "rollback"]
# The standard deviation of a normal distribution over its median absolute deviation.
_DEVIATION = 1.4826
_LEAST = 0.01  # The least deviation that is assumed, relative to the median.


class Verdict(NamedTuple):
  """What a guard says of a step.

  Attributes:
    spike: bool, whether the loss or the gradient norm is above its bound.
    keep: bool, whether the update is applied.
    scale: float32, by which the gradients are multiplied.
    state: The guard's state after the step.
  """

  spike: jax.Array
  keep: jax.Array
  scale: jax.Array
  state: dict[str, jax.Array]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
  """A bound on the loss and on the gradient norm: median and deviations of the last steps.

  A deviation is 1.4826 median absolute deviations, at least 1 % of the median. A spike counts as a
  step at the bound: a few of them hardly move the bound, a lasting change does.

  Attributes:
    action: What a spike does: "report" logs it, "skip" also drops its update, "clip" instead scales
      its gradients down to the bound of their norm, "rollback" makes the training loop return to
      the newest checkpoint.
    deviations: Above the median.
    window: The number of last steps; none is judged before as many.
  """

  action: Action
  deviations: ranges.PositiveFloat = 6.0
  window: ranges.Positive = 64

  def init(self) -> dict[str, jax.Array]:
    """Returns the state before the first step: the last losses and norms, and a count of steps."""
    return {
      "last": jnp.zeros((2, self.window), jnp.float32),
      "count": jnp.zeros((), jnp.int32),
    }

  def judge(self, state: dict[str, jax.Array], loss: jax.Array, norm: jax.Array) -> Verdict:
    """Judges a step by its loss and gradient norm, float32 scalars."""
    last, count = state["last"], state["count"]
    now = jnp.stack([loss, norm]).astype(jnp.float32)
    middle = jnp.median(last, axis=1)
    deviation = _DEVIATION * jnp.median(jnp.abs(last - middle[:, None]), axis=1)
    bound = middle + self.deviations * jnp.maximum(deviation, _LEAST * jnp.abs(middle))
    is_full = (last[1] > 0).all()  # Norms: a checkpoint of another window has its count alone.
    spike = is_full & (now > bound).any()
    within = jnp.where(is_full, jnp.minimum(now, bound), now)
    counted = jnp.isfinite(within).all()
    following = last.at[:, count % self.window].set(within)
    new = {
      "last": jnp.where(counted, following, last),
      "count": count + jnp.where(counted, 1, 0),
    }
    scale = jnp.ones((), jnp.float32)
    if self.action == "clip":
      scale = jnp.where(spike, jnp.minimum(1.0, bound[1] / norm), 1.0)
    keep = jnp.ones((), bool) if self.action in ("report", "clip") else ~spike
    return Verdict(spike, keep, scale, new)
