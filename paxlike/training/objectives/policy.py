# SPDX-License-Identifier: Apache-2.0
"""Policy gradients on sampled answers, as functions of the log-probabilities of their tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.inference.sampling import Sampling
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.training.objectives.objective import Objective

# Name -> [sum, weight].
Sums = dict[str, jax.Array]


class TokenScores(NamedTuple):
  """A model's outputs for the targets of a batch, [B, T].

  Log-probabilities and values are differentiated.

  Attributes:
    log_probabilities_BT: float32, of the targets under the distributions that sampling draws from.
    entropies_BT: float32, of these distributions, in nats.
    drawn_BT: int32, the tokens that sampling with `seeds` draws from them; equal to the targets if
      the batch was sampled from this model. None if the batch has no seeds.
    values_BT: float32, the value of the tokens before each target. None if the model has no value
      head.
  """

  log_probabilities_BT: jax.Array
  entropies_BT: jax.Array
  drawn_BT: jax.Array | None
  values_BT: jax.Array | None = None

  @property
  def outputs(self) -> "Outputs":
    """What a loss is a function of."""
    return Outputs(self.log_probabilities_BT, self.values_BT)


class Outputs(NamedTuple):
  """What a loss is a function of, or the derivatives of the loss by these; see `TokenScores`."""

  log_probabilities_BT: jax.Array
  values_BT: jax.Array | None


# (log_probabilities_BT, arrays) -> (loss, metrics); if there are values, they are in `arrays`.
Loss = Callable[[jax.Array, Mapping[str, Any]], tuple[jax.Array, Sums]]


def of_outputs(loss: Loss) -> Callable[[Outputs, Mapping[str, Any]], tuple[jax.Array, Sums]]:
  """Returns a loss as a function of `Outputs`, to be differentiated."""

  def function(outputs: Outputs, batch: Mapping[str, Any]) -> tuple[jax.Array, Sums]:
    if outputs.values_BT is not None:
      batch = {**batch, "values": outputs.values_BT}
    return loss(outputs.log_probabilities_BT, batch)

  return function


def token_scores(
  model: Decoder, batch: Batch, dropout: jax.Array | None, sampling: Sampling
) -> tuple[TokenScores, Aux]:
  """Returns (the scores of the targets of a batch, the layers' Aux).

  `seeds`, int32 [B, T], are those of the requests that sampled the targets: see
  `request.Request`.
  """
  x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))

  def scored(logits_BTV: jax.Array, arrays: tuple[jax.Array, ...]) -> TokenScores:
    targets_BT, *of_draws = arrays
    logits_BTV = sampling.tempered(logits_BTV.astype(jnp.float32))
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    fixed_BTV = jax.lax.stop_gradient(logits_BTV - normalizer_BT[..., None])
    entropies_BT = -(jnp.exp(fixed_BTV) * fixed_BTV).sum(-1)
    drawn_BT = None
    if of_draws:
      seeds_M, positions_M = (x.reshape(-1) for x in of_draws)
      keys_M = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds_M), positions_M)
      logits_MV = jax.lax.stop_gradient(logits_BTV).reshape(len(keys_M), -1)
      drawn_BT = sampling.choose(logits_MV, keys_M).reshape(targets_BT.shape)
    return TokenScores(chosen_BT - normalizer_BT, entropies_BT, drawn_BT)

  arrays = (batch["targets"],)
  if "seeds" in batch:
    arrays += (batch["seeds"], batch["positions"])
  scores: TokenScores = model.map_logits(scored, x_BTD, arrays)
  return scores._replace(values_BT=model.values(x_BTD)), aux


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Objective):
  """The clipped policy gradient of PPO (Schulman et al., 2017) on advantages without a critic.

  The loss of a token with advantage A and probability ratio r to the policy that sampled it is
  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta r KL. KL is Schulman's estimate "k3" of
  the divergence from the reference model, as in GRPO (Shao et al., 2024, arXiv:2402.03300); its
  factor r makes the gradient that of the divergence (DeepSeek-V3.2, arXiv:2512.02556).

  The loss of a batch is their sum weighted by `weights`, which include the normalization. Besides
  those of `Batch`, a batch has float32 [B, T] `advantages`, `old_log_probabilities` and, if beta is
  not 0, `reference_log_probabilities`.

  Attributes:
    clip_low: How far a ratio may fall below 1 before its gradient vanishes.
    clip_high: How far it may rise above 1; DAPO's "clip-higher" is 0.28 (arXiv:2503.14476).
    beta: Strength of the KL penalty towards the reference model.
    sampling: How answers are sampled.
  """

  clip_low: ranges.Factor = 0.2
  clip_high: ranges.Factor = 0.2
  beta: ranges.NonNegativeFloat = 0.0
  sampling: Sampling = dataclasses.field(default_factory=lambda: Sampling(temperature=1.0))

  @property
  def needs_reference(self) -> bool:
    return self.beta > 0

  @property
  def penalizes(self) -> bool:
    """Whether the loss has the KL penalty."""
    return self.beta > 0

  def weight(self, batch: Batch) -> jax.Array:
    return jnp.ones(())

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    if reference is not None:
      scores, _ = token_scores(reference, batch, None, self.sampling)
      batch = {**batch, "reference_log_probabilities": scores.log_probabilities_BT}
    scores, aux = token_scores(model, batch, dropout, self.sampling)
    loss, sums = of_outputs(self.loss)(scores.outputs, batch)
    return loss, aux._replace(metrics=aux.metrics | sums)

  def loss(
    self, log_probabilities_BT: jax.Array, batch: Mapping[str, Any]
  ) -> tuple[jax.Array, Sums]:
    """Returns (the loss of a batch, its metrics), given the targets' log-probabilities."""
    weights_BT, advantages_BT = batch["weights"], batch["advantages"]
    is_target_BT = weights_BT > 0
    change_BT = jnp.where(is_target_BT, log_probabilities_BT - batch["old_log_probabilities"], 0)
    ratio_BT = jnp.exp(change_BT)
    kept_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, kept_BT * advantages_BT)
    is_clipped_BT = kept_BT * advantages_BT < ratio_BT * advantages_BT
    of_tokens = {"clipped_fraction": is_clipped_BT, "approximate_kl": ratio_BT - 1 - change_BT}
    if self.penalizes:
      back_BT = batch["reference_log_probabilities"] - log_probabilities_BT
      back_BT = jnp.where(is_target_BT, back_BT, 0)
      of_tokens["reference_kl"] = kl_BT = ratio_BT * (jnp.exp(back_BT) - 1 - back_BT)
      loss_BT += self.beta * kl_BT
    return (loss_BT * weights_BT).sum(), means_of_targets(of_tokens, is_target_BT)


def means_of_targets(of_tokens: Mapping[str, jax.Array], is_target_BT: jax.Array) -> Sums:
  """Returns arrays [B, T], by name, as metrics: their means over the targets."""
  count = is_target_BT.sum().astype(jnp.float32)
  return {
    name: jnp.stack([(of_BT * is_target_BT).sum(), count]) for name, of_BT in of_tokens.items()
  }
