# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks, unrolled or scanned: two layouts of the same parameters."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.layers.block import Aux, Block
from paxlike.layers.context import Context
from paxlike.layers.layout import Layout
from paxlike.layers.module import Module

BlockFactory = Callable[[int], Block]
# Part of the stack -> the caches of its layers; those of a pattern stacked as its weights are.
Caches = dict[str, list[Any]]


class Remat(enum.Enum):
  """What the backward pass finds saved; the rest it computes again (Chen et al., 2016)."""

  SAVE_EVERYTHING = "everything_saveable"
  SAVE_NOTHING = "nothing_saveable"
  SAVE_DOT_ONLY = "dots_saveable"
  SAVE_DOT_WITH_NO_BATCH_DIM = "dots_with_no_batch_dims_saveable"


class Stack(Module):
  """`prologue + pattern * repeats + epilogue` blocks, one after the other.

  Attributes:
    layout: Where each layer's weights are found.
    remat: Applied block by block.
  """

  def __init__(
    self,
    dim: int,
    *,
    pattern: Sequence[BlockFactory],
    repeats: int,
    prologue: Sequence[BlockFactory] = (),
    epilogue: Sequence[BlockFactory] = (),
    scan: bool,
    remat: Remat = Remat.SAVE_EVERYTHING,
  ):
    self.remat = remat
    self.layout = Layout(
      scanned=scan,
      prologue=len(prologue),
      pattern=len(pattern),
      repeats=repeats,
      epilogue=len(epilogue),
    )
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
    prologue, pattern, epilogue = map(given.get, ("prologue", "pattern", "epilogue"))
    x_BTD, new["prologue"], before = self._run(self.prologue, x_BTD, context, prologue)
    x_BTD, new["pattern"], repeated = self._scan(x_BTD, context, pattern)
    first = self.layout.prologue + self.layout.pattern * self.layout.repeats
    x_BTD, new["epilogue"], after = self._run(self.epilogue, x_BTD, context, epilogue, first)
    return x_BTD, new if caches else None, _add(_add(before, repeated), after)

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
          policy=getattr(jax.checkpoint_policies, self.remat.value),
          # Inside a scan the loop itself keeps XLA from merging the recomputation away.
          prevent_cse=not self.layout.scanned,
        )
      cache = None if caches is None else caches[offset]
      x_BTD, cache, aux = apply(weights, x_BTD, context.fold(first + offset), cache)
      total = _add(total, aux)
      new.append(cache)
    return x_BTD, new, total

  def _scan(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None
  ) -> tuple[jax.Array, list[Any], Aux]:
    graph, weights = nnx.split(self.pattern)

    def repeat(x_BTD, xs):
      weights, index, caches = xs
      first = self.layout.prologue + index * self.layout.pattern
      blocks = nnx.merge(graph, weights)
      x_BTD, caches, aux = self._run(blocks, x_BTD, context, caches, first)
      return x_BTD, (caches, aux)

    indexes = jnp.arange(self.layout.repeats)
    x_BTD, (caches, aux) = jax.lax.scan(repeat, x_BTD, (weights, indexes, caches))
    return x_BTD, caches, jax.tree.map(lambda values: values.sum(0), aux)


def _stacked(block: Block, repeats: int) -> Block:
  """Gives every weight of an abstract block a leading dim."""
  for _, param in nnx.to_flat_state(nnx.state(block)):
    shape = param.get_value()
    param.set_value(jax.ShapeDtypeStruct((repeats, *shape.shape), shape.dtype))
    param.set_metadata("dims", ("layer", *param.dims))
  return block


def _add(a: Aux, b: Aux) -> Aux:
  zero = jnp.zeros(())
  return {name: a.get(name, zero) + b.get(name, zero) for name in {**a, **b}}


def layout_of(module: Any) -> Layout:
  """Returns the layout of the stack inside `module`; the trivial one if it has none."""
  for _, child in nnx.iter_modules(module):
    if isinstance(child, Stack):
      return child.layout
  return Layout(scanned=False, repeats=0)
