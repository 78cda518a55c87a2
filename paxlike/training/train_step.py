# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: loss, gradients, accumulation, clipping, update, metrics."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxlike.errors import UserError
from paxlike.layers import aux_losses
from paxlike.layers.attention import qk_clip
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline.spec import split_microbatches
from paxlike.layers.precision.rounding import in_dtype
from paxlike.telemetry.step_metrics import TOKENS_OF
from paxlike.training import layer_metrics, pipeline_loss
from paxlike.training.gradients import Constants, Differentiated, Gradients, Microbatch
from paxlike.training.objectives import NextToken, Objective, shares_base, without_adapters
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState, with_same_shardings

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
  gradients = _gradients(definition, objective, log_layers=log_layers)

  def train_step(state: TrainState, batch: Batch) -> tuple[Any, ...]:
    weight = objective.weight(batch)
    if optimizer.on_host:
      opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
      state = dataclasses.replace(state, opt_state=opt_state)
    weights, constants = _prepared(definition, state)
    dropout = jax.random.fold_in(jax.random.key(seed), state.step)
    whole = Microbatch(batch, 0, 1, jnp.maximum(weight, 1), dropout)
    if num_microbatches == 1:
      (grads, new_extra), aux = jax.tree.map(_float32, gradients(weights, constants, whole))
    else:
      (grads, new_extra), aux = _accumulated(gradients, weights, constants, whole, num_microbatches)
    with jax.named_scope("optimizer"):
      norm = optax.tree.norm(definition.optimized(grads))
    finite = _all_finite([norm, aux.losses["loss"], *new_extra.values()])
    of_step: dict[str, Any] = {"grad_norm": norm}
    keep, guard = finite, state.guard
    if optimizer.guard is not None:
      spike, kept, scale, guard = optimizer.guard.judge(guard, aux.losses["loss"], norm)
      of_step["spike"] = spike.astype(jnp.float32)
      keep, grads = finite & kept, {name: scale * x for name, x in grads.items()}
    new = _updated(definition, optimizer, state, grads, new_extra)
    old = (state.params, state.extra, state.opt_state)
    with jax.named_scope("optimizer"):
      params, extra, opt_state = _where(keep, new, old)
    of_step["skipped"] = jnp.where(keep, 0.0, 1.0)
    of_step["learning_rate"] = optimizer.learning_rate(state.step)
    if (largest := qk_clip.largest(new[1])) is not None:
      of_step["max_attention_logit"] = largest
    of_step |= {f"{TOKENS_OF}{name}": _tokens_from(n, batch) for n, name in enumerate(sources)}
    metrics = {name: (value * weight, weight) for name, value in aux.losses.items()}
    metrics |= {name: (pair[0], pair[1]) for name, pair in aux.metrics.items()}
    metrics |= {name: (value, jnp.ones((), jnp.float32)) for name, value in of_step.items()}
    new_state = dataclasses.replace(
      state,
      step=state.step + 1,
      params=params,
      extra=extra,
      opt_state=opt_state,
      skipped=state.skipped + jnp.where(keep, 0, 1),
      guard=guard,
    )
    new_state = with_same_shardings(definition, optimizer, new_state)
    if not log_layers:
      return new_state, metrics
    return new_state, metrics, layer_metrics.of_step(definition, aux, grads, state.params, params)

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


def _gradients(definition: Definition, objective: Objective, *, log_layers: bool) -> Gradients:
  """Returns the gradient function of the loss of a microbatch."""
  if type(objective) is NextToken and pipeline_loss.pipeline_of(definition) is not None:
    return functools.partial(pipeline_loss.gradients, definition, log_layers=log_layers)
  if pipeline_loss.pipeline_of(definition) is not None and qk_clip.is_in(definition):
    raise UserError(
      f"QK_CLIP: a pipeline that trains with {type(objective).__name__} does not find the largest"
      " logits. Leave it out, or train without pipeline stages."
    )
  shared = shares_base(definition)

  def loss(
    weights: Differentiated, constants: Constants, microbatch: Microbatch
  ) -> tuple[Any, Aux]:
    params = weights.trained | constants.frozen | weights.extra
    model, other = definition.bind(params, constants.operands), None
    model.stack.log_layers = log_layers
    if objective.needs_reference:
      before = without_adapters(params) if shared else constants.reference
      other = definition.bind(jax.lax.stop_gradient(before | weights.extra))
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
    trained = jax.tree.map(jnp.add, grads.trained, new_grads.trained)
    extra = jax.tree.map(jnp.maximum, grads.extra, new_grads.extra)
    return (Differentiated(trained, extra), aux_losses.add(aux, new_aux)), None

  microbatches = (jnp.arange(count), split_microbatches(whole.batch, count))
  shapes = jax.eval_shape(of, *jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, microbatches)[0]


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)


@jax.named_scope("prepare")
def _prepared(definition: Definition, state: TrainState) -> tuple[Differentiated, Constants]:
  """Returns the weights in their compute dtypes and quantized forms: once per step."""
  prepared, frozen = definition.prepare(state.params), definition.prepare(state.frozen)
  reference = definition.prepare(state.reference)
  operands = definition.quantize_operands(prepared | frozen)
  return Differentiated(prepared, state.extra), Constants(frozen, reference, operands)


@jax.named_scope("optimizer")
def _updated(
  definition: Definition,
  optimizer: Optimizer,
  state: TrainState,
  grads: Params,
  new_extra: Params,
) -> tuple[Params, Params, Any]:
  """Returns (params, non-trainable state, optimizer state)."""
  trained_grads, params = definition.optimized(grads), definition.optimized(state.params)
  transform = optimizer.transformation(definition)
  updates, opt_state = transform.update(trained_grads, state.opt_state, params)
  new: Any = jax.tree.map(
    lambda w, update: in_dtype(w.astype(jnp.float32) + update, w.dtype, draw=state.step),
    params,
    updates,
  )
  own = {name: spec.update for name, spec in definition.weights.items() if spec.update is not None}
  new |= {name: own[name](old, grads[name]) for name, old in state.params.items() if name in own}
  extra = {name: own[name](old, new_extra[name]) for name, old in state.extra.items()}
  new = qk_clip.clipped(definition, new, extra)
  if optimizer.observe is not None:
    seen = jax.tree.map(lambda w: w.astype(jnp.float32), definition.optimized(new))
    opt_state = optimizer.observe(opt_state, seen, state.step - state.skipped)
  return new, extra, opt_state


def _where(keep: jax.Array, new: Any, old: Any) -> Any:
  """Returns the new state if `keep`, else the old one; schedules count the step in any case."""

  def is_schedule(node: Any) -> bool:
    return getattr(node, "_fields", ()) == ("count",)  # Optax's states of rates and weight decays.

  def chosen(one: Any, other: Any) -> Any:
    return one if is_schedule(one) else jnp.where(keep, one, other)

  return jax.tree.map(chosen, new, old, is_leaf=is_schedule)


def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _tokens_from(source: int, batch: Batch) -> jax.Array:
  """Returns the weight of the tokens that come from a source."""
  return (batch["weights"].sum(-1) * (batch["source"][:, 0] == source)).sum()
