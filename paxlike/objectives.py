# SPDX-License-Identifier: Apache-2.0
"""What training makes small: a sum over a batch, that a step divides by a weight."""

import abc
import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.layers import lora
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.layers.module import Definition, Params
from paxlike.layers.stack import Aux

_ADDED = re.compile(rf"{lora.WEIGHTS}b$")


class Objective(abc.ABC):
  """A loss over a batch.

  Attributes:
    needs_reference: Whether it compares the model with one that is not trained: that which it was
      at first or, of adapters, what they adapt.
  """

  needs_reference = False

  @abc.abstractmethod
  def weight(self, batch: Batch) -> jax.Array:
    """Returns what the sum of the whole batch is divided by, a float32 scalar."""

  @abc.abstractmethod
  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    """Returns the sum over a part of the batch, and what the layers and the objective report."""


@configurable
@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
  """The cross-entropy of the next token, in nats, a mean over the tokens that have weight."""

  def weight(self, batch: Batch) -> jax.Array:
    return batch["weights"].sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    del reference
    return model.loss(batch, context_of(batch, dropout))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(Objective):
  """Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290), a mean over pairs.

  In each row segment 1 is preferred to segment 2. FLOPs are told without those of the reference.

  Attributes:
    beta: How dearly it is bought to leave the reference.
    label_smoothing: How probable it is that a preference is the wrong way round.
  """

  beta: ranges.Factor = 0.1
  label_smoothing: ranges.Smoothing = 0.0
  needs_reference = True

  def weight(self, batch: Batch) -> jax.Array:
    return _is_pair(batch).sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    assert reference is not None
    log_B2, aux = _log_probabilities(model, batch, dropout)
    before_B2, _ = _log_probabilities(reference, batch, None)
    rewards_B2 = self.beta * (log_B2 - jax.lax.stop_gradient(before_B2))
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    right_B, wrong_B = jax.nn.log_sigmoid(margin_B), jax.nn.log_sigmoid(-margin_B)
    loss_B = -(1 - self.label_smoothing) * right_B - self.label_smoothing * wrong_B
    is_pair_B = _is_pair(batch)
    reports = {
      "reward_accuracy": margin_B > 0,
      "reward_margin": margin_B,
      "reward_chosen": rewards_B2[:, 0],
      "reward_rejected": rewards_B2[:, 1],
    }
    sums = {name: (of_B * is_pair_B).sum() for name, of_B in reports.items()}
    aux |= {name: jnp.stack([total, is_pair_B.sum()]) for name, total in sums.items()}
    return (loss_B * is_pair_B).sum(), aux


def _is_pair(batch: Batch) -> jax.Array:
  """Returns float32 [B]: a row may only fill a batch up, or an answer be cut off whole."""
  answer_BT2 = batch["segments"][..., None] == jnp.array([1, 2])
  return (answer_BT2 & (batch["weights"] > 0)[..., None]).any(1).all(-1).astype(jnp.float32)


def _log_probabilities(
  model: Decoder, batch: Batch, dropout: jax.Array | None
) -> tuple[jax.Array, Aux]:
  """Returns those of both answers of each row, float32 [B, 2], and what the layers report."""
  x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
  loss_BT = model.map_logits(cross_entropy, x_BTD, batch["targets"])
  answer_BT2 = batch["segments"][..., None] == jnp.array([1, 2])
  return -((loss_BT * batch["weights"])[..., None] * answer_BT2).sum(1), aux


def shares_base(definition: Definition) -> bool:
  """Whether all that an optimizer trains is adapters, so that without them it is the reference."""
  return all(re.search(lora.WEIGHTS, name) for name in definition.optimized(definition.weights))


def without_adapters(params: Mapping[str, jax.Array]) -> Params:
  """Returns weights with adapters that add nothing."""
  return {name: jnp.zeros_like(w) if _ADDED.search(name) else w for name, w in params.items()}
