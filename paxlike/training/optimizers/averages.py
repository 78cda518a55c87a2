# SPDX-License-Identifier: Apache-2.0
"""Averages of weights, which evaluation, decoding and export use in place of the trained ones."""

import dataclasses
from typing import Any

import optax
from optax import contrib

from paxlike.config import ranges
from paxlike.config.configurable import configurable
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
  """

  def transform(weights: Weights) -> optax.GradientTransformation:
    inner = resolved(optimizer.transform, weights)
    return contrib.schedule_free(inner, optimizer.learning_rate, b1=b1)

  return dataclasses.replace(optimizer, transform=transform, evaluated=_schedule_free_average)


def _schedule_free_average(opt_state: Any, params: Params) -> Params:
  found: Any = contrib.schedule_free_eval_params(opt_state, params)
  return found
