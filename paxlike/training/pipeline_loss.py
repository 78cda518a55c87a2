# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model and its gradients on a pipeline of stages."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.layers.aux_losses import Aux, add
from paxlike.layers.block import by_token
from paxlike.layers.decoder import context_of
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline import executor
from paxlike.layers.pipeline.spec import Pipeline, split_microbatches
from paxlike.layers.pipeline.staged_model import StageArrays
from paxlike.layers.stack import Stack
from paxlike.training.gradients import Constants, Differentiated, Microbatch


def pipeline_of(definition: Definition) -> Pipeline | None:
  """Returns the pipeline of a model, if it has one."""
  return _stack(definition).pipeline


def _stack(definition: Definition) -> Stack:
  return definition.module.stack  # pyright: ignore[reportAttributeAccessIssue]


def check(definition: Definition, devices: jax.sharding.Mesh) -> int:
  """Returns the number of pipeline microbatches; 1 without a pipeline.

  Raises:
    UserError: The mesh has a different number of stages.
  """
  how, size = pipeline_of(definition), devices.shape["pipeline"]
  if how is None and size == 1:
    return 1
  if how is None or how.stages != size:
    raise UserError(
      f"the mesh has {size} stages (axis pipeline), the model {1 if how is None else how.stages}:"
      " set them by ICI_MESH_SHAPE, DCN_MESH_SHAPE and NUM_STAGES; the fiddlers stack(scan=False)"
      " and decoding remove those of the model."
    )
  return how.microbatches


def gradients(
  definition: Definition,
  weights: Differentiated,
  constants: Constants,
  microbatch: Microbatch,
  *,
  log_layers: bool = False,
) -> tuple[Differentiated, Aux]:
  """Returns (gradients of the loss plus auxiliary losses, losses and metrics) of a microbatch.

  Its sequences are split into M pipeline microbatches, over which auxiliary losses are averaged.

  Args:
    definition: The definition of a `Decoder` with a pipeline.
    weights: The weights to differentiate, after `Definition.prepare`.
    constants: The other weights; those of the reference model are not used.
    microbatch: A gradient-accumulation microbatch.
    log_layers: See `Context`.
  """
  how = pipeline_of(definition)
  assert how is not None
  batches = split_microbatches(microbatch.batch, how.microbatches)
  batches = {name: mesh.constrain(x, None, "batch", "time") for name, x in batches.items()}
  numbers = microbatch.index + microbatch.count * jnp.arange(how.microbatches)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(microbatch.dropout, numbers)
  locations = {name: _stack(definition).layout.locate(name) for name in definition.weights}
  decoder = _Decoder(
    definition=definition,
    pipeline=how,
    sections={name: location.section for name, location in locations.items() if location},
    loss_weight=1 / microbatch.weight,
    aux_weight=1 / (microbatch.count * how.microbatches),
    log_layers=log_layers,
  )
  loss, aux, grads = executor.gradients(
    how,
    decoder,
    decoder.split(weights),
    decoder.split(constants),
    (batches, keys),
  )
  trained = {name: x.sum(0) for name, x in grads.common.trained.items()}
  extra = {name: x.max(0) for name, x in grads.common.extra.items()}
  losses = aux.averaged(how.microbatches).averaged(microbatch.count).losses
  return (
    Differentiated(trained | grads.stacked.trained, extra | grads.stacked.extra),
    aux._replace(losses={"loss": loss} | losses),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decoder:
  """A decoder as an `executor.StagedModel`; weights are `Differentiated`, constants `Constants`.

  Attributes:
    definition: The definition of the decoder.
    pipeline: Its pipeline.
    sections: Name -> section, of each weight of the stack; see `stack_layout.Location`.
    loss_weight: Factor of the summed cross-entropy, and of `Aux.summed`.
    aux_weight: Factor of the auxiliary losses.
    log_layers: See `Context`.
  """

  definition: Definition
  pipeline: Pipeline
  sections: Mapping[str, str]
  loss_weight: jax.Array
  aux_weight: float
  log_layers: bool

  def split(self, weights: Differentiated | Constants) -> StageArrays:
    """Separates the stacked weights from those that are common to all stages."""
    make: Any = type(weights)
    stacked = {name for name, section in self.sections.items() if section == "pattern"}
    return StageArrays(
      common=make(*({n: w for n, w in one.items() if n not in stacked} for one in weights)),
      stacked=make(*({n: w for n, w in one.items() if n in stacked} for one in weights)),
    )

  def bind(self, weights: Differentiated, constants: Constants) -> Any:
    """Returns the decoder with these weights; others are abstract."""
    unused = {n: jax.ShapeDtypeStruct(w.shape, w.dtype) for n, w in self.definition.weights.items()}
    params = unused | weights.trained | weights.extra | constants.frozen
    model = self.definition.bind(params, constants.operands)
    model.stack.log_layers = self.log_layers
    return model

  def embed(
    self, weights: Differentiated, constants: Constants, microbatch: Any
  ) -> tuple[jax.Array, Aux]:
    batch, key = microbatch
    model, context = self.bind(weights, constants), context_of(batch, key)
    x_BTD = model.embed(batch["inputs"], context)
    x_BTD, _, aux = model.stack.before(x_BTD, context.fold(1))
    return x_BTD, aux

  def chunk(
    self,
    weights: StageArrays,
    constants: StageArrays,
    x: jax.Array,
    microbatch: Any,
    place: jax.Array,
  ) -> tuple[jax.Array, Aux]:
    batch, key = microbatch
    is_last = place == self.pipeline.num_places - 1
    used = weights._replace(common=self._without_unused(weights.common, is_last))
    model = self.bind(_joined(used), _joined(constants))
    context = context_of(batch, key).fold(1)
    x_BTD, aux = model.stack.chunk(x, context, place)
    last_BTD, _, after = model.stack.after(x_BTD, context)
    return jnp.where(is_last, last_BTD, x_BTD), add(aux, after.where(is_last))

  def further(
    self, weights: Differentiated, constants: Constants, x: jax.Array, microbatch: Any
  ) -> tuple[list[jax.Array], Aux]:
    batch, key = microbatch
    return self.bind(weights, constants).further(x, batch, context_of(batch, key))

  def loss(
    self,
    weights: Differentiated,
    constants: Constants,
    states: Sequence[jax.Array],
    microbatch: Any,
    shard: Callable[[jax.Array], jax.Array],
  ) -> tuple[jax.Array, Aux]:
    batch, _ = microbatch
    model = self.bind(weights, constants)
    x, *further = states
    x_BTD = by_token(model.norm, x)
    loss = model.token_loss(x_BTD, shard(batch["targets"]), shard(batch["weights"]))
    return loss * self.loss_weight, model.further_losses(further, batch, shard=shard)

  def combine(self, total: Differentiated, new: Differentiated) -> Differentiated:
    def combined(of: Any, total: Params, new: Params) -> Params:
      return {n: self._pinned(n, of(x, new[n].astype(jnp.float32))) for n, x in total.items()}

    trained = combined(jnp.add, total.trained, new.trained)
    return Differentiated(trained, combined(jnp.maximum, total.extra, new.extra))

  def aux_cotangent(self, aux: Aux) -> Aux:
    losses = jax.tree.map(lambda x: jnp.full_like(x, self.aux_weight), aux.losses)
    summed = jax.tree.map(lambda x: jnp.full_like(x, self.loss_weight), aux.summed)
    return jax.tree.map(jnp.zeros_like, aux)._replace(losses=losses, summed=summed)

  def _pinned(self, name: str, gradient: jax.Array) -> jax.Array:
    """Returns a gradient, sharded as its weight over all axes but `pipeline`."""
    dims = self.definition.weights[name].dims
    return mesh.constrain(gradient, *(None if dim == "layer" else dim for dim in dims))

  def _without_unused(self, weights: Differentiated, is_last: jax.Array) -> Differentiated:
    """Stops gradients of the epilogue's weights on stages that discard its outputs.

    Every virtual stage computes the epilogue, and some layers' "gradients" (amax, expert load) do
    not depend on whether the output is used.
    """

    def stopped(name: str, w: jax.Array) -> jax.Array:
      if self.sections.get(name) != "epilogue":
        return w
      return jnp.where(is_last, w, jax.lax.stop_gradient(w))

    return Differentiated(*({n: stopped(n, w) for n, w in one.items()} for one in weights))


def _joined(arrays: StageArrays) -> Any:
  """Returns the common and the stacked weights as one `Differentiated` or `Constants`."""
  groups = zip(arrays.common, arrays.stacked, strict=True)
  return type(arrays.common)(*(common | stacked for common, stacked in groups))
