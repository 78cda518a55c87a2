# SPDX-License-Identifier: Apache-2.0
"""Rules that scale each element of a gradient by itself: Adam, AdEMAMix and Lion."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.precision.rounding import in_dtype
from paxlike.training.optimizers.optimizer import (
  Optimizer,
  Transform,
  Weights,
  descent,
  everything,
)
from paxlike.training.optimizers.parametrization import Parametrization
from paxlike.training.optimizers.schedules import Schedule

MomentDtype = Literal["float32", "bfloat16"]


@configurable
def adam(
  *,
  b1: ranges.Probability,
  b2: ranges.Probability,
  eps: ranges.Epsilon,
  moment_dtype: MomentDtype = "float32",
) -> Transform:
  """Adam (Kingma and Ba, 2015, arXiv:1412.6980).

  Args:
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Added outside the square root.
    moment_dtype: Storage dtype of both moments; bfloat16 uses stochastic rounding.
  """
  return _stored_in(jnp.dtype(moment_dtype), optax.scale_by_adam(b1=b1, b2=b2, eps=eps))


@configurable
def adamw(
  *,
  learning_rate: Schedule,
  b1: ranges.Probability,
  b2: ranges.Probability,
  eps: ranges.Epsilon,
  weight_decay: ranges.Weight,
  weight_decay_schedule: Schedule | None = None,
  decayed: Callable[[Weights], dict[str, bool]] = everything,
  clip_norm: ranges.PositiveFloat | None,
  clip_update: ranges.PositiveFloat | None = None,
  decay_scales: Mapping[str, ranges.NonNegativeFloat] | None = None,
  scales: Mapping[str, ranges.NonNegativeFloat] | None = None,
  parametrization: Parametrization | None = None,
  moment_dtype: MomentDtype = "float32",
  over_data: bool = False,
  on_host: bool = False,
) -> Optimizer:
  """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101): `descent` by `adam`."""
  return descent(
    adam(b1=b1, b2=b2, eps=eps, moment_dtype=moment_dtype),
    learning_rate=learning_rate,
    weight_decay=weight_decay,
    weight_decay_schedule=weight_decay_schedule,
    decayed=decayed,
    clip_norm=clip_norm,
    clip_update=clip_update,
    decay_scales=decay_scales,
    scales=scales,
    parametrization=parametrization,
    over_data=over_data,
    on_host=on_host,
  )


def _stored_in(dtype: Any, adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """Stores the moments of Adam in `dtype`; the arithmetic is float32."""

  def moments(state: Any, cast: Callable[[jax.Array], jax.Array]) -> Any:
    return state._replace(mu=jax.tree.map(cast, state.mu), nu=jax.tree.map(cast, state.nu))

  def init(params: Any) -> Any:
    return moments(adam.init(params), lambda x: x.astype(dtype))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = adam.update(updates, moments(state, lambda x: x.astype(jnp.float32)), params)
    return updates, moments(state, functools.partial(in_dtype, dtype=dtype, draw=state.count))

  return optax.GradientTransformation(init, update)


@configurable
def ademamix(
  *,
  b1: ranges.Probability,
  b2: ranges.Probability,
  b3: ranges.Probability,
  alpha: ranges.NonNegativeFloat,
  eps: ranges.Epsilon,
  warmup: ranges.NonNegative,
) -> Transform:
  """AdEMAMix (Pagliardini et al., 2024, arXiv:2409.03137): Adam with a second, slower momentum.

  Args:
    b1: Decay rate of the fast first moment.
    b2: Decay rate of the second moment.
    b3: Final decay rate of the slow first moment.
    alpha: Final weight of the slow first moment.
    eps: Added outside the square root.
    warmup: Steps in which `alpha` grows linearly from 0, and the half-life of `b3` linearly from
      that of `b1`; usually all steps.
  """

  def grown(count: jax.typing.ArrayLike) -> jax.Array:
    return jnp.minimum(jnp.asarray(count, jnp.float32) / max(warmup, 1), 1.0)

  def slow(count: jax.typing.ArrayLike) -> jax.Array:
    if warmup == 0 or b1 == 0 or b3 == 0:
      return jnp.asarray(b3, jnp.float32)
    fast, final = (-math.log(2) / math.log(b) for b in (b1, b3))  # Half-lives.
    return jnp.exp2(-1 / (fast + grown(count) * (final - fast)))

  def weight(count: jax.typing.ArrayLike) -> jax.Array:
    return alpha * grown(count) if warmup else jnp.asarray(alpha, jnp.float32)

  return contrib.scale_by_ademamix(b1=b1, b2=b2, b3=slow, alpha=weight, eps=eps)


@configurable
def lion(*, b1: ranges.Probability, b2: ranges.Probability) -> Transform:
  """Lion (Chen et al., 2023, arXiv:2302.06675).

  Args:
    b1: Weight of the momentum in the sign that is taken.
    b2: Decay rate of the momentum.
  """
  return optax.scale_by_lion(b1=b1, b2=b2)
