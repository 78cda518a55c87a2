# SPDX-License-Identifier: Apache-2.0
"""The best learning rate of each width and depth."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paxlike.errors import UserError
from paxlike.transfer.program import Program
from paxlike.transfer.shapes import Shape, Training


class Best(NamedTuple):
  """The best learning rate of a model.

  Attributes:
    rate: The rate of the least loss, between rates that were tried; see `best`.
    at_edge: "<" or ">" if the lowest or the highest rate was best, so that the best may be lower or
      higher; else "".
  """

  rate: float
  at_edge: str


class Tables(NamedTuple):
  """The losses of several parametrizations.

  Attributes:
    training: What all models have in common.
    draws: Number of initial weights over which each loss is a mean.
    tables: Parametrization -> its losses.
  """

  training: Training
  draws: int
  tables: Mapping[str, "Table"]


class Table(NamedTuple):
  """The losses of one parametrization.

  Attributes:
    rates: R peaks of the learning rate, ascending.
    losses: Shape -> [R], the training loss at the end; NaN: it was not finite in every run.
  """

  rates: Sequence[float]
  losses: Mapping[Shape, np.ndarray]

  def best(self) -> dict[Shape, Best]:
    """Returns the best rate of each shape; NaN if no loss is finite."""
    return {shape: best(self.rates, losses) for shape, losses in self.losses.items()}

  def spread(self) -> float:
    """Returns the highest best rate over the lowest; NaN if a shape has none."""
    rates = [one.rate for one in self.best().values()]
    return float(np.max(rates) / np.min(rates))


def best(rates: Sequence[float], losses: np.ndarray) -> Best:
  """Returns the minimum of the parabola through the least loss and its neighbours, in log(rate).

  If a neighbour is missing or not finite, it is the rate of the least loss itself.
  """
  if not np.isfinite(losses).any():
    return Best(float("nan"), "")
  place = int(np.nanargmin(losses))
  edge = "<" if place == 0 else ">" if place == len(rates) - 1 else ""
  around = losses[max(place - 1, 0) : place + 2]
  if edge or not np.isfinite(around).all():
    return Best(float(rates[place]), edge)
  curvature, linear, _ = np.polyfit(np.log(rates[place - 1 : place + 2]), around, 2)
  if curvature <= 0:  # All three are equal.
    return Best(float(rates[place]), edge)
  return Best(float(np.exp(-linear / (2 * curvature))), edge)


def averaged(steps: int) -> int:
  """Returns how many of the last steps the loss is a mean of: a tenth."""
  return max(steps // 10, 1)


def measured(program: Program, rates: Sequence[float], draws: int = 1) -> np.ndarray:
  """Trains at each rate, and returns the [R] losses, each a mean of the last steps.

  They are means over `draws` initial weights, the same ones at each rate, too. The program's
  learning rate must be the first of `rates`.
  """
  steps = program.trainer.num_steps
  last = averaged(steps)
  with program.batches(steps) as batches:
    ends = [
      [program.train(batches, rate / rates[0], draw=draw)[-last:].mean() for draw in range(draws)]
      for rate in rates
    ]
  if len(rates) > 1 and np.ptp(ends, axis=0).max() == 0:
    raise UserError(
      "all rates give the same loss: MAX_STEPS is too small, or the optimizer does not take its"
      " rate as the argument `learning_rate`, which --rates changes."
    )
  losses = np.mean(ends, 1)
  return np.where(np.isfinite(losses), losses, np.nan)
