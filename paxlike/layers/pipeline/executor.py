# SPDX-License-Identifier: Apache-2.0
"""The executor of all pipeline schedules.

Each index of the mesh axis `pipeline` is a stage. A scan over ticks looks up in the schedule what
the stage runs: a forward chunk, a backward chunk, or both. The vjp of a chunk is taken inside its
backward tick, and gradients accumulate in the scan's carry. The scan itself is not differentiated,
so the schedule's slots, not the number of microbatches, bound the stored activations. All other
mesh axes are left to the compiler (partially manual `shard_map`). An idle stage computes values
that are discarded.

Ticks in which stage 0 begins or ends a microbatch also embed its tokens, or add the gradients of
the embedding; those in which the last stage ends one have its loss. These are branches that all
stages take together, since they contain collectives over other axes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.layers import aux_losses, pytree_indexing
from paxlike.layers.aux_losses import Aux
from paxlike.layers.pipeline import stage_shift
from paxlike.layers.pipeline.jaxpr_dependence import depends_on_inputs
from paxlike.layers.pipeline.schedules import Half, Phase
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.pipeline.stage_tokens import StageTokens
from paxlike.layers.pipeline.staged_model import StageArrays, StagedModel


class _State(NamedTuple):
  """The scan's carry on a stage."""

  up: jax.Array  # Activations received from the previous stage, [b, T, D].
  down: jax.Array  # Cotangents received from the next stage, [b, T, D].
  slots: Any  # Residuals: a pytree of [slots, ...].
  loss: jax.Array
  aux: Aux
  gradients: StageArrays


def gradients(
  pipeline: Pipeline,
  model: StagedModel,
  weights: StageArrays,
  constants: StageArrays,
  microbatches: Any,
) -> tuple[jax.Array, Aux, StageArrays]:
  """Returns (sum of losses, sum of Aux, gradients of the sum) over the microbatches.

  Args:
    pipeline: The pipeline; its `plan` is the schedule.
    model: The model.
    weights: The weights to differentiate.
    constants: Arrays that get no gradient.
    microbatches: A pytree of [M, ...].

  Returns:
    Gradients of common weights have a leading dim S; the caller reduces over it.
  """

  def on_stage(
    weights: StageArrays, constants: StageArrays, microbatches: Any
  ) -> tuple[Any, Any, Any, Any]:
    stage = _Stage(pipeline, model, weights, constants, microbatches)
    state = stage.start()
    for phase in pipeline.plan.phases():
      state, _ = jax.lax.scan(lambda state, halves: (stage.tick(state, halves), None), state, phase)
    loss = jax.lax.psum(state.loss, stage_shift.AXIS)
    aux = aux_losses.total_over(stage_shift.AXIS, state.aux)
    common = jax.tree.map(lambda g: g[None], state.gradients.common)
    return loss, aux, common, state.gradients.stacked

  sharded, replicated = PartitionSpec(stage_shift.AXIS), PartitionSpec()
  specs: Any = StageArrays(replicated, sharded)
  loss, aux, *totals = stage_shift.on_stages(
    on_stage,
    in_specs=(specs, specs, replicated),
    out_specs=(replicated, replicated, sharded, sharded),
  )(weights, constants, microbatches)
  return loss, aux, StageArrays(*totals)


class _Stage:
  """One stage, inside `shard_map`."""

  def __init__(
    self,
    pipeline: Pipeline,
    model: StagedModel,
    weights: StageArrays,
    constants: StageArrays,
    microbatches: Any,
  ):
    self._pipeline = pipeline
    self._model = model
    self._weights = weights
    self._constants = constants
    self._microbatches = microbatches
    self._index = jax.lax.axis_index(stage_shift.AXIS)
    self._tokens = StageTokens(num_stages=pipeline.stages, stage=self._index)

  def start(self) -> _State:
    """Returns the state before the first tick."""
    num_slots = self._pipeline.plan.num_slots
    microbatch = pytree_indexing.take(self._microbatches, 0)
    hidden, of_embedding = jax.eval_shape(lambda: self._embed(self._weights.common, microbatch))
    x = jnp.zeros(hidden.shape, hidden.dtype)
    (_, of_chunk), kept = jax.eval_shape(lambda: self._forward(x, microbatch, 0))
    of_loss = jax.eval_shape(lambda: self._aux_of_loss(x, microbatch))
    aux = jax.eval_shape(aux_losses.add, of_embedding, of_chunk)
    aux = jax.eval_shape(aux_losses.add, aux, of_loss)
    return _State(
      up=x,
      down=x,
      slots=jax.tree.map(lambda leaf: jnp.zeros((num_slots, *leaf.shape), leaf.dtype), kept),
      loss=jnp.zeros(()),
      aux=pytree_indexing.zeros(aux),
      gradients=jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._weights),
    )

  def tick(self, state: _State, halves: Phase) -> _State:
    """Returns the state after one tick; `halves` is its work, with arrays of int32 [S]."""
    S = self._pipeline.stages
    up, down = state.up, state.down
    if halves.forward is not None:
      state, y = self._forward_tick(state, halves.forward)
      up = stage_shift.upwards(y, S)
    if halves.backward is not None:
      if halves.forward is not None:
        slots, down = stage_shift.depend_on(
          (state.slots, down), up, halves.forward.microbatch[self._index]
        )
        state = state._replace(slots=slots, down=down)
      state, dx = self._backward_tick(state, halves.backward)
      down = stage_shift.downwards(dx, S)
    return state._replace(up=up, down=down)

  def _forward_tick(self, state: _State, half: Half) -> tuple[_State, jax.Array]:
    """Runs a forward chunk."""
    m, chunk, slot = (values[self._index] for values in half)
    microbatch = self._microbatch(m)
    state, x = self._chunk_input(state, half)
    (y, aux), kept = self._forward(x, microbatch, chunk)
    slots = jax.tree.map(lambda old, new: pytree_indexing.put(old, new, slot), state.slots, kept)
    aux = aux_losses.add(state.aux, pytree_indexing.where(m >= 0, aux))
    return state._replace(slots=slots, aux=aux), y

  def _backward_tick(self, state: _State, half: Half) -> tuple[_State, jax.Array]:
    """Runs a backward chunk."""
    m, chunk, slot = (values[self._index] for values in half)
    microbatch = self._microbatch(m)
    kept = pytree_indexing.take(state.slots, jnp.maximum(slot, 0))
    y, aux, vjp = self._restored_vjp(kept, state.up, microbatch, chunk)
    state, dy = self._loss(state, y, half)
    is_final = (self._index == self._pipeline.stages - 1) & (chunk == self._pipeline.chunks - 1)
    new, dx = vjp((jnp.where(is_final, dy, state.down), self._model.aux_cotangent(aux)))
    new = pytree_indexing.where(m >= 0, new)
    common, stacked = state.gradients
    common = self._model.combine(common, new.common)
    of_chunk = self._model.combine(self._of_chunk(stacked, chunk), new.stacked)
    stacked = self._with_chunk(stacked, of_chunk, chunk)
    common = self._add_embedding_gradients(common, dx, half)
    return state._replace(gradients=StageArrays(common, stacked)), dx

  def _chunk_input(self, state: _State, half: Half) -> tuple[_State, jax.Array]:
    """Returns (state, the input of this stage's forward chunk).

    It is what the previous stage has sent, or for the first chunk of stage 0 the embedding.
    """
    starts, microbatch = self._at_first_place(half)

    def work(aux: Aux) -> tuple[jax.Array, Aux]:
      x, new = self._embed(self._weights.common, microbatch)
      is_here = self._index == 0
      return jnp.where(is_here, x, state.up), aux_losses.add(aux, new.where(is_here))

    x, aux = jax.lax.cond(starts, work, lambda aux: (state.up, aux), state.aux)
    return state._replace(aux=aux), x

  def _add_embedding_gradients(self, common: Any, dx: jax.Array, half: Half) -> Any:
    """Returns the common gradients, with those of the embedding if stage 0 runs its first chunk.

    dx is then the cotangent of the embedding.
    """
    ends, microbatch = self._at_first_place(half)

    def work(common: Any) -> Any:
      embed = functools.partial(self._embed, microbatch=microbatch)
      (_, aux), vjp = jax.vjp(embed, self._weights.common)
      (new,) = vjp((dx, self._model.aux_cotangent(aux)))
      return self._model.combine(common, pytree_indexing.where(self._index == 0, new))

    return jax.lax.cond(ends, work, lambda common: common, common)

  def _at_first_place(self, half: Half) -> tuple[jax.Array, Any]:
    """Returns (whether stage 0 runs its first chunk, the microbatch of it): equal on all stages."""
    m = half.microbatch[0]
    return (m >= 0) & (half.chunk[0] == 0), self._microbatch(m)

  def _microbatch(self, m: jax.Array) -> Any:
    """Returns microbatch m; any one if m is negative, for an idle stage."""
    return pytree_indexing.take(self._microbatches, jnp.maximum(m, 0))

  def _embed(self, weights: Any, microbatch: Any) -> tuple[jax.Array, Aux]:
    return self._model.embed(weights, self._constants.common, microbatch)

  def _loss(self, state: _State, y: jax.Array, half: Half) -> tuple[_State, jax.Array]:
    """Returns (state, the cotangent of the last stage's y; 0 unless y is the model's output).

    The output projection and the loss are split over all stages, each with a shard of the tokens.
    Layers that compute further states need all tokens, and run on the last stage: the others
    compute values that are discarded.
    """
    last = self._pipeline.stages - 1
    m = half.microbatch[last]
    microbatch, is_here = self._microbatch(m), self._index == last

    def work(loss: jax.Array, aux: Aux, common: Any) -> tuple[jax.Array, Aux, Any, jax.Array]:
      (further, of_further), back = jax.vjp(
        lambda common, y: self._further(common, y, microbatch), self._weights.common, y
      )
      shards = [self._tokens.scattered(one) for one in (y, *further)]
      (value, of_loss), vjp = jax.vjp(
        lambda common, shards: self._shard_loss(common, shards, microbatch),
        self._weights.common,
        shards,
      )
      new, dx = vjp((jnp.ones_like(value), self._model.aux_cotangent(of_loss)))
      common = self._model.combine(common, new)
      dy, *of_states = (self._tokens.gathered(one, y.shape) for one in dx)
      if further:
        aux = aux_losses.add(aux, aux_losses.add(of_further.where(is_here), of_loss))
        new, more = back((of_states, self._model.aux_cotangent(of_further)))
        common = self._model.combine(common, pytree_indexing.where(is_here, new))
        dy = dy + more
      return loss + value, aux, common, dy

    def rest(loss: jax.Array, aux: Aux, common: Any) -> tuple[jax.Array, Aux, Any, jax.Array]:
      return loss, aux, common, jnp.zeros_like(y)

    is_final = (m >= 0) & (half.chunk[last] == self._pipeline.chunks - 1)
    given = state.loss, state.aux, state.gradients.common
    loss, aux, common, dy = jax.lax.cond(is_final, work, rest, *given)
    gradients = state.gradients._replace(common=common)
    return state._replace(loss=loss, aux=aux, gradients=gradients), dy

  def _further(self, common: Any, y: jax.Array, microbatch: Any) -> tuple[list[jax.Array], Aux]:
    return self._model.further(common, self._constants.common, y, microbatch)

  def _shard_loss(
    self, common: Any, shards: list[jax.Array], microbatch: Any
  ) -> tuple[jax.Array, Aux]:
    constants = self._constants.common
    return self._model.loss(common, constants, shards, microbatch, self._tokens.of)

  def _aux_of_loss(self, y: jax.Array, microbatch: Any) -> Aux:
    common = self._weights.common
    further, aux = self._further(common, y, microbatch)
    shards = [self._tokens.scattered(one) for one in (y, *further)]
    return aux_losses.add(aux, self._shard_loss(common, shards, microbatch)[1])

  def _run(
    self, weights: StageArrays, x: jax.Array, microbatch: Any, chunk: jax.Array | int
  ) -> tuple[jax.Array, Any]:
    stacked = self._of_chunk(self._constants.stacked, chunk)
    place = chunk * self._pipeline.stages + self._index
    constants = StageArrays(self._constants.common, stacked)
    return self._model.chunk(weights, constants, x, microbatch, place)

  def _vjp(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> tuple[Any, Any]:
    weights = self._weights_of(chunk)
    return jax.vjp(lambda weights, x: self._run(weights, x, microbatch, chunk), weights, x)

  def _forward(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> tuple[Any, Any]:
    """Returns ((y, Aux), residuals)."""
    if self._pipeline.recompute:
      return self._run(self._weights_of(chunk), x, microbatch, chunk), x
    output, vjp = self._vjp(x, microbatch, chunk)
    depends = self._depends(x, microbatch, chunk)
    leaves = jax.tree.leaves(vjp)
    kept = [leaf for leaf, is_kept in zip(leaves, depends, strict=True) if is_kept]
    return output, (kept, output[0])

  def _restored_vjp(
    self, kept: Any, x: jax.Array, microbatch: Any, chunk: jax.Array
  ) -> tuple[jax.Array, Any, Callable[[Any], Any]]:
    """Returns (y, an Aux, the vjp) of a chunk from `kept`, the residuals of its forward pass.

    x stands for the chunk's input: only its shape and that of the Aux matter.
    """
    if self._pipeline.recompute:
      (y, aux), vjp = self._vjp(kept, microbatch, chunk)
      return y, aux, vjp
    # Leaves that depend on x are replaced by stored ones, so XLA does not compute them.
    (_, aux), vjp = self._vjp(x, microbatch, chunk)
    leaves, tree = jax.tree.flatten(vjp)
    stored, y = kept
    depends = self._depends(x, microbatch, chunk)
    given = iter(stored)
    leaves = [next(given) if d else leaf for d, leaf in zip(depends, leaves, strict=True)]
    return y, aux, jax.tree.unflatten(tree, leaves)

  def _depends(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> list[bool]:
    """Returns for each leaf of the vjp whether it depends on x, rather than on weights alone."""
    program = jax.make_jaxpr(lambda x: jax.tree.leaves(self._vjp(x, microbatch, chunk)[1]))(x)
    return depends_on_inputs(program.jaxpr)

  def _weights_of(self, chunk: jax.Array | int) -> StageArrays:
    return StageArrays(self._weights.common, self._of_chunk(self._weights.stacked, chunk))

  def _of_chunk(self, stacked: Any, chunk: jax.Array | int) -> Any:
    """Returns a chunk's slice of a pytree of [layers, ...]."""
    if self._pipeline.chunks == 1:
      return stacked
    return jax.tree.map(
      lambda w: pytree_indexing.take(pytree_indexing.by_chunk(w, self._pipeline.chunks), chunk),
      stacked,
    )

  def _with_chunk(self, stacked: Any, of_chunk: Any, chunk: jax.Array) -> Any:
    """Returns a pytree of [layers, ...] with the slice of a chunk replaced."""
    if self._pipeline.chunks == 1:
      return of_chunk

    def replaced(w: jax.Array, new: jax.Array) -> jax.Array:
      by_chunk = pytree_indexing.by_chunk(w, self._pipeline.chunks)
      return jax.lax.dynamic_update_index_in_dim(by_chunk, new, chunk, 0).reshape(w.shape)

    return jax.tree.map(replaced, stacked, of_chunk)
