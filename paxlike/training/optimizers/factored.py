# SPDX-License-Identifier: Apache-2.0
"""Adafactor, whose second moments are row and column sums."""

import optax

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.training.optimizers.optimizer import Transform, by_layer


@configurable
def adafactor(
  *,
  decay: ranges.Probability = 0.8,
  momentum: ranges.Probability | None = None,
  clip_rms: ranges.PositiveFloat | None = 1.0,
  by_parameter_scale: bool = False,
) -> Transform:
  """Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235), for each layer by itself.

  Args:
    decay: The exponent c of the decay rate 1 - t^-c of second moments at step t.
    momentum: Decay rate of the first moment, which takes memory; None: none.
    clip_rms: Largest root mean square of a weight's direction; None: no clipping.
    by_parameter_scale: Whether the direction is multiplied by the root mean square of the weight,
      so that learning rates are relative, as in the paper.
  """
  parts = [optax.scale_by_factored_rms(decay_rate=decay)]
  if clip_rms is not None:
    parts.append(optax.clip_by_block_rms(clip_rms))
  if by_parameter_scale:
    parts.append(optax.scale_by_param_block_rms())
  if momentum is not None:
    parts.append(optax.ema(momentum, debias=False))
  return by_layer(optax.chain(*parts))
