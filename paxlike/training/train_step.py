# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, clipping, update, metrics."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline.spec import split_microbatches
from paxlike.layers.precision.rounding import Rounded, in_dtype
from paxlike.telemetry.meter import TOKENS_OF
from paxlike.training import pipeline_loss
from paxlike.training.objectives import NextToken, Objective, shares_base, without_adapters
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState, kept_in_place

# Name -> (sum, weight): the value is sum / weight; pairs add up over steps and hosts.
Metrics = dict[str, tuple[jax.Array, jax.Array]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Constants(NamedTuple):
  """Weights that a step does not differentiate."""

  frozen: Params
  reference: Params
  rounded: dict[str, Rounded]


class Part(NamedTuple):
  """A gradient-accumulation microbatch.

  Attributes:
    batch: Its sequences.
    index: Its index among the microbatches of the step.
    count: The number of microbatches.
    weight: The objective's weight of the whole batch, at least 1.
    dropout: The dropout key of the step.
  """

  batch: Batch
  index: int | jax.Array
  count: int
  weight: jax.Array
  dropout: jax.Array


# Weights by name: trained weights, and non-trainable state.
Differentiated = tuple[Params, Params]
Reported = dict[str, jax.Array]  # Scalars, or [sum, weight].
Gradients = Callable[[Differentiated, Constants, Part], tuple[Differentiated, Reported]]


def make_train_step(
  definition: Definition,
  optimizer: Optimizer,
  *,
  seed: int,
  num_microbatches: int = 1,
  objective: Objective = NextToken(),
  sources: Sequence[str] = (),
) -> TrainStep:
  """Returns a pure function (state, batch) -> (state, metrics).

  The loss is the objective's sum over the whole batch divided by its weight, for any number of
  microbatches. A step whose loss or gradients are not finite changes only the counters. Metrics
  count the tokens from each of the data's `sources`.
  """
  gradients = _gradients(definition, objective)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    weight = objective.weight(batch)
    if optimizer.on_host:
      opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
      state = dataclasses.replace(state, opt_state=opt_state)
    weights, constants = _prepared(definition, state)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)
    whole = Part(batch, 0, num_microbatches, jnp.maximum(weight, 1), dropout)
    if num_microbatches == 1:
      (grads, new_extra), values = jax.tree.map(_float32, gradients(weights, constants, whole))
    else:
      (grads, new_extra), values = _accumulated(gradients, weights, constants, whole)
    *new, norm = _updated(definition, optimizer, state, grads, new_extra)
    finite = _all_finite([norm, values["loss"], *new_extra.values()])
    old = [state.params, state.extra, state.opt_state]
    params, extra, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    of_step = {
      "grad_norm": norm,
      "learning_rate": optimizer.learning_rate(state.step - state.skipped),
      "skipped": jnp.where(finite, 0.0, 1.0),
    }
    of_step |= {f"{TOKENS_OF}{name}": _tokens_from(n, batch) for n, name in enumerate(sources)}
    metrics = {n: (v[0], v[1]) if v.ndim else (v * weight, weight) for n, v in values.items()}
    metrics |= {name: (value, jnp.ones((), jnp.float32)) for name, value in of_step.items()}
    state = dataclasses.replace(
      state,
      step=state.step + 1,
      params=params,
      extra=extra,
      opt_state=opt_state,
      skipped=state.skipped + jnp.where(finite, 0, 1),
    )
    return kept_in_place(definition, optimizer, state), metrics

  return train_step


def _gradients(definition: Definition, objective: Objective) -> Gradients:
  """Returns the gradient function of the loss of a microbatch."""
  # JAX differentiates other objectives through the pipeline's scan, which stores as much as gpipe.
  if type(objective) is NextToken and pipeline_loss.pipeline_of(definition) is not None:
    return functools.partial(_gradients_in_stages, definition)
  shared = shares_base(definition)

  def loss(weights: Differentiated, constants: Constants, part: Part) -> tuple[Any, Reported]:
    (prepared, extra), other = weights, None
    params = prepared | constants.frozen | extra
    model = definition.bind(params, constants.rounded)
    if objective.needs_reference:
      before = without_adapters(params) if shared else constants.reference
      other = definition.bind(jax.lax.stop_gradient(before | extra))
    key = jax.random.fold_in(part.dropout, part.index)
    value, aux = objective.total(model, other, part.batch, key)
    losses = {"loss": value / part.weight} | aux.averaged(part.count).losses
    return sum(losses.values()), losses | aux.metrics

  return jax.grad(loss, has_aux=True)


def _gradients_in_stages(
  definition: Definition, weights: Differentiated, constants: Constants, part: Part
) -> tuple[Differentiated, Reported]:
  value, aux, grads = pipeline_loss.gradients(
    definition,
    weights,
    (constants.frozen, constants.rounded),
    pipeline_loss.Part(part.batch, part.index, part.count),
    loss_weight=1 / part.weight,
    dropout=part.dropout,
  )
  return grads, {"loss": value} | aux.averaged(part.count).losses | aux.metrics


def _accumulated(
  gradients: Gradients, weights: Differentiated, constants: Constants, whole: Part
) -> tuple[Differentiated, Reported]:
  """Returns gradients accumulated in float32 over microbatches, one microbatch in memory at a time.

  Gradients, losses and metrics are summed; non-trainable state combines by maximum.
  """

  def of(index: Any, batch: Batch) -> tuple[Differentiated, Reported]:
    part = whole._replace(batch=batch, index=index)
    return jax.tree.map(_float32, gradients(weights, constants, part))

  def add(total: Any, microbatch: tuple[Any, Batch]) -> tuple[Any, None]:
    ((grads, new_extra), values), ((new_grads, other_extra), new_values) = total, of(*microbatch)
    grads, values = jax.tree.map(jnp.add, (grads, values), (new_grads, new_values))
    return ((grads, jax.tree.map(jnp.maximum, new_extra, other_extra)), values), None

  microbatches = (jnp.arange(whole.count), split_microbatches(whole.batch, whole.count))
  shapes = jax.eval_shape(of, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)


def _prepared(definition: Definition, state: TrainState) -> tuple[Differentiated, Constants]:
  """Returns the weights in their compute dtypes and quantized forms: once per step."""
  prepared, frozen = definition.prepare(state.params), definition.prepare(state.frozen)
  reference = definition.prepare(state.reference)
  rounded = definition.rounded(prepared | frozen)
  return (prepared, state.extra), Constants(frozen, reference, rounded)


def _updated(
  definition: Definition, optimizer: Optimizer, state: TrainState, grads: Params, new_extra: Params
) -> tuple[Params, Params, Any, jax.Array]:
  """Returns (params, non-trainable state, optimizer state, the optimizer's gradient norm)."""
  trained_grads, params = definition.optimized(grads), definition.optimized(state.params)
  updates, opt_state = optimizer.transform.update(trained_grads, state.opt_state, params)
  new: Any = jax.tree.map(
    lambda w, update: in_dtype(w.astype(jnp.float32) + update, w.dtype, draw=state.step),
    params,
    updates,
  )
  own = {name: spec.update for name, spec in definition.weights.items() if spec.update is not None}
  new |= {name: own[name](old, grads[name]) for name, old in state.params.items() if name in own}
  extra = {name: own[name](old, new_extra[name]) for name, old in state.extra.items()}
  return new, extra, opt_state, optax.tree.norm(trained_grads)


def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _tokens_from(source: int, batch: Batch) -> jax.Array:
  """Returns the weight of the tokens that come from a source."""
  return (batch["weights"].sum(-1) * (batch["source"][:, 0] == source)).sum()
