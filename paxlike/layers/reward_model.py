# SPDX-License-Identifier: Apache-2.0
"""A model that gives conversations a reward."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.decoder import Decoder


@configurable
class RewardModel(Decoder):
  """A decoder whose head maps each token to one number (Ouyang et al., 2022, arXiv:2203.02155).

  The number of a conversation's last token is its reward.
  """

  @property
  def num_outputs(self) -> int:
    return 1

  def rewards(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the rewards of sequences that end at each token, float32 [B, T].

    x_BTD are the final hidden states.
    """

    def number(logits_BTV: jax.Array, arrays: Any) -> jax.Array:
      del arrays
      return logits_BTV[..., 0].astype(jnp.float32)

    return super().map_logits(number, x_BTD, ())

  def logits(self, x: jax.Array) -> NoReturn:
    """Raises a UserError."""
    del x
    raise UserError(NO_TOKENS)

  def map_logits(self, function: Callable[..., Any], x_BTD: jax.Array, arrays: Any) -> NoReturn:
    """Raises a UserError."""
    del function, x_BTD, arrays
    raise UserError(NO_TOKENS)

  def sum_of_losses(self, loss: Callable[..., Any], x_BTD: jax.Array, arrays: Any) -> NoReturn:
    """Raises a UserError."""
    del loss, x_BTD, arrays
    raise UserError(NO_TOKENS)


NO_TOKENS = "a reward model gives conversations rewards, and predicts no tokens."
