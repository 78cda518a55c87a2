# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model and its gradients on a pipeline of stages."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.layers.auxiliary import Aux, add
from paxlike.layers.block import by_token
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline import executor
from paxlike.layers.pipeline.executor import StageArrays
from paxlike.layers.pipeline.spec import Pipeline, split_microbatches
from paxlike.layers.stack import layout_of

# Weights by name: trained weights, and non-trainable state.
Differentiated = tuple[Params, Params]


def pipeline_of(definition: Definition) -> Pipeline | None:
  """Returns the pipeline of a model, if it has one."""
  return definition.module.stack.pipeline  # pyright: ignore[reportAttributeAccessIssue]


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


class Part(NamedTuple):
  """Gradient-accumulation microbatch `index` of `count`."""

  batch: Batch
  index: int | jax.Array
  count: int


def gradients(
  definition: Definition,
  weights: Differentiated,
  constants: tuple[Params, Mapping[str, Any]],
  part: Part,
  *,
  loss_weight: jax.Array,
  dropout: jax.Array,
) -> tuple[jax.Array, Aux, Differentiated]:
  """Returns (loss, Aux, gradients of the loss plus auxiliary losses) of a part of a batch.

  Auxiliary losses are means over the microbatches.

  Args:
    definition: Of a `Decoder` with a pipeline.
    weights: Prepared weights.
    constants: The frozen weights, and the quantized weights of low-precision matmuls.
    part: Its sequences are split into M pipeline microbatches.
    loss_weight: Factor of the summed cross-entropy.
    dropout: Dropout key of the step.
  """
  how = pipeline_of(definition)
  assert how is not None
  split = _Splitter(definition)
  batches = split_microbatches(part.batch, how.microbatches)
  batches = {name: mesh.constrain(x, None, "batch", "time") for name, x in batches.items()}
  first = {name: x[0] for name, x in batches.items()}
  numbers = part.index + part.count * jnp.arange(how.microbatches)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(dropout, numbers)
  model = definition.bind({**constants[0], **weights[0], **weights[1]}, constants[1])
  loss, reports, grads = executor.gradients(
    how,
    _Decoder(definition, how, loss_weight, 1 / (part.count * how.microbatches)),
    StageArrays(*zip(*map(split, weights), strict=True)),
    StageArrays(*zip(*map(split, constants), strict=True)),
    (batches, keys),
    jax.eval_shape(lambda: model.embed(first["inputs"], context_of(first))),
  )
  sums = {name: x.sum(0) for name, x in grads.common[0].items()} | grads.stacked[0]
  largest = {name: x.max(0) for name, x in grads.common[1].items()} | grads.stacked[1]
  return loss, reports.averaged(how.microbatches), (sums, largest)


class _Splitter:
  """Splits a dict keyed by weight name into common and stacked entries."""

  def __init__(self, definition: Definition):
    self._layout = layout_of(definition.module)

  def __call__(self, values: Mapping[str, Any]) -> StageArrays:
    arrays = StageArrays({}, {})
    for name, value in values.items():
      location = self._layout.locate(name)
      stacked = location is not None and location.stacked
      (arrays.stacked if stacked else arrays.common)[name] = value
    return arrays


@dataclasses.dataclass(frozen=True)
class _Decoder:
  """A decoder as an `executor.Model`.

  Weights are (trained, non-trainable state), constants (frozen, rounded), by name.
  """

  definition: Definition
  pipeline: Pipeline
  loss_weight: jax.Array
  aux_weight: float

  def _bind(self, *arrays: Any) -> Any:
    named = [weights for trained, extra in arrays[::2] for weights in (trained, extra)]
    named += [frozen for frozen, _ in arrays[1::2]]
    rounded = [quantized for _, quantized in arrays[1::2]]
    unused = {n: jax.ShapeDtypeStruct(w.shape, w.dtype) for n, w in self.definition.weights.items()}
    return self.definition.bind(_merged([unused, *named]), _merged(rounded))

  def chunk(
    self,
    weights: StageArrays,
    constants: StageArrays,
    x: jax.Array,
    microbatch: Any,
    place: jax.Array,
  ) -> tuple[jax.Array, Aux]:
    batch, key = microbatch
    is_first, is_last = place == 0, place == self.pipeline.num_places - 1
    common = tuple(_without_unused(is_first, is_last, arrays) for arrays in weights.common)
    model = self._bind(common, constants.common, weights.stacked, constants.stacked)
    context = context_of(batch, key)
    first_BTD, _, before = model.stack.before(
      model.embed(batch["inputs"], context), context.fold(1)
    )
    x_BTD, aux = model.stack.chunk(jnp.where(is_first, first_BTD, x), context.fold(1), place)
    last_BTD, _, after = model.stack.after(x_BTD, context.fold(1))
    aux = add(aux, add(before.where(is_first), after.where(is_last)))
    return jnp.where(is_last, last_BTD, x_BTD), aux

  def loss(
    self,
    weights: Differentiated,
    constants: Any,
    x: jax.Array,
    microbatch: Any,
    shard: Callable[[jax.Array], jax.Array],
  ) -> jax.Array:
    batch, _ = microbatch
    model = self._bind(weights, constants)
    x_BTD = by_token(model.norm, x)
    loss = model.token_loss(x_BTD, shard(batch["targets"]), shard(batch["weights"]))
    return loss * self.loss_weight

  def combine(self, total: StageArrays, new: StageArrays) -> StageArrays:
    def pinned(name: str, value: jax.Array) -> jax.Array:
      dims = self.definition.weights[name].dims
      return mesh.constrain(value, *(None if dim == "layer" else dim for dim in dims))

    def combined(old: Any, new: Any) -> Any:
      sums, largest = (
        {n: pinned(n, of(x, given[n].astype(jnp.float32))) for n, x in was.items()}
        for of, was, given in zip((jnp.add, jnp.maximum), old, new, strict=True)
      )
      return sums, largest

    return StageArrays(*(combined(a, b) if a else a for a, b in zip(total, new, strict=True)))

  def reports(self, reports: Aux) -> Aux:
    losses = jax.tree.map(lambda x: jnp.full_like(x, self.aux_weight), reports.losses)
    return Aux(losses, jax.tree.map(jnp.zeros_like, reports.metrics))


def _without_unused(is_first: jax.Array, is_last: jax.Array, weights: Params) -> Params:
  """Stops gradients of prologue and epilogue weights on virtual stages that discard their outputs.

  Every virtual stage computes prologue and epilogue, and some layers' "gradients" (amax, expert
  load) do not depend on whether the output is used.
  """

  def stopped(name: str, w: Any) -> Any:
    if ".prologue." not in name and ".epilogue." not in name:
      return w
    is_used = is_first if ".prologue." in name else is_last
    return jax.tree.map(lambda x: jnp.where(is_used, x, jax.lax.stop_gradient(x)), w)

  return {name: stopped(name, w) for name, w in weights.items()}


def _merged(dicts: Any) -> dict[str, Any]:
  return {name: value for one in dicts for name, value in one.items()}
