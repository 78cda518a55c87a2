# SPDX-License-Identifier: Apache-2.0
"""Steps of on-policy distillation: sample, compare with the teacher, update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.layers import aux_losses
from paxlike.layers.decoder import Batch
from paxlike.processes import phases
from paxlike.training.gradients import Microbatch
from paxlike.training.reinforcement.rollout_training import (
  Prepared,
  RolloutTraining,
  StepPrompts,
  scalar,
)
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import Metrics, gradients_of


class DistillationTraining(RolloutTraining):
  """Takes the steps of on-policy distillation: sample, compare with the teacher, update."""

  def __call__(self, state: TrainState, given: StepPrompts) -> tuple[TrainState, Metrics]:
    prepared = self._passes.prepare(state)
    answers = self._empty_answers(given[0], step=int(state.step))
    packed, metrics = self._sampled(self._sampler_of(state), prepared, answers)
    kept = [float(answer.has_ended or not self._how.mask_truncated) for answer in answers]
    weights, total, losses = packed.spread(kept), None, aux_losses.none()
    num_tokens = scalar(max(sum(map(np.sum, weights)), 1))
    phases.enter("step" if self._is_compiled else "compile", int(state.step))
    for of_tokens, batch in zip(weights, packed.batches, strict=True):
      arrays = self._trainer.placer.put_whole(batch | {"weights": of_tokens})
      part, aux = self._gradients(prepared, arrays, num_tokens, scalar(len(weights)))
      total, losses = self._passes.accumulate(total, part), aux_losses.add(losses, aux)
    assert total is not None
    state, of_update = self._passes.update(state, total, losses.losses["loss"])
    self._is_compiled = True
    metrics |= {name: (value * num_tokens, num_tokens) for name, value in losses.losses.items()}
    metrics |= {name: (pair[0], pair[1]) for name, pair in losses.metrics.items()}
    metrics |= {name: (value, scalar(1)) for name, value in of_update.items()}
    return state, jax.tree.map(jnp.asarray, metrics)

  @functools.cached_property
  def _gradients(self) -> Any:
    """Returns (float32 gradients, Aux) of a batch, given the tokens and batches of the step."""
    of_batch = gradients_of(self._trainer.definition, self._objective)

    def gradients(prepared: Prepared, batch: Batch, num_tokens: jax.Array, count: Any) -> Any:
      part = Microbatch(batch, 0, count, num_tokens, jax.random.key(0))  # There is no dropout.
      return jax.tree.map(lambda x: x.astype(jnp.float32), of_batch(*prepared, part))

    return jax.jit(gradients, **self._options)
