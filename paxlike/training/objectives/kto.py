# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization, on single answers that are desirable or not."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder
from paxlike.training.objectives.objective import Objective
from paxlike.training.objectives.preference import answers_of


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kto(Objective):
  """Kahneman-Tversky optimization (Ethayarajh et al., 2024, arXiv:2402.01306), a mean over answers.

  A sequence has one answer, from its first token on; its segment is 1 if the answer is desirable,
  and 2 if not. The reward of an answer is beta times the change of its log-probability since the
  reference. Answers are compared with beta times an estimate of the divergence from the reference:
  the mean change over the microbatch, at least 0, where each prompt is followed by the answer of
  the sequence before it (see `mismatched`). Reported FLOPs exclude this and the reference model.

  Attributes:
    beta: Strength of the KL penalty towards the reference.
    desirable_weight: Weight of the losses of desirable answers.
    undesirable_weight: Weight of the losses of undesirable ones.
  """

  beta: ranges.Factor = 0.1
  desirable_weight: ranges.NonNegativeFloat = 1.0
  undesirable_weight: ranges.NonNegativeFloat = 1.0
  needs_reference = True

  def weight(self, batch: Batch) -> jax.Array:
    return _has_answer(batch).sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    assert reference is not None
    if len(batch["inputs"]) < 2:
      raise UserError(
        "PREFERENCE_LOSS=kto compares the answers of a microbatch, which has a single sequence:"
        " raise PERCORE_BATCH_SIZE, or lower GRADIENT_ACCUMULATION_STEPS."
      )
    log_B, aux = _log_probabilities(model, batch, dropout)
    before_B, _ = _log_probabilities(reference, batch, None)
    rewards_B = self.beta * (log_B - jax.lax.stop_gradient(before_B))
    kl = _divergence(model, reference, mismatched(batch))
    is_good_B = (batch["segments"] == 1).any(1)
    sign_B = jnp.where(is_good_B, 1, -1)
    weight_B = jnp.where(is_good_B, self.desirable_weight, self.undesirable_weight)
    loss_B = weight_B * jax.nn.sigmoid(-sign_B * (rewards_B - self.beta * kl))
    has_answer_B = _has_answer(batch)
    good_B, bad_B = has_answer_B * is_good_B, has_answer_B * ~is_good_B
    reports = {
      "reward_chosen": (rewards_B, good_B),
      "reward_rejected": (rewards_B, bad_B),
      "reference_kl": (kl, has_answer_B),
    }
    metrics = {
      name: jnp.stack([(value * of_B).sum(), of_B.sum()]) for name, (value, of_B) in reports.items()
    }
    return (loss_B * has_answer_B).sum(), aux._replace(metrics=aux.metrics | metrics)


def mismatched(batch: Batch) -> Batch:
  """Returns a batch in which each prompt is followed by the answer of the sequence before it.

  The first prompt gets the last answer. Tokens beyond T are truncated. All segments are 1, and
  positions after the answer are 0, as in padding.
  """
  T = batch["inputs"].shape[1]
  # The first target of the answer, and so the last input of the prompt.
  first_B1 = (batch["weights"] > 0).argmax(1)[:, None]
  at_BT = jnp.arange(T)[None]
  from_BT = at_BT - first_B1 + jnp.roll(first_B1, 1, 0)

  def of_answer(name: str) -> jax.Array:
    before_BT = jnp.roll(batch[name], 1, 0)
    found_BT = jnp.take_along_axis(before_BT, jnp.clip(from_BT, 0, T - 1), 1)
    return jnp.where(from_BT < T, found_BT, 0)

  def joined(name: str, is_answer_BT: jax.Array) -> jax.Array:
    return jnp.where(is_answer_BT, of_answer(name), batch[name])

  weights_BT = joined("weights", at_BT >= first_B1)
  last_B1 = T - 1 - (weights_BT > 0)[:, ::-1].argmax(1)[:, None]
  return {
    "inputs": joined("inputs", at_BT > first_B1),
    "targets": joined("targets", at_BT >= first_B1),
    "weights": weights_BT,
    "segments": jnp.ones_like(batch["segments"]),
    "positions": jnp.where(at_BT <= last_B1, at_BT, 0).astype(jnp.int32),
  }


def _divergence(model: Decoder, reference: Decoder, batch: Batch) -> jax.Array:
  """Returns the mean change of the log-probabilities of answers, at least 0; not differentiated."""
  graph, weights = nnx.split(model)
  fixed = nnx.merge(graph, jax.lax.stop_gradient(weights))
  (log_B, _), (before_B, _) = (_log_probabilities(one, batch, None) for one in (fixed, reference))
  has_answer_B = _has_answer(batch)
  change = ((log_B - before_B) * has_answer_B).sum() / jnp.maximum(has_answer_B.sum(), 1)
  return jax.lax.stop_gradient(jnp.maximum(change, 0))


def _has_answer(batch: Batch) -> jax.Array:
  """Returns float32 [B]: 0 for padding and for answers that were truncated away."""
  return (batch["weights"] > 0).any(1).astype(jnp.float32)


def _log_probabilities(
  model: Decoder, batch: Batch, dropout: jax.Array | None
) -> tuple[jax.Array, Aux]:
  """Returns (the answers' log-probabilities, float32 [B], the layers' Aux)."""
  answers, aux = answers_of(model, batch, dropout)
  return answers.log_B2.sum(-1), aux
