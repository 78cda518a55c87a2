# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks, unrolled, scanned or pipelined: three layouts of the same parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike import ranges, topology
from paxlike.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.block import Aux, Block
from paxlike.layers.context import Context
from paxlike.layers.layout import Layout
from paxlike.layers.module import Module
from paxlike.layers.pipeline import Pipeline, forward, split_rows
from paxlike.layers.remat import Remat

BlockFactory = Callable[[int], Block]
# Part of the stack -> the caches of its layers; those of a pattern stacked as its weights are.
Caches = dict[str, list[Any]]


@configurable
class Stack(Module):
  """`prologue + pattern * repeats + epilogue` blocks, one after the other.

  Attributes:
    layout: Where each layer's weights are found.
    remat: Applied block by block.
    pipeline: How repeats are spread over stages; prologue and epilogue are all stages'.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    pattern: Sequence[BlockFactory],
    repeats: ranges.Repeats,
    prologue: Sequence[BlockFactory] = (),
    epilogue: Sequence[BlockFactory] = (),
    scan: bool | None = None,
    remat: Remat = Remat.SAVE_EVERYTHING,
    pipeline: Pipeline | None = None,
  ):
    """Scans over the repeats if `scan`; None: if programs are for more than one device.

    Unrolled is faster on one; on many, scanning keeps the program small.

    Raises:
      UserError: There is no layer, or the stages cannot share the repeats.
    """
    if not pattern:
      raise UserError("pattern=[] of a Stack: expected a list of a layer or more.")
    if not (repeats or prologue or epilogue):
      raise UserError(f"model.stack.{repeats=} makes a model of no layers: at least 1 is needed.")
    scan = len(topology.devices()) > 1 if scan is None else scan
    self.remat = remat
    self.pipeline = pipeline
    self.layout = Layout(
      scanned=scan,
      prologue=len(prologue),
      pattern=len(pattern),
      repeats=repeats,
      epilogue=len(epilogue),
    )
    if pipeline is not None:
      self.layout = pipeline.spread(self.layout)
    if scan:
      self.prologue = nnx.List([block(dim) for block in prologue])
      self.pattern = nnx.List([_stacked(block(dim), repeats) for block in pattern])
      self.epilogue = nnx.List([block(dim) for block in epilogue])
    else:
      factories = [*prologue, *(list(pattern) * repeats), *epilogue]
      self.layers = nnx.List([block(dim) for block in factories])

  def __call__(
    self, x_BTD: jax.Array, context: Context, caches: Caches | None = None
  ) -> tuple[jax.Array, Caches | None, Aux]:
    """Returns (x_BTD, the caches with these tokens, what the layers report)."""
    given = caches or {}
    new: Caches = {}
    if not self.layout.scanned:
      x_BTD, new["layers"], aux = self._run(self.layers, x_BTD, context, given.get("layers"))
      return x_BTD, new if caches else None, aux
    x_BTD, new["prologue"], before = self.before(x_BTD, context, given.get("prologue"))
    divides = self.pipeline is not None and len(x_BTD) % self.pipeline.microbatches == 0
    if self.pipeline is not None and divides and caches is None:
      x_BTD, repeated = self._pipelined(x_BTD, context, self.pipeline)
    else:
      x_BTD, new["pattern"], repeated = self._in_order(x_BTD, context, given.get("pattern"))
    x_BTD, new["epilogue"], after = self.after(x_BTD, context, given.get("epilogue"))
    return x_BTD, new if caches else None, add(add(before, repeated), after)

  def before(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None = None
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs the prologue of a scanned stack."""
    return self._run(self.prologue, x_BTD, context, caches)

  def after(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None = None
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs the epilogue of a scanned stack."""
    first = self.layout.prologue + self.layout.pattern * self.layout.repeats
    return self._run(self.epilogue, x_BTD, context, caches, first)

  def chunk(self, x_BTD: jax.Array, context: Context, place: jax.Array) -> tuple[jax.Array, Aux]:
    """Runs the repeats of a place of the pipeline, to whose weights the stack is bound."""
    return self._at(self.pattern, x_BTD, context, place)

  def empty_caches(self, batch: int, length: int, dtype: Any) -> Caches:
    """Returns the caches of all layers, for rows of up to `length` tokens."""
    repeats = self.layout.repeats
    caches = {
      part: [block.attention.empty_cache(batch, length, dtype) for block in blocks]
      for part, blocks in self._parts().items()
    }
    if "pattern" in caches:
      caches["pattern"] = jax.tree.map(lambda x: jnp.repeat(x[None], repeats, 0), caches["pattern"])
    return caches

  def grown_caches(self, caches: Caches, length: int) -> Caches:
    """Returns the caches with room for rows of up to `length` tokens."""
    return {
      part: [
        cache.grown(block.attention.num_slots(length))
        for block, cache in zip(blocks, caches[part], strict=True)
      ]
      for part, blocks in self._parts().items()
    }

  def _parts(self) -> dict[str, Sequence[Any]]:
    if not self.layout.scanned:
      return {"layers": self.layers}
    return {"prologue": self.prologue, "pattern": self.pattern, "epilogue": self.epilogue}

  def _run(
    self,
    blocks: Sequence[Block],
    x_BTD: jax.Array,
    context: Context,
    caches: list[Any] | None,
    first: int | jax.Array = 0,
    *,
    is_looped: bool = False,
  ) -> tuple[jax.Array, list[Any], Aux]:
    total: Aux = {}
    new: list[Any] = []
    for offset, block in enumerate(blocks):
      graph, weights = nnx.split(block)

      def apply(weights, x_BTD, context, cache, graph=graph):
        return nnx.merge(graph, weights)(x_BTD, context, cache)

      if self.remat is not Remat.SAVE_EVERYTHING:
        apply = jax.checkpoint(
          apply,
          policy=self.remat.policy,
          # A loop over layers keeps XLA from merging the recomputation away.
          prevent_cse=not is_looped,
        )
      cache = None if caches is None else caches[offset]
      x_BTD, cache, aux = apply(weights, x_BTD, context.fold(first + offset), cache)
      total = add(total, aux)
      new.append(cache)
    return x_BTD, new, total

  def _in_order(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs the repeats one after another, wherever they are."""
    graph, weights = nnx.split(self.pattern)
    order = self.layout.order
    if order != tuple(range(len(order))):
      places = jnp.argsort(jnp.array(order))
      weights = jax.tree.map(lambda w: w[places], weights)
    pattern = nnx.merge(graph, weights)
    return self._scan(pattern, jnp.arange(len(order)), x_BTD, context, caches)

  def _scan(
    self,
    pattern: Sequence[Block],
    indexes: jax.Array,
    x_BTD: jax.Array,
    context: Context,
    caches: list[Any] | None,
    *,
    unroll: bool = False,
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs blocks whose weights are [repeats, ...], and which repeats they are."""
    graph, weights = nnx.split(pattern)

    def repeat(x_BTD, xs):
      weights, index, caches = xs
      first = self.layout.prologue + index * self.layout.pattern
      blocks = nnx.merge(graph, weights)
      x_BTD, caches, aux = self._run(blocks, x_BTD, context, caches, first, is_looped=not unroll)
      return x_BTD, (caches, aux)

    if unroll:
      assert caches is None
      total: Aux = {}
      for number in range(len(indexes)):
        xs = jax.tree.map(lambda x, number=number: x[number], (weights, indexes))
        x_BTD, (_, aux) = repeat(x_BTD, (*xs, None))
        total = add(total, aux)
      return x_BTD, [], total
    x_BTD, (caches, aux) = jax.lax.scan(repeat, x_BTD, (weights, indexes, caches))
    return x_BTD, caches, jax.tree.map(lambda values: values.sum(0), aux)

  def _at(
    self, pattern: Sequence[Block], x_BTD: jax.Array, context: Context, place: jax.Array
  ) -> tuple[jax.Array, Aux]:
    """Runs blocks that have the weights of a place of the pipeline."""
    assert self.pipeline is not None
    count = self.layout.repeats // self.pipeline.num_places
    indexes = place * count + jnp.arange(count)
    # What a loop would save to go back has copies of the weights in it.
    unroll = not self.pipeline.recompute
    x_BTD, _, aux = self._scan(pattern, indexes, x_BTD, context, None, unroll=unroll)
    return x_BTD, aux

  def _pipelined(
    self, x_BTD: jax.Array, context: Context, pipeline: Pipeline
  ) -> tuple[jax.Array, Aux]:
    """Sends the rows through the stages, without a loss; losses of layers are means."""
    count = pipeline.microbatches
    keys = context.dropout
    if keys is not None:
      keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(count))
    arrays = dataclasses.replace(context, dropout=None)
    contexts = dataclasses.replace(split_rows(arrays, count), dropout=keys)
    graph, weights = nnx.split(self.pattern)

    def chunk(weights, x_BTD, context, place):
      return self._at(nnx.merge(graph, weights), x_BTD, context, place)

    x_MBTD, aux = forward(pipeline, chunk, weights, split_rows(x_BTD, count), contexts)
    return x_MBTD.swapaxes(0, 1).reshape(x_BTD.shape), mean_losses(aux, count)


def _stacked(block: Block, repeats: int) -> Block:
  """Gives every weight of an abstract block a leading dim."""
  for _, param in nnx.to_flat_state(nnx.state(block)):
    shape = param.get_value()
    param.set_value(jax.ShapeDtypeStruct((repeats, *shape.shape), shape.dtype))
    param.set_metadata("dims", ("layer", *param.dims))
  return block


def add(a: Aux, b: Aux) -> Aux:
  """Returns the sums of what layers report."""
  zero = jnp.zeros(())
  return {name: a.get(name, zero) + b.get(name, zero) for name in {**a, **b}}


def mean_losses(aux: Aux, count: int) -> Aux:
  """Returns sums over parts of a batch with losses of layers as means."""
  return {name: value / count if name.endswith("_loss") else value for name, value in aux.items()}


def layout_of(module: Any) -> Layout:
  """Returns the layout of the stack inside `module`; the trivial one if it has none."""
  for _, child in nnx.iter_modules(module):
    if isinstance(child, Stack):
      return child.layout
  return Layout(scanned=False, repeats=0)
