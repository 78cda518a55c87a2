# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, clipping, update, metrics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxlike import pipelined
from paxlike.layers.block import Aux
from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline import split_rows
from paxlike.layers.rounding import Rounded, in_dtype
from paxlike.meter import TOKENS_OF
from paxlike.objectives import NextToken, Objective, shares_base, without_adapters
from paxlike.optimizers import Optimizer
from paxlike.train_state import TrainState, kept_in_place

# Name -> (sum, weight): the value is their quotient, and sums add up over steps and hosts.
Metrics = dict[str, tuple[jax.Array, jax.Array]]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


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

  The loss is the objective's sum over the whole batch by its weight, however that is split into
  microbatches. A step whose loss or gradient is not finite leaves all but the counters as it was.
  Metrics count the tokens from each of the `sources` of the data.
  """

  shared = shares_base(definition)
  # Others are differentiated through the pipeline, and so store all that gpipe does.
  in_stages = isinstance(objective, NextToken) and pipelined.pipeline_of(definition) is not None

  def loss(prepared, extra, fixed, batch, total, dropout):
    weights, rounded, reference = prepared | fixed.frozen | extra, fixed.rounded, fixed.reference
    model, other = definition.bind(weights, rounded), None
    if objective.needs_reference:
      before = without_adapters(weights) if shared else reference
      other = definition.bind(jax.lax.stop_gradient(before | extra))
    value, aux = objective.total(model, other, batch, dropout)
    values = _reported(value / total, aux, num_microbatches)
    losses = [value for name, value in values.items() if name.endswith("loss")]
    return sum(losses), values

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    weight = objective.weight(batch)
    if optimizer.on_host:
      opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
      state = dataclasses.replace(state, opt_state=opt_state)
    prepared, fixed = _prepared(definition, state)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)

    def gradients(index, microbatch):
      total = jnp.maximum(weight, 1)
      if not in_stages:
        key = jax.random.fold_in(dropout, index)
        (grads, noticed), values = jax.grad(loss, (0, 1), has_aux=True)(
          prepared, state.extra, fixed, microbatch, total, key
        )
      else:
        weights, others = (prepared, state.extra), (fixed.frozen, fixed.rounded)
        part = pipelined.Part(microbatch, index, num_microbatches)
        value, aux, (grads, noticed) = pipelined.gradients(
          definition, weights, others, part, loss_weight=1 / total, dropout=dropout
        )
        values = _reported(value, aux, num_microbatches)
      return jax.tree.map(lambda x: x.astype(jnp.float32), ((grads, values), noticed))

    (grads, values), noticed = _accumulate(gradients, batch, num_microbatches)
    *new, norm = _updated(definition, optimizer, state, grads, noticed)
    finite = _all_finite([norm, values["loss"], *noticed.values()])
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
    state = TrainState(
      step=state.step + 1,
      params=params,
      frozen=state.frozen,
      reference=state.reference,
      extra=extra,
      opt_state=opt_state,
      skipped=state.skipped + jnp.where(finite, 0, 1),
    )
    return kept_in_place(definition, optimizer, state), metrics

  return train_step


class _Fixed(NamedTuple):
  """What a step computes with and has no gradient for."""

  frozen: Params
  reference: Params
  rounded: dict[str, Rounded]


def _prepared(definition: Definition, state: TrainState) -> tuple[Params, _Fixed]:
  """Returns the weights as layers take them, and what else they take: once a step."""
  prepared, frozen = definition.prepare(state.params), definition.prepare(state.frozen)
  reference = definition.prepare(state.reference)
  return prepared, _Fixed(frozen, reference, definition.rounded(prepared | frozen))


def _updated(
  definition: Definition, optimizer: Optimizer, state: TrainState, grads: Params, noticed: Params
) -> tuple[Params, Params, Any, jax.Array]:
  """Returns the new params, extra and optimizer's state, and the norm of the gradients it saw."""
  grads_seen, params = definition.optimized(grads), definition.optimized(state.params)
  updates, opt_state = optimizer.transform.update(grads_seen, state.opt_state, params)
  new: Any = jax.tree.map(
    lambda w, update: in_dtype(w.astype(jnp.float32) + update, w.dtype, draw=state.step),
    params,
    updates,
  )
  own = {name: spec.update for name, spec in definition.weights.items() if spec.update is not None}
  new |= {name: own[name](old, grads[name]) for name, old in state.params.items() if name in own}
  extra = {name: own[name](old, noticed[name]) for name, old in state.extra.items()}
  return new, extra, opt_state, optax.tree.norm(grads_seen)


def _reported(loss: jax.Array, aux: Aux, count: int) -> dict[str, jax.Array]:
  """Returns what a part of a batch adds to the reports of all."""
  losses = {name: value / count for name, value in aux.items() if name.endswith("_loss")}
  return aux | losses | {"loss": loss}


def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _tokens_from(source: int, batch: Batch) -> jax.Array:
  """Returns the weight of the tokens that come from a source."""
  return (batch["weights"].sum(-1) * (batch["source"][:, 0] == source)).sum()


def _accumulate(gradients: Callable[[Any, Batch], Any], batch: Batch, num_microbatches: int) -> Any:
  """Combines `gradients` over the microbatches of `batch`, one in memory at a time.

  They are two trees: of the one the sum is returned, of the other the largest.
  """
  if num_microbatches == 1:
    return gradients(0, batch)

  def add(total, xs):
    new = gradients(*xs)
    sums = jax.tree.map(jnp.add, total[0], new[0])
    largest = jax.tree.map(jnp.maximum, total[1], new[1])
    return (sums, largest), None

  microbatches = (jnp.arange(num_microbatches), split_rows(batch, num_microbatches))
  shapes = jax.eval_shape(gradients, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]
