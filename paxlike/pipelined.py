# SPDX-License-Identifier: Apache-2.0
"""The loss of a language model and its gradients, through a pipeline of stages."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike import mesh
from paxlike.errors import UserError
from paxlike.layers import pipeline_gradients
from paxlike.layers.block import Aux, by_token
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Definition, Params
from paxlike.layers.pipeline import Pipeline, split_rows
from paxlike.layers.pipeline_gradients import Shares
from paxlike.layers.stack import add, layout_of, mean_losses

# Weights by name: those that an optimizer trains, and what layers notice.
Differentiated = tuple[Params, Params]


def pipeline_of(definition: Definition) -> Pipeline | None:
  """Returns how the layers of a model are spread over stages, if they are."""
  return definition.module.stack.pipeline  # pyright: ignore[reportAttributeAccessIssue]


def check(definition: Definition, devices: jax.sharding.Mesh) -> int:
  """Returns in how many parts a batch goes through the stages; 1 if there are none.

  Raises:
    UserError: The mesh has other stages.
  """
  how, size = pipeline_of(definition), devices.shape["pipeline"]
  if how is None and size == 1:
    return 1
  if how is None or how.stages != size:
    raise UserError(
      f"the mesh has {size} stages (axis pipeline), the model {1 if how is None else how.stages}:"
      " set them by ICI_MESH_SHAPE, DCN_MESH_SHAPE and NUM_STAGES; USE_REPEATED_LAYER and the"
      " fiddlers stack and decoding take them away."
    )
  return how.microbatches


class Part(NamedTuple):
  """One of `count` parts of a batch that are computed one after another."""

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
  """Returns the loss of a part of a batch, what layers report, and the gradients of all losses.

  Losses of layers are means over the microbatches.

  Args:
    definition: Of a `Decoder` with a pipeline.
    weights: Prepared.
    constants: The other weights, and what layers multiply with in the place of weights.
    part: Its rows go through the stages in M microbatches.
    loss_weight: By it the sum of the cross-entropies is multiplied.
    dropout: The key of the batch.
  """
  how = pipeline_of(definition)
  assert how is not None
  split = _Splitter(definition)
  batches = split_rows(part.batch, how.microbatches)
  batches = {name: mesh.constrain(x, None, "batch", "time") for name, x in batches.items()}
  first = {name: x[0] for name, x in batches.items()}
  numbers = part.index + part.count * jnp.arange(how.microbatches)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(dropout, numbers)
  model = definition.bind({**constants[0], **weights[0], **weights[1]}, constants[1])
  loss, reports, grads = pipeline_gradients.gradients(
    how,
    _Decoder(definition, how, loss_weight, 1 / (part.count * how.microbatches)),
    Shares(*zip(*map(split, weights), strict=True)),
    Shares(*zip(*map(split, constants), strict=True)),
    (batches, keys),
    jax.eval_shape(lambda: model.embed(first["inputs"], context_of(first))),
  )
  sums = {name: x.sum(0) for name, x in grads.common[0].items()} | grads.stacked[0]
  largest = {name: x.max(0) for name, x in grads.common[1].items()} | grads.stacked[1]
  return loss, mean_losses(reports, how.microbatches), (sums, largest)


class _Splitter:
  """Parts what is known by the names of weights: of all stages, and of the layers of some."""

  def __init__(self, definition: Definition):
    self._layout = layout_of(definition.module)

  def __call__(self, values: Mapping[str, Any]) -> Shares:
    shares = Shares({}, {})
    for name, value in values.items():
      location = self._layout.locate(name)
      stacked = location is not None and location.stacked
      (shares.stacked if stacked else shares.common)[name] = value
    return shares


@dataclasses.dataclass(frozen=True)
class _Decoder:
  """A decoder as what a pipeline runs: `pipeline_gradients.Model`.

  Weights are (trained, what layers notice), constants (frozen, rounded), by name.
  """

  definition: Definition
  pipeline: Pipeline
  loss_weight: jax.Array
  aux_weight: float

  def _bind(self, *shares: Any) -> Any:
    named = [weights for trained, noticed in shares[::2] for weights in (trained, noticed)]
    named += [frozen for frozen, _ in shares[1::2]]
    rounded = [small for _, small in shares[1::2]]
    unused = {n: jax.ShapeDtypeStruct(w.shape, w.dtype) for n, w in self.definition.weights.items()}
    return self.definition.bind(_merged([unused, *named]), _merged(rounded))

  def chunk(
    self, weights: Shares, constants: Shares, x: jax.Array, microbatch: Any, place: jax.Array
  ) -> tuple[jax.Array, Aux]:
    batch, key = microbatch
    is_first, is_last = place == 0, place == self.pipeline.num_places - 1
    common = tuple(_seen_at(is_first, is_last, shares) for shares in weights.common)
    model = self._bind(common, constants.common, weights.stacked, constants.stacked)
    context = context_of(batch, key)
    first_BTD, _, before = model.stack.before(
      model.embed(batch["inputs"], context), context.fold(1)
    )
    x_BTD, aux = model.stack.chunk(jnp.where(is_first, first_BTD, x), context.fold(1), place)
    last_BTD, _, after = model.stack.after(x_BTD, context.fold(1))
    aux = add(aux, add(_where(is_first, before), _where(is_last, after)))
    return jnp.where(is_last, last_BTD, x_BTD), aux

  def loss(
    self,
    weights: Differentiated,
    constants: Any,
    x: jax.Array,
    microbatch: Any,
    share: Callable[[jax.Array], jax.Array],
  ) -> jax.Array:
    batch, _ = microbatch
    model = self._bind(weights, constants)
    x_BTD = by_token(model.norm, x)
    loss = model.token_loss(x_BTD, share(batch["targets"]), share(batch["weights"]))
    return loss * self.loss_weight

  def combine(self, total: Shares, new: Shares) -> Shares:
    def pinned(name: str, value: jax.Array) -> jax.Array:
      dims = self.definition.weights[name].dims
      return mesh.constrain(value, *(None if dim == "layer" else dim for dim in dims))

    def combined(old: Any, new: Any) -> Any:
      sums, largest = (
        {n: pinned(n, of(x, given[n].astype(jnp.float32))) for n, x in was.items()}
        for of, was, given in zip((jnp.add, jnp.maximum), old, new, strict=True)
      )
      return sums, largest

    return Shares(*(combined(a, b) if a else a for a, b in zip(total, new, strict=True)))

  def reports(self, reports: Aux) -> Aux:
    weights = {name: self.aux_weight if name.endswith("_loss") else 0 for name in reports}
    return {name: jnp.full_like(x, weights[name]) for name, x in reports.items()}


def _seen_at(is_first: jax.Array, is_last: jax.Array, weights: Params) -> Params:
  """Returns weights that only those places give gradients whose layers are of the model.

  Some layers give such as do not depend on what comes of them: all compute what is before the
  pipeline and after it.
  """

  def seen(name: str, w: Any) -> Any:
    if ".prologue." not in name and ".epilogue." not in name:
      return w
    is_seen = is_first if ".prologue." in name else is_last
    return jax.tree.map(lambda x: jnp.where(is_seen, x, jax.lax.stop_gradient(x)), w)

  return {name: seen(name, w) for name, w in weights.items()}


def _where(condition: jax.Array, aux: Aux) -> Aux:
  return {name: jnp.where(condition, x, jnp.zeros_like(x)) for name, x in aux.items()}


def _merged(dicts: Any) -> dict[str, Any]:
  return {name: value for one in dicts for name, value in one.items()}
