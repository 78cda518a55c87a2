# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, clipping, update, metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition, Params
from paxlike.meter import TOKENS_OF
from paxlike.objectives import NextToken, Objective, shares_base, without_adapters
from paxlike.optimizers import Optimizer
from paxlike.train_state import TrainState

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

  def loss(prepared, frozen, reference, batch, total, dropout):
    model, other = definition.bind(prepared | frozen), None
    if objective.needs_reference:
      weights = without_adapters(prepared | frozen) if shared else reference
      other = definition.bind(jax.lax.stop_gradient(weights))
    value, aux = objective.total(model, other, batch, dropout)
    value /= total
    losses = {n: value / num_microbatches for n, value in aux.items() if n.endswith("_loss")}
    return sum(losses.values(), value), aux | losses | {"loss": value}

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    weight = objective.weight(batch)
    prepared = definition.prepare(state.params)
    frozen, reference = definition.prepare(state.frozen), definition.prepare(state.reference)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)

    def gradients(index, microbatch):
      key = jax.random.fold_in(dropout, index)
      grads, values = jax.grad(loss, has_aux=True)(
        prepared, frozen, reference, microbatch, jnp.maximum(weight, 1), key
      )
      return jax.tree.map(lambda x: x.astype(jnp.float32), (grads, values))

    grads, values = _accumulate(gradients, batch, num_microbatches)
    new_params, opt_state, norm = _updated(definition, optimizer, state, grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(values["loss"])
    new = (new_params, opt_state)
    old = (state.params, state.opt_state)
    params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
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
      extra=state.extra,
      opt_state=opt_state,
      skipped=state.skipped + jnp.where(finite, 0, 1),
    )
    return state, metrics

  return train_step


def _updated(
  definition: Definition, optimizer: Optimizer, state: TrainState, grads: Params
) -> tuple[Params, Any, jax.Array]:
  """Returns the new params, the optimizer's new state, and the norm of the gradients it saw."""
  grads_seen, params = definition.optimized(grads), definition.optimized(state.params)
  updates, opt_state = optimizer.transform.update(grads_seen, state.opt_state, params)
  new: Any = optax.apply_updates(params, updates)
  for name, spec in definition.weights.items():
    if spec.update is not None and spec.changes:
      new[name] = spec.update(state.params[name], grads[name])
  return new, opt_state, optax.tree.norm(grads_seen)


def _accumulate(gradients: Callable[[Any, Batch], Any], batch: Batch, num_microbatches: int) -> Any:
  """Returns the sum of `gradients` over the microbatches of `batch`, one in memory at a time."""
  if num_microbatches == 1:
    return gradients(0, batch)

  def split(x: jax.Array) -> jax.Array:
    # Every num_microbatches-th row, so that each device finds its share of each in its own rows.
    return x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

  def add(total, xs):
    return jax.tree.map(jnp.add, total, gradients(*xs)), None

  microbatches = (jnp.arange(num_microbatches), jax.tree.map(split, batch))
  shapes = jax.eval_shape(gradients, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]
