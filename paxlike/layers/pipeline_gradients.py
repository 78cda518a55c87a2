# SPDX-License-Identifier: Apache-2.0
"""The one executor that runs every schedule of a pipeline.

Each device of the mesh axis `pipeline` is a stage. A scan over ticks asks the schedule's table what
its stage does: a forward chunk, a backward chunk, or both. The gradient of a chunk is taken inside
its backward tick and added up in what the scan carries, so nothing is differentiated through the
scan, and what is stored is bounded by the schedule's slots, not by the number of microbatches. All
other mesh axes are the compiler's. A stage that has nothing to do computes what no one uses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.layers import ring
from paxlike.layers.dependence import depends_on_inputs
from paxlike.layers.pipeline import Pipeline
from paxlike.layers.schedules import Half, Phase


class Shares(NamedTuple):
  """Arrays of a model, by how stages hold them.

  Attributes:
    common: What every stage has whole.
    stacked: Pytree of [layers, ...], cut over stages; within one, chunk after chunk.
  """

  common: Any
  stacked: Any


class Model(Protocol):
  """What the executor runs. Weights are those of a chunk, constants are not differentiated."""

  def chunk(
    self, weights: Shares, constants: Shares, x: jax.Array, microbatch: Any, place: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Returns (x after the layers of a place, what these report); place 0 ignores the x it gets."""
    ...

  def loss(
    self,
    weights: Any,
    constants: Any,
    x: jax.Array,
    microbatch: Any,
    share: Callable[[jax.Array], jax.Array],
  ) -> jax.Array:
    """Returns the loss of those tokens of a microbatch that are this stage's share.

    Weights and constants are those that stages have in common. x is [b, T / S, D], the activations
    of what `share` returns of [b, T, ...].
    """
    ...

  def combine(self, total: Shares, new: Shares) -> Shares:
    """Returns the gradients of weights, float32, with those of one more chunk."""
    ...

  def reports(self, reports: Any) -> Any:
    """Returns the derivatives of the loss by what the layers report."""
    ...


class _State(NamedTuple):
  """What a stage carries from tick to tick."""

  up: jax.Array  # Activations that came from the stage below, [b, T, D].
  down: jax.Array  # The loss's gradient by those, from the stage above.
  slots: Any  # Pytree of [slots, ...].
  loss: jax.Array
  reports: Any
  gradients: Shares


def gradients(
  pipeline: Pipeline,
  model: Model,
  weights: Shares,
  constants: Shares,
  microbatches: Any,
  hidden: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, Any, Shares]:
  """Returns (the sum of losses, the sums of reports, gradients of the sum) of the microbatches.

  Args:
    pipeline: What its `plan` says is run.
    model: See there.
    weights: Differentiated.
    constants: What else `model` needs.
    microbatches: A pytree of [M, ...].
    hidden: What activations are like, [b, T, D].

  Returns:
    Gradients of common weights have a leading dim S: they are for the caller to combine.
  """

  def on_stage(weights: Shares, constants: Shares, microbatches: Any) -> tuple[Any, Any, Any, Any]:
    stage = _Stage(pipeline, model, weights, constants, microbatches)
    state = stage.start(hidden)
    for phase in pipeline.plan.phases(keeps_first=not pipeline.recompute):
      state, _ = jax.lax.scan(lambda state, row: (stage.tick(state, row), None), state, phase)
    loss, reports = jax.lax.psum((state.loss, state.reports), ring.AXIS)
    common = jax.tree.map(lambda g: g[None], state.gradients.common)
    return loss, reports, common, state.gradients.stacked

  cut, whole = PartitionSpec(ring.AXIS), PartitionSpec()
  of_shares: Any = Shares(whole, cut)
  loss, reports, *totals = ring.on_stages(
    on_stage,
    in_specs=(of_shares, of_shares, whole),
    out_specs=(whole, whole, cut, cut),
  )(weights, constants, microbatches)
  return loss, reports, Shares(*totals)


class _Stage:
  """One device of the axis, inside `shard_map`."""

  def __init__(
    self, pipeline: Pipeline, model: Model, weights: Shares, constants: Shares, microbatches: Any
  ):
    self._pipeline = pipeline
    self._model = model
    self._weights = weights
    self._constants = constants
    self._microbatches = microbatches
    self._index = jax.lax.axis_index(ring.AXIS)

  def start(self, hidden: jax.ShapeDtypeStruct) -> _State:
    """Returns the state before the first tick."""
    x = jnp.zeros(hidden.shape, hidden.dtype)
    num_slots = self._pipeline.plan.num_slots(keeps_first=not self._pipeline.recompute)
    (_, reports), kept = jax.eval_shape(
      lambda: self._forward(x, ring.take(self._microbatches, 0), 0)
    )
    return _State(
      up=x,
      down=x,
      slots=jax.tree.map(lambda leaf: jnp.zeros((num_slots, *leaf.shape), leaf.dtype), kept),
      loss=jnp.zeros(()),
      reports=ring.zeros(reports),
      gradients=jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self._weights),
    )

  def tick(self, state: _State, row: Phase) -> _State:
    """Returns the state one tick later."""
    S = self._pipeline.stages
    up, down = state.up, state.down
    if row.forward is not None:
      state, y = self._ahead(state, row.forward)
      up = ring.upwards(y, S)
    if row.backward is not None:
      if row.forward is not None:
        slots, down = ring.after((state.slots, down), up, row.forward.microbatch[self._index])
        state = state._replace(slots=slots, down=down)
      state, dx = self._back(state, row.backward)
      down = ring.downwards(dx, S)
    return state._replace(up=up, down=down)

  def _ahead(self, state: _State, half: Half) -> tuple[_State, jax.Array]:
    """Runs a forward chunk."""
    m, chunk, slot = (values[self._index] for values in half)
    microbatch = ring.take(self._microbatches, jnp.maximum(m, 0))
    (y, reports), kept = self._forward(state.up, microbatch, chunk)
    slots = jax.tree.map(lambda old, new: ring.put(old, new, slot), state.slots, kept)
    reports = jax.tree.map(jnp.add, state.reports, ring.only_if(m >= 0, reports))
    return state._replace(slots=slots, reports=reports), y

  def _back(self, state: _State, half: Half) -> tuple[_State, jax.Array]:
    """Runs a backward chunk."""
    m, chunk, slot = (values[self._index] for values in half)
    microbatch = ring.take(self._microbatches, jnp.maximum(m, 0))
    kept = ring.take(state.slots, jnp.maximum(slot, 0))
    y, reports, pull_back = self._again(kept, state.up, microbatch, chunk)
    state, dy = self._loss(state, y, half)
    is_final = (self._index == self._pipeline.stages - 1) & (chunk == self._pipeline.chunks - 1)
    new, dx = pull_back((jnp.where(is_final, dy, state.down), self._model.reports(reports)))
    old = Shares(state.gradients.common, self._of_chunk(state.gradients.stacked, chunk))
    total = self._model.combine(old, ring.only_if(m >= 0, new))
    stacked = jax.tree.map(
      lambda whole, part: self._with_chunk(whole, part, chunk),
      state.gradients.stacked,
      total.stacked,
    )
    return state._replace(gradients=Shares(total.common, stacked)), dx

  def _loss(self, state: _State, y: jax.Array, half: Half) -> tuple[_State, jax.Array]:
    """Returns the gradient by what the last stage has at the end of the model, if it has that.

    Every stage has a share of the tokens, and the common weights to go on with.
    """
    S, last = self._pipeline.stages, self._pipeline.stages - 1
    m = half.microbatch[last]
    microbatch = ring.take(self._microbatches, jnp.maximum(m, 0))

    def work(loss: jax.Array, common: Any) -> tuple[jax.Array, Any, jax.Array]:
      # Only the last stage adds other than zeros.
      own = _by_stage(ring.only_if(self._index == last, y), S)
      x = jax.lax.psum_scatter(own, ring.AXIS, scatter_dimension=2)

      def of_share(common: Any, x: jax.Array) -> jax.Array:
        constants = self._constants.common
        return self._model.loss(common, constants, x, microbatch, self._share)

      value, (new, dx) = jax.value_and_grad(of_share, (0, 1))(self._weights.common, x)
      total = self._model.combine(Shares(common, {}), Shares(new, {})).common
      dy = jax.lax.all_gather(dx, ring.AXIS, axis=2)
      return loss + value, total, dy.reshape(y.shape[0], -1, y.shape[2])[:, : y.shape[1]]

    def rest(loss: jax.Array, common: Any) -> tuple[jax.Array, Any, jax.Array]:
      return loss, common, jnp.zeros_like(y)

    is_final = (m >= 0) & (half.chunk[last] == self._pipeline.chunks - 1)
    # All stages take the same branch, as collectives ask.
    loss, common, dy = jax.lax.cond(is_final, work, rest, state.loss, state.gradients.common)
    return state._replace(loss=loss, gradients=state.gradients._replace(common=common)), dy

  def _share(self, x: jax.Array) -> jax.Array:
    """Returns every S-th token of [b, T, ...], from this stage's on; those beyond T are zeros."""
    return _by_stage(x, self._pipeline.stages)[:, :, self._index]

  def _run(
    self, weights: Shares, x: jax.Array, microbatch: Any, chunk: jax.Array | int
  ) -> tuple[jax.Array, Any]:
    stacked = self._of_chunk(self._constants.stacked, chunk)
    place = chunk * self._pipeline.stages + self._index
    constants = Shares(self._constants.common, stacked)
    return self._model.chunk(weights, constants, x, microbatch, place)

  def _pulled(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> tuple[Any, Any]:
    weights = self._weights_of(chunk)
    return jax.vjp(lambda weights, x: self._run(weights, x, microbatch, chunk), weights, x)

  def _forward(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> tuple[Any, Any]:
    """Returns ((y, reports), what is kept to go back)."""
    if self._pipeline.recompute:
      return self._run(self._weights_of(chunk), x, microbatch, chunk), x
    output, pull_back = self._pulled(x, microbatch, chunk)
    depends = self._depends(x, microbatch, chunk)
    leaves = jax.tree.leaves(pull_back)
    kept = [leaf for leaf, is_kept in zip(leaves, depends, strict=True) if is_kept]
    return output, (kept, output[0])

  def _again(
    self, kept: Any, x: jax.Array, microbatch: Any, chunk: jax.Array
  ) -> tuple[jax.Array, Any, Callable[[Any], Any]]:
    """Returns (y, reports like these, the way back) from what was kept; x is like the input."""
    if self._pipeline.recompute:
      (y, reports), pull_back = self._pulled(kept, microbatch, chunk)
      return y, reports, pull_back
    # Of this only what does not depend on x is used, and computed.
    (_, reports), pull_back = self._pulled(x, microbatch, chunk)
    leaves, tree = jax.tree.flatten(pull_back)
    stored, y = kept
    depends = self._depends(x, microbatch, chunk)
    given = iter(stored)
    leaves = [next(given) if d else leaf for d, leaf in zip(depends, leaves, strict=True)]
    return y, reports, jax.tree.unflatten(tree, leaves)

  def _depends(self, x: jax.Array, microbatch: Any, chunk: jax.Array | int) -> list[bool]:
    """Which leaves of the way back depend on x: not weights, nor what is made of those alone."""
    program = jax.make_jaxpr(lambda x: jax.tree.leaves(self._pulled(x, microbatch, chunk)[1]))(x)
    return depends_on_inputs(program.jaxpr)

  def _weights_of(self, chunk: jax.Array | int) -> Shares:
    return Shares(self._weights.common, self._of_chunk(self._weights.stacked, chunk))

  def _of_chunk(self, stacked: Any, chunk: jax.Array | int) -> Any:
    """Returns a chunk's part of pytrees of [layers, ...]."""
    if self._pipeline.chunks == 1:
      return stacked
    return jax.tree.map(
      lambda w: ring.take(ring.by_chunk(w, self._pipeline.chunks), chunk), stacked
    )

  def _with_chunk(self, stacked: jax.Array, part: jax.Array, chunk: jax.Array) -> jax.Array:
    if self._pipeline.chunks == 1:
      return part
    by_chunk = ring.by_chunk(stacked, self._pipeline.chunks)
    return jax.lax.dynamic_update_index_in_dim(by_chunk, part, chunk, 0).reshape(stacked.shape)


def _by_stage(x: jax.Array, num_stages: int) -> jax.Array:
  length = -(-x.shape[1] // num_stages) * num_stages
  x = jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
  return x.reshape(x.shape[0], length // num_stages, num_stages, *x.shape[2:])
