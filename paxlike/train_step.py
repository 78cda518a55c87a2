# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, clipping, update, metrics."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition, Params
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

  def loss(prepared, extra, fixed, batch, total, dropout):
    weights, rounded, reference = prepared | fixed.frozen | extra, fixed.rounded, fixed.reference
    model, other = definition.bind(weights, rounded), None
    if objective.needs_reference:
      before = without_adapters(weights) if shared else reference
      other = definition.bind(jax.lax.stop_gradient(before | extra))
    value, aux = objective.total(model, other, batch, dropout)
    value /= total
    losses = {n: value / num_microbatches for n, value in aux.items() if n.endswith("_loss")}
    return sum(losses.values(), value), aux | losses | {"loss": value}

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    weight = objective.weight(batch)
    prepared, fixed = _prepared(definition, state)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)

    def gradients(index, microbatch):
      key = jax.random.fold_in(dropout, index)
      (grads, noticed), values = jax.grad(loss, (0, 1), has_aux=True)(
        prepared, state.extra, fixed, microbatch, jnp.maximum(weight, 1), key
      )
      return jax.tree.map(lambda x: x.astype(jnp.float32), ((grads, values), noticed))

    (grads, values), noticed = _accumulate(gradients, batch, num_microbatches)
    *new, norm = _updated(definition, optimizer, state, grads, noticed)
    finite = jnp.isfinite(norm) & jnp.isfinite(values["loss"])
    for largest in noticed.values():
      finite &= jnp.isfinite(largest).all()
    old = [state.params, state.extra, state.opt_state]
    params, extra, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    one = jnp.ones((), jnp.float32)
    metrics = {n: (v[0], v[1]) if v.ndim else (v * weight, weight) for n, v in values.items()}
    metrics |= {
      "grad_norm": (norm, one),
      "learning_rate": (optimizer.learning_rate(state.step - state.skipped), one),
      "skipped": (jnp.where(finite, 0.0, 1.0), one),
    }
    for number, name in enumerate(sources):
      is_from_B = batch["source"][:, 0] == number
      metrics[f"{TOKENS_OF}{name}"] = ((batch["weights"].sum(-1) * is_from_B).sum(), one)
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


def _accumulate(gradients: Callable[[Any, Batch], Any], batch: Batch, num_microbatches: int) -> Any:
  """Combines `gradients` over the microbatches of `batch`, one in memory at a time.

  They are two trees: of the one the sum is returned, of the other the largest.
  """
  if num_microbatches == 1:
    return gradients(0, batch)

  def split(x: jax.Array) -> jax.Array:
    # Every num_microbatches-th row, so that each device finds its share of each in its own rows.
    return x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

  def add(total, xs):
    new = gradients(*xs)
    sums = jax.tree.map(jnp.add, total[0], new[0])
    largest = jax.tree.map(jnp.maximum, total[1], new[1])
    return (sums, largest), None

  microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, batch))
  shapes = jax.eval_shape(gradients, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]
