# SPDX-License-Identifier: Apache-2.0
"""The forward and the backward pass as two programs, with any loss between them.

One program computes the log-probabilities of a batch wherever they are needed: to check sampled
tokens, as those of the old policy, and to be differentiated. So they are the same, bit for bit.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.inference.sampling import Sampling
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition
from paxlike.training.gradients import Constants, Differentiated, combined
from paxlike.training.objectives.policy import Loss, Outputs, TokenScores, of_outputs, token_scores
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState
from paxlike.training.update import on_device, prepared, update


class Forward(NamedTuple):
  """The result of a forward pass.

  Attributes:
    scores: Of the tokens of the batch.
    aux: Of the layers.
    residuals: What the backward pass needs.
  """

  scores: TokenScores
  aux: Aux
  residuals: Any


class Gradients(NamedTuple):
  """The result of forward and backward passes over batches.

  Attributes:
    total: The gradients.
    loss: The loss, summed over batches.
    log_probabilities: Float32 [B, T] of each batch.
    aux: Of the layers.
    sums: Metrics of the loss.
  """

  total: Differentiated
  loss: jax.Array
  log_probabilities: list[jax.Array]
  aux: Aux
  sums: dict[str, jax.Array]


# (outputs, batch) -> ((loss, metrics), the derivative of the loss).
LossAndDerivative = Callable[[Outputs, Batch], tuple[tuple[jax.Array, Any], Outputs]]


def differentiated(loss: Loss, **options: Any) -> LossAndDerivative:
  """Returns the compiled loss with its derivative; `options` are for `jax.jit`."""
  return jax.jit(jax.value_and_grad(of_outputs(loss), has_aux=True), **options)


class ForwardBackward:
  """The compiled programs of a step that is taken in parts, for batches of one shape.

  All arrays stay on the devices.
  """

  def __init__(
    self,
    definition: Definition,
    optimizer: Optimizer,
    *,
    sampling: Sampling,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Compiles nothing yet.

    Args:
      definition: A `layers.Decoder`.
      optimizer: The optimizer.
      sampling: How the targets are sampled; temperature 1 if they are not.
      compiler_options: XLA's.
    """
    jit = functools.partial(jax.jit, compiler_options=dict(compiler_options or {}))

    def forward(weights: Differentiated, constants: Constants, batch: Batch) -> Forward:
      def of_weights(weights: Differentiated) -> Any:
        params = weights.trained | constants.frozen | weights.extra
        model = definition.bind(params, constants.operands)
        scores, aux = token_scores(model, batch, None, sampling)
        return (scores.outputs, aux.losses), (scores, aux)

      _, residuals, (scores, aux) = jax.vjp(of_weights, weights, has_aux=True)
      return Forward(scores, aux, residuals)

    def backward(residuals: Any, cotangent: Outputs, of_aux: dict[str, Any]) -> Differentiated:
      (gradients,) = residuals((cotangent, of_aux))
      return jax.tree.map(lambda x: x.astype(jnp.float32), gradients)

    def step(state: TrainState, gradients: Differentiated, loss: jax.Array, is_last: bool) -> Any:
      state = on_device(optimizer, state)
      return update(definition, optimizer, state, gradients, loss, is_last=is_last)

    self._prepare = jit(lambda state: prepared(definition, state))
    self._forward = jit(forward)
    self._backward = jit(backward)
    self._combined = jit(combined, donate_argnums=0)
    self._update = jit(step, donate_argnums=0, static_argnums=3)

  def prepare(self, state: TrainState) -> tuple[Differentiated, Constants]:
    """Returns the weights of a state in the dtypes and forms that the passes use."""
    return self._prepare(state)

  def forward(self, weights: Differentiated, constants: Constants, batch: Batch) -> Forward:
    """Returns the scores of a batch, without dropout, and what `backward` needs."""
    return self._forward(weights, constants, batch)

  def backward(self, result: Forward, cotangent: Outputs, *, count: int = 1) -> Differentiated:
    """Returns float32 gradients.

    Args:
      result: Of `forward`.
      cotangent: The derivative of the loss by `result.scores.outputs`.
      count: The number of batches of the step, over which losses of layers are averaged.
    """
    of_aux = jax.tree.map(lambda x: jnp.full_like(x, 1 / count), result.aux.losses)
    return self._backward(result.residuals, cotangent, of_aux)

  def accumulate(self, total: Differentiated | None, gradients: Differentiated) -> Differentiated:
    """Returns the sum; `total` is consumed, None is zero."""
    return gradients if total is None else self._combined(total, gradients)

  def gradients(
    self,
    prepared: tuple[Differentiated, Constants],
    batches: Sequence[Batch],
    of_loss: Sequence[Batch],
    loss: LossAndDerivative,
  ) -> Gradients:
    """Returns the gradients of a loss, summed over batches.

    Args:
      prepared: The weights; see `prepare`.
      batches: At least one.
      of_loss: The second argument of the loss for each.
      loss: Called with the outputs of each; see `differentiated`.
    """
    total, value, aux, sums, scored = None, jnp.zeros(()), none(), {}, []
    for batch, given in zip(batches, of_loss, strict=True):
      result = self.forward(*prepared, batch)
      scored.append(result.scores.log_probabilities_BT)
      (new, of_batch), cotangent = loss(result.scores.outputs, given)
      part = self.backward(result, cotangent, count=len(batches))
      total, value = self.accumulate(total, part), value + new
      aux = add(aux, result.aux)
      sums = {name: sums.get(name, 0) + pair for name, pair in of_batch.items()}
    assert total is not None
    return Gradients(total, value, scored, aux, sums)

  def update(
    self, state: TrainState, gradients: Differentiated, loss: jax.Array, *, is_last: bool = True
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns (the state after an update, metrics of the update); see `update.update`.

    The old state is consumed.
    """
    return self._update(state, gradients, loss, is_last)
