# SPDX-License-Identifier: Apache-2.0
"""The objective of distillation: a divergence from the next-token distributions of a teacher."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.checkpoints.teacher import Teacher
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.prepared import TOP_K
from paxlike.inference.sampling import Sampling
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.layers.module import Definition
from paxlike.training.objectives.objective import Objective

_LEAST_REST = 1e-7  # Of the probability of all other tokens, as in TRL.


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gkd(Objective):
  """Generalized knowledge distillation (Agarwal et al., 2023, arXiv:2306.13649).

  The loss of a token is the generalized Jensen-Shannon divergence of the teacher's distribution P
  and the student's Q, in nats: with M = beta P + (1 - beta) Q it is
  beta KL(P || M) + (1 - beta) KL(Q || M), for beta 0 the forward KL(P || Q), for beta 1 the reverse
  KL(Q || P). It is a mean over tokens weighted by `weights`. If vocabularies are padded to
  different sizes, P and Q are over the ids that both have.

  Without a teacher, a batch has `TOP_K`, the teacher's most probable tokens. All other tokens are
  then one event, whose probability is the rest of both distributions.

  Attributes:
    teacher: The teacher; None: its predictions are in the data.
    beta: Of the divergence.
    temperature: Divides the logits of both; the loss is not multiplied by its square.
    cross_entropy: Weight of the cross-entropy of the targets, which is added.
  """

  teacher: Teacher | None = None
  beta: ranges.Fraction = 0.5
  temperature: ranges.PositiveFloat = 1.0
  cross_entropy: ranges.NonNegativeFloat = 0.0

  @property
  def needs_reference(self) -> bool:
    return self.teacher is not None

  def reference(self, definition: Definition) -> Definition | None:
    return None if self.teacher is None else self.teacher.definition

  def weight(self, batch: Batch) -> jax.Array:
    return batch["weights"].sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
    if reference is None:
      predictions, project, size = tuple(batch[name] for name in TOP_K), None, model.vocab_size
    else:
      y_BTD, _, _ = reference.hidden(batch["inputs"], context_of(batch))
      predictions, project = jax.lax.stop_gradient(y_BTD), reference.projection()
      size = min(model.vocab_size, reference.vocab_size)

    def loss(logits_BTV: jax.Array, arrays: Any) -> jax.Array:
      predictions, targets_BT, weights_BT = arrays
      student_BTV = self.log_probabilities(logits_BTV[..., :size])
      if project is None:
        pair = on_top_k(student_BTV, *predictions)
      else:
        pair = student_BTV, self.log_probabilities(project(predictions)[..., :size])
      loss_BT = divergence(*pair, beta=self.beta)
      if self.cross_entropy:
        given = {"z_loss": model.z_loss, "smoothing": model.label_smoothing}
        loss_BT += self.cross_entropy * cross_entropy(logits_BTV, targets_BT, **given)
      return (loss_BT * weights_BT).sum()

    return model.sum_of_losses(loss, x_BTD, (predictions, batch["targets"], batch["weights"])), aux

  def log_probabilities(self, logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities of all tokens at the temperature, float32 [..., V]."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / self.temperature)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyGkd(Gkd):
  """`Gkd` on answers that the student samples: lambda 1 in the paper.

  Attributes:
    sampling: How answers are sampled.
  """

  sampling: Sampling = dataclasses.field(default_factory=lambda: Sampling(temperature=1.0))


def divergence(student: jax.Array, teacher: jax.Array, *, beta: float) -> jax.Array:
  """Returns the generalized Jensen-Shannon divergence [...] of log-probabilities [..., V]."""
  if beta == 0:
    return _kl(teacher, student)
  if beta == 1:
    return _kl(student, teacher)
  mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
  return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
  return (jnp.exp(p) * (p - q)).sum(-1)


def on_top_k(
  student_BTV: jax.Array, ids_BTK: jax.Array, teacher_BTK: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probabilities of K tokens and of all others together, [B, T, K + 1] each.

  Without the last if K is V.
  """
  student_BTK = jnp.take_along_axis(student_BTV, ids_BTK, axis=-1)
  if ids_BTK.shape[-1] == student_BTV.shape[-1]:
    return student_BTK, teacher_BTK
  return _with_rest(student_BTK), _with_rest(teacher_BTK)


def _with_rest(logs_BTK: jax.Array) -> jax.Array:
  total_BT1 = jax.nn.logsumexp(logs_BTK, axis=-1, keepdims=True)
  rest_BT1 = jnp.log(-jnp.expm1(jnp.minimum(total_BT1, -_LEAST_REST)))
  return jnp.concatenate([logs_BTK, rest_BT1], axis=-1)
