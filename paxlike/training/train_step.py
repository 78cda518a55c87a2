# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, update, metrics."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.errors import UserError
from paxlike.layers import aux_losses
from paxlike.layers.attention import qk_clip
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition
from paxlike.layers.pipeline.spec import split_microbatches
from paxlike.telemetry.step_metrics import TOKENS_OF
from paxlike.training import layer_metrics, pipeline_loss
from paxlike.training.gradients import (
  Constants,
  Differentiated,
  Gradients,
  Microbatch,
  combined,
)
from paxlike.training.objectives import NextToken, Objective, without_adapters
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState
from paxlike.training.update import on_device, prepared, update

# Name -> (sum, weight): the value is sum / weight; pairs add up over steps and hosts.
Metrics = dict[str, tuple[jax.Array, jax.Array]]
# (state, batch) -> (state, Metrics), or (state, Metrics, LayerMetrics).
TrainStep = Callable[[TrainState, Batch], tuple[Any, ...]]


def make_train_step(
  definition: Definition,
  optimizer: Optimizer,
  *,
  seed: int,
  num_microbatches: int = 1,
  objective: Objective = NextToken(),
  sources: Sequence[str] = (),
  log_layers: bool = False,
) -> TrainStep:
  """Returns a pure function (state, batch) -> (state, metrics).

  The loss is the objective's sum over the whole batch divided by its weight, for any number of
  microbatches. A step whose loss or gradients are not finite changes only the counters. Metrics
  count the tokens from each of the data's `sources`. With `log_layers`, the function returns
  (state, metrics, LayerMetrics).
  """
  gradients = gradients_of(definition, objective, log_layers=log_layers)

  def train_step(state: TrainState, batch: Batch) -> tuple[Any, ...]:
    weight = objective.weight(batch)
    state = on_device(optimizer, state)
    weights, constants = prepared(definition, state)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)
    whole = Microbatch(batch, 0, 1, jnp.maximum(weight, 1), dropout)
    if num_microbatches == 1:
      grads, aux = jax.tree.map(_float32, gradients(weights, constants, whole))
    else:
      grads, aux = _accumulated(gradients, weights, constants, whole, num_microbatches)
    new_state, of_step = update(definition, optimizer, state, grads, aux.losses["loss"])
    of_step |= {f"{TOKENS_OF}{name}": _tokens_from(n, batch) for n, name in enumerate(sources)}
    metrics = {name: (value * weight, weight) for name, value in aux.losses.items()}
    metrics |= {name: (pair[0], pair[1]) for name, pair in aux.metrics.items()}
    metrics |= {name: (value, jnp.ones((), jnp.float32)) for name, value in of_step.items()}
    if not log_layers:
      return new_state, metrics
    layers = layer_metrics.of_step(definition, aux, grads.trained, state.params, new_state.params)
    return new_state, metrics, layers

  return train_step


def note_on_memory(definition: Definition, objective: Objective) -> str | None:
  """Returns a note if a 1F1B pipeline stores more activations than its schedule says; else None.

  That is so for objectives other than `NextToken`: JAX differentiates them through the scan over
  the pipeline's ticks.
  """
  how, name = pipeline_loss.pipeline_of(definition), type(objective).__name__
  if how is None or "1f1b" not in how.schedule or type(objective) is NextToken:
    return None
  return (
    f"PIPELINE_SCHEDULE={how.schedule}: the gradients of {name} store the activations of all"
    f" {how.microbatches} microbatches, as gpipe does"
  )


def gradients_of(
  definition: Definition, objective: Objective, *, log_layers: bool = False
) -> Gradients:
  """Returns the gradient function of the loss of a microbatch."""
  if type(objective) is NextToken and pipeline_loss.pipeline_of(definition) is not None:
    return functools.partial(pipeline_loss.gradients, definition, log_layers=log_layers)
  if pipeline_loss.pipeline_of(definition) is not None and qk_clip.is_in(definition):
    raise UserError(
      f"QK_CLIP: a pipeline that trains with {type(objective).__name__} does not find the largest"
      " logits. Leave it out, or train without pipeline stages."
    )
  reference = objective.reference(definition)

  def loss(
    weights: Differentiated, constants: Constants, microbatch: Microbatch
  ) -> tuple[Any, Aux]:
    params = weights.trained | constants.frozen | weights.extra
    model, other = definition.bind(params, constants.operands), None
    model.stack.log_layers = log_layers
    if objective.needs_reference:
      before = without_adapters(params) if reference is None else constants.reference
      if reference in (None, definition):
        other = definition.bind(jax.lax.stop_gradient(before | weights.extra))
      else:
        other = reference.bind(before)
    key = jax.random.fold_in(microbatch.dropout, microbatch.index)
    value, aux = objective.total(model, other, microbatch.batch, key)
    losses = {"loss": value / microbatch.weight} | aux.averaged(microbatch.count).losses
    further = sum(aux.summed.values()) / microbatch.weight
    return sum(losses.values()) + further, aux._replace(losses=losses)

  return jax.grad(loss, has_aux=True)


def _accumulated(
  gradients: Gradients,
  weights: Differentiated,
  constants: Constants,
  whole: Microbatch,
  count: int,
) -> tuple[Differentiated, Aux]:
  """Returns gradients accumulated in float32 over `count` microbatches, one in memory at a time.

  Gradients, losses and metrics are summed; non-trainable state combines by maximum.
  """

  def of(index: Any, batch: Batch) -> tuple[Differentiated, Aux]:
    microbatch = whole._replace(batch=batch, index=index, count=count)
    return jax.tree.map(_float32, gradients(weights, constants, microbatch))

  def add(total: Any, xs: tuple[Any, Batch]) -> tuple[Any, None]:
    (grads, aux), (new_grads, new_aux) = total, of(*xs)
    return (combined(grads, new_grads), aux_losses.add(aux, new_aux)), None

  microbatches = (jnp.arange(count), split_microbatches(whole.batch, count))
  shapes = jax.eval_shape(of, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)


def _tokens_from(source: int, batch: Batch) -> jax.Array:
  """Returns the weight of the tokens that come from a source."""
  return (batch["weights"].sum(-1) * (batch["source"][:, 0] == source)).sum()
