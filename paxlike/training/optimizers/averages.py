# SPDX-License-Identifier: Apache-2.0
"""Averages of weights, which evaluation, decoding and export use in place of the trained ones."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.module import Params
from paxlike.training.optimizers.optimizer import Optimizer, Weights, resolved


@configurable
def schedule_free(optimizer: Optimizer, *, b1: ranges.Probability) -> Optimizer:
  """Schedule-free training (Defazio et al., 2024, arXiv:2405.15682).

  Gradients are taken between the iterates of `optimizer` and their average, which is evaluated.

  Args:
    optimizer: Makes the iterates; it should have no momentum (`b1=0`) and a constant rate after
      the warmup.
    b1: The weight of the average in the weights that gradients are taken at.

  Raises:
    UserError: `b1` is 0.
  """
  if b1 == 0:
    raise UserError("ADAM_BETA1=0: schedule_free_adamw needs more, such as 0.9.")

  def transform(weights: Weights) -> optax.GradientTransformation:
    inner = resolved(optimizer.transform, weights)
    return contrib.schedule_free(inner, optimizer.learning_rate, b1=b1)

  return dataclasses.replace(optimizer, transform=transform, evaluated=_schedule_free_average)


def _schedule_free_average(opt_state: Any, params: Params) -> Params:
  found: Any = contrib.schedule_free_eval_params(opt_state, params)
  return found


class Averages(NamedTuple):
  """The state of `averaged`.

  Attributes:
    inner: The state of the inner optimizer.
    weights: Half-life -> weights, averaged in float32.
  """

  inner: Any
  weights: dict[str, Params]


@configurable
def averaged(
  optimizer: Optimizer,
  *,
  half_lives: tuple[ranges.PositiveFloat, ...],
  evaluated: ranges.PositiveFloat | None = None,
) -> Optimizer:
  """Trains by `optimizer`, and keeps exponential moving averages of the weights (EMA).

  In the first 1.44 half-lives (1 / ln 2), an average is the mean of the weights after each update:
  the initial weights have no part in it.

  Args:
    optimizer: Trains the weights.
    half_lives: Of each average, in updates.
    evaluated: The half-life of the average that is evaluated; None: the first one.

  Raises:
    UserError: There is no such average, or `optimizer` has evaluated weights of its own.
  """
  if optimizer.evaluated is not None:
    raise UserError("EMA_HALF_LIVES: this OPTIMIZER evaluates an average of its own. Choose one.")
  names = {f"{life:g}": life for life in half_lives}
  if len(names) < len(half_lives):
    raise UserError(f"EMA_HALF_LIVES={list(half_lives)} has one twice, in six digits.")
  chosen = half_lives[0] if evaluated is None else evaluated
  if chosen not in half_lives:
    raise UserError(f"EMA_EVALUATED={chosen:g} is not in EMA_HALF_LIVES={list(half_lives)}.")

  def transform(weights: Weights) -> optax.GradientTransformation:
    inner = resolved(optimizer.transform, weights)

    def init(params: Any) -> Any:
      averages: Any = dict.fromkeys(names, params)
      return Averages(inner.init(params), averages)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      updates, inner_state = inner.update(updates, state.inner, params)
      return updates, Averages(inner_state, state.weights)

    return optax.GradientTransformation(init, update)

  def observe(state: Averages, new: Params, updates: jax.Array) -> Averages:
    averages = {}
    for name, life in names.items():
      share = _share(life, updates)
      # The shares of old and new add up to 1, however small a share is.
      averages[name] = {n: old + share * (new[n] - old) for n, old in state.weights[name].items()}
    inner = state.inner
    if optimizer.observe is not None:
      inner = optimizer.observe(inner, new, updates)
    return Averages(inner, averages)

  average = functools.partial(_average, half_life=f"{chosen:g}")
  return dataclasses.replace(optimizer, transform=transform, evaluated=average, observe=observe)


def _share(half_life: float, updates: jax.Array) -> jax.Array:
  """Returns the share in an average of the weights after one more update than `updates`."""
  return jnp.maximum(-math.expm1(-math.log(2) / half_life), 1 / (updates + 1))


def _average(opt_state: Any, params: Params, *, half_life: str) -> Params:
  del params
  return opt_state.weights[half_life]
