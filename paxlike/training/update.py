# SPDX-License-Identifier: Apache-2.0
"""The update of a training state by the gradients of a step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxlike.devices import topology
from paxlike.layers.attention import qk_clip
from paxlike.layers.module import Definition, Params
from paxlike.layers.precision.rounding import in_dtype
from paxlike.training.gradients import Constants, Differentiated
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState, with_same_shardings


def on_device(optimizer: Optimizer, state: TrainState) -> TrainState:
  """Returns the state with the optimizer's state in device memory."""
  if not optimizer.on_host:
    return state
  opt_state = jax.device_put(state.opt_state, jax.memory.Space.Device)
  return dataclasses.replace(state, opt_state=opt_state)


@jax.named_scope("prepare")
def prepared(definition: Definition, state: TrainState) -> tuple[Differentiated, Constants]:
  """Returns the weights in their compute dtypes and quantized forms: once per step."""
  prepared, frozen = definition.prepare(state.params), definition.prepare(state.frozen)
  operands = definition.quantize_operands(prepared | frozen)
  return Differentiated(prepared, state.extra), Constants(frozen, state.reference, operands)


def update(
  definition: Definition,
  optimizer: Optimizer,
  state: TrainState,
  gradients: Differentiated,
  loss: jax.Array,
  *,
  is_last: bool = True,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Returns (the state after a step, metrics of the update as scalars).

  An update that is not finite, or that the optimizer's guard drops, changes only the counters. A
  step may have several updates; schedules count steps.

  Args:
    definition: The model.
    optimizer: The optimizer.
    state: The state before the step, in device memory; see `on_device`.
    gradients: Of the loss, float32.
    loss: Of the step.
    is_last: Whether this is the step's last update.
  """
  grads, new_extra = gradients
  with jax.named_scope("optimizer"):
    norm: Any = optax.tree.norm(definition.optimized(grads))
  metrics: dict[str, jax.Array] = {"grad_norm": norm}
  keep, guard, scale = _all_finite([norm, loss, *new_extra.values()]), state.guard, None
  if optimizer.guard is not None:
    spike, kept, scale, guard = optimizer.guard.judge(guard, loss, norm)
    metrics["spike"] = spike.astype(jnp.float32)
    keep &= kept
  own: Any = {name: spec.update for name, spec in definition.weights.items()}
  new_extra = {name: own[name](old, new_extra[name]) for name, old in state.extra.items()}

  def updated() -> tuple[Params, Params, Any]:
    # Scaled here, where it is fused into the update.
    scaled = grads if scale is None else {name: scale * x for name, x in grads.items()}
    params, opt_state = _updated(definition, optimizer, state, scaled, new_extra)
    return params, new_extra, opt_state if is_last else _with_counts(opt_state, state.opt_state)

  def skipped() -> tuple[Params, Params, Any]:
    return state.params, state.extra, _counted(state.opt_state) if is_last else state.opt_state

  with jax.named_scope("optimizer"):
    params, extra, opt_state = _either(keep, updated, skipped)
  rate: Any = optimizer.learning_rate(state.step)
  metrics |= {"skipped": jnp.where(keep, 0.0, 1.0), "learning_rate": rate}
  if (largest := qk_clip.largest(new_extra)) is not None:
    metrics["max_attention_logit"] = largest
  new_state = dataclasses.replace(
    state,
    step=state.step + int(is_last),
    params=params,
    extra=extra,
    opt_state=opt_state,
    skipped=state.skipped + jnp.where(keep, 0, 1),
    guard=guard,
  )
  return with_same_shardings(definition, optimizer, new_state), metrics


def _updated(
  definition: Definition,
  optimizer: Optimizer,
  state: TrainState,
  grads: Params,
  extra: Params,
) -> tuple[Params, Any]:
  """Returns (params, optimizer state); `extra` is the non-trainable state after the step."""
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
  new = qk_clip.clipped(definition, new, extra)
  if optimizer.observe is not None:
    seen = jax.tree.map(lambda w: w.astype(jnp.float32), definition.optimized(new))
    opt_state = optimizer.observe(opt_state, seen, state.step - state.skipped)
  return new, opt_state


def _either(keep: jax.Array, updated: Callable[[], Any], skipped: Callable[[], Any]) -> Any:
  """Returns updated() if `keep`, else skipped()."""
  if topology.devices()[0].platform == "cpu":
    # With a choice for each element, XLA for CPUs would copy the moments: it computes weights and
    # moments in separate loops over the old moments, in no order.
    return jax.lax.cond(keep, updated, skipped)
  # GPUs would wait for the host to read a condition.
  return jax.tree.map(functools.partial(jnp.where, keep), updated(), skipped())


def _is_schedule(node: Any) -> bool:
  return getattr(node, "_fields", ()) == ("count",)  # Optax's states of rates and weight decays.


def _counted(opt_state: Any) -> Any:
  """Returns the optimizer's state with one more step in its schedules."""

  def counted(node: Any) -> Any:
    return node._replace(count=optax.safe_increment(node.count)) if _is_schedule(node) else node

  return jax.tree.map(counted, opt_state, is_leaf=_is_schedule)


def _with_counts(opt_state: Any, counts: Any) -> Any:
  """Returns the optimizer's state with the schedules of another one."""
  return jax.tree.map(
    lambda one, other: other if _is_schedule(one) else one, opt_state, counts, is_leaf=_is_schedule
  )


def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
