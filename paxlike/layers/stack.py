# SPDX-License-Identifier: Apache-2.0
"""A stack of blocks: unrolled, scanned or pipelined, with the same parameters."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.errors import ArgumentError, UserError
from paxlike.layers import gradient_order
from paxlike.layers.aux_losses import Aux, add, none, total
from paxlike.layers.block import Block
from paxlike.layers.call_context import Context
from paxlike.layers.module import Module
from paxlike.layers.pipeline.spec import Pipeline, forward, split_microbatches
from paxlike.layers.remat import Remat
from paxlike.layers.stack_layout import Layout

BlockFactory = Callable[[int], Block]
# Section of the stack -> the caches of its layers; the pattern's are stacked like its weights.
Caches = dict[str, list[Any]]


@configurable
class Stack(Module):
  """`prologue + pattern * repeats + epilogue` blocks, one after the other.

  Attributes:
    layout: The mapping from layers to weight names.
    remat: Applied to each block.
    pipeline: How repeats are split over stages; prologue and epilogue are replicated on all stages.
    log_layers: Whether layers return metrics of their own; set on a bound model. See `Aux`.
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
    """Builds the layers; `scan` scans over the repeats, by default on more than one device.

    An unrolled stack is faster on one device; on many, scanning keeps the program small.

    Raises:
      UserError: There is no layer, or there are more stages than repeats.
    """
    if not pattern:
      raise UserError("pattern=[] of a Stack: expected at least one layer.")
    if not (repeats or prologue or epilogue):
      raise UserError(f"model.stack.{repeats=} makes a model with no layers: at least 1 is needed.")
    scan = len(topology.devices()) > 1 if scan is None else scan
    self.remat = remat
    self.pipeline = pipeline
    self.log_layers = False
    self.layout = Layout(
      scanned=scan,
      prologue=len(prologue),
      pattern=len(pattern),
      repeats=repeats,
      epilogue=len(epilogue),
    )
    if pipeline is not None:
      self.layout = self.layout.in_pipeline(stages=pipeline.stages, chunks=pipeline.chunks)
    if scan:
      self.prologue = nnx.List([block(dim) for block in prologue])
      self.pattern = nnx.List([_stacked(block(dim), self.layout) for block in pattern])
      self.epilogue = nnx.List([block(dim) for block in epilogue])
      if pipeline is not None and any(block.reads_earlier_layers for block in self.pattern):
        raise ArgumentError(
          f"stages={pipeline.stages}: layers of this model read keys and values of earlier ones, or"
          " per-layer embeddings, which stages do not pass on: leave the mesh axis pipeline 1."
        )
    else:
      factories = [*prologue, *(list(pattern) * repeats), *epilogue]
      self.layers = nnx.List([block(dim) for block in factories])

  def __call__(
    self, x_BTD: jax.Array, context: Context, caches: Caches | None = None
  ) -> tuple[jax.Array, Caches | None, Aux]:
    """Returns (x_BTD, the updated caches, the layers' Aux)."""
    given = caches or {}
    new: Caches = {}
    if not self.layout.scanned:
      layers = (self.layers, 0, given.get("layers"), context.layer_inputs)
      x_BTD, (new["layers"], aux) = self._run(x_BTD, layers, context=context)
      return x_BTD, new if caches else None, aux._replace(shared={})
    x_BTD, new["prologue"], before = self.before(x_BTD, context, given.get("prologue"))
    context = dataclasses.replace(context, shared=before.shared)
    divides = self.pipeline is not None and len(x_BTD) % self.pipeline.microbatches == 0
    if self.pipeline is not None and divides and caches is None:
      x_BTD, repeated = self._pipelined(x_BTD, context, self.pipeline)
    else:
      graph, weights = nnx.split(self._in_layer_order())
      run = functools.partial(self._run, context=context, graph=graph)
      firsts = self._firsts(jnp.arange(self.layout.repeats))
      repeats = (weights, firsts, given.get("pattern"), self._repeated_inputs(context))
      with jax.named_scope("layers"):
        x_BTD, (new["pattern"], each) = jax.lax.scan(run, x_BTD, repeats)
      repeated = total(each)
    x_BTD, new["epilogue"], after = self.after(x_BTD, context, given.get("epilogue"))
    aux = add(add(before, repeated), after)
    return x_BTD, new if caches else None, aux._replace(shared={})

  def before(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None = None
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs the prologue of a scanned stack."""
    given = context.layer_inputs
    inputs = None if given is None else given[: self.layout.prologue]
    x_BTD, (new, aux) = self._run(x_BTD, (self.prologue, 0, caches, inputs), context=context)
    return x_BTD, new, aux

  def after(
    self, x_BTD: jax.Array, context: Context, caches: list[Any] | None = None
  ) -> tuple[jax.Array, list[Any], Aux]:
    """Runs the epilogue of a scanned stack."""
    first = self.layout.prologue + self.layout.pattern * self.layout.repeats
    inputs = None if context.layer_inputs is None else context.layer_inputs[first:]
    x_BTD, (new, aux) = self._run(x_BTD, (self.epilogue, first, caches, inputs), context=context)
    return x_BTD, new, aux

  def chunk(
    self,
    x_BTD: jax.Array,
    context: Context,
    place: jax.Array,
    pattern: Sequence[Block] | None = None,
  ) -> tuple[jax.Array, Aux]:
    """Runs the repeats of virtual stage `place`.

    `pattern` holds the weights of these repeats only; None: `self.pattern` does.
    """
    assert self.pipeline is not None
    recompute = self.pipeline.recompute
    least, more = divmod(self.layout.repeats, self.pipeline.num_places)
    size = least + (more > 0)
    graph, weights = nnx.split(self.pattern if pattern is None else pattern)
    first = place * least + jnp.minimum(place, more)
    repeats = (weights, self._firsts(first + jnp.arange(size)), jnp.arange(size))

    def run(x_BTD: jax.Array, xs: Any) -> tuple[jax.Array, Aux]:
      weights, first, number = xs
      blocks = (nnx.merge(graph, weights), first, None, None)
      y_BTD, (_, aux) = self._run(x_BTD, blocks, context=context, in_scan=recompute)
      if not more:
        return y_BTD, aux
      # Shorter stages compute the padding too, and wait no less for the longer ones.
      is_layer = number < least + (place < more)
      return jnp.where(is_layer, y_BTD, x_BTD), aux.where(is_layer)

    if recompute:
      x_BTD, each = jax.lax.scan(run, x_BTD, repeats)
      return x_BTD, total(each)
    # The residuals of a scan would include copies of the weights.
    aux = none()
    for number in range(size):
      own, *rest = jax.tree.map(lambda x, number=number: x[number], repeats)
      x_BTD, own = gradient_order.together(x_BTD, own)
      x_BTD, new = run(x_BTD, (own, *rest))
      aux = add(aux, new)
    return x_BTD, aux

  def empty_caches(self, batch: int, length: int, dtype: Any) -> Caches:
    """Returns empty caches of all layers, for `batch` sequences of up to `length` tokens."""
    repeats = self.layout.repeats
    caches = {
      section: [
        None if block.attention is None else block.attention.empty_cache(batch, length, dtype)
        for block in blocks
      ]
      for section, blocks in self._sections().items()
    }
    if "pattern" in caches:
      caches["pattern"] = jax.tree.map(lambda x: jnp.repeat(x[None], repeats, 0), caches["pattern"])
    return caches

  def grown_caches(self, caches: Caches, length: int) -> Caches:
    """Returns the caches with more slots, for sequences of up to `length` tokens."""
    return {
      section: [
        None if cache is None else cache.grown(block.attention.num_slots(length))
        for block, cache in zip(blocks, caches[section], strict=True)
      ]
      for section, blocks in self._sections().items()
    }

  def _sections(self) -> dict[str, Sequence[Any]]:
    if not self.layout.scanned:
      return {"layers": self.layers}
    return {"prologue": self.prologue, "pattern": self.pattern, "epilogue": self.epilogue}

  def _run(
    self,
    x_BTD: jax.Array,
    xs: tuple[Any, int | jax.Array, list[Any] | None, jax.Array | None],
    *,
    context: Context,
    graph: nnx.GraphDef | None = None,
    in_scan: bool = False,
  ) -> tuple[jax.Array, tuple[Any, Aux]]:
    """Runs blocks one after another; the body of a scan if `graph` is given.

    Args:
      x_BTD: The input of the first block.
      xs: (the blocks, or their weights in a scan; the index of the first block among all layers;
        their caches; their inputs, see `Context.layer_inputs`).
      context: The context of the whole stack, into which each layer's index is folded.
      graph: The graph definition of the blocks.
      in_scan: Whether a scan runs the blocks, if there is no `graph`.

    Returns:
      (x_BTD, (the updated caches, the sum of the blocks' Aux)).
    """
    blocks, first, caches, inputs = xs
    if graph is not None:
      blocks, in_scan = nnx.merge(graph, blocks), True
    recomputes = self.remat is Remat.SAVE_NOTHING
    context = dataclasses.replace(context, log_layers=self.log_layers, recomputes=recomputes)
    own = [None] * len(blocks) if inputs is None else jnp.unstack(inputs)
    combined = none()
    new: list[Any] = []
    for offset, block in enumerate(blocks):
      apply: Any = block
      if self.remat is not Remat.SAVE_EVERYTHING:
        # Inside a scan over layers, XLA cannot CSE the recomputation with the forward pass.
        apply = jax.checkpoint(block, policy=self.remat.policy, prevent_cse=not in_scan)
      cache = None if caches is None else caches[offset]
      layer = first + offset
      with jax.named_scope(f"layer_{layer}" if isinstance(first, int) else "layers"):
        given = dataclasses.replace(context.fold(layer), layer_inputs=own[offset])
        x_BTD, cache, aux = apply(x_BTD, given, cache)
      context = dataclasses.replace(context, shared={**context.shared, **aux.shared})
      combined = add(combined, aux.of_layer(layer, self.layout.num_layers))
      new.append(cache)
    # A scan would stack what each repeat shares, which serves its own layers only.
    return x_BTD, (new, combined if graph is None else combined._replace(shared={}))

  def _repeated_inputs(self, context: Context) -> jax.Array | None:
    """Returns the inputs of the pattern's layers, [repeats, layers of the pattern, B, T, P]."""
    if context.layer_inputs is None:
      return None
    first, size = self.layout.prologue, self.layout.pattern * self.layout.repeats
    inputs = context.layer_inputs[first : first + size]
    return inputs.reshape(self.layout.repeats, self.layout.pattern, *inputs.shape[1:])

  def _firsts(self, indexes: jax.Array) -> jax.Array:
    """Returns, for each of these repeats, the index of its first layer among all layers."""
    return self.layout.prologue + indexes * self.layout.pattern

  def _in_layer_order(self) -> Sequence[Block]:
    """Returns the pattern with its repeats in layer order instead of pipeline order."""
    order = self.layout.order
    if order == tuple(range(len(order))):
      return self.pattern
    graph, weights = nnx.split(self.pattern)
    indexes = jnp.array([order.index(repeat) for repeat in range(self.layout.repeats)])
    return nnx.merge(graph, jax.tree.map(lambda w: w[indexes], weights))

  def _pipelined(
    self, x_BTD: jax.Array, context: Context, pipeline: Pipeline
  ) -> tuple[jax.Array, Aux]:
    """Runs the pipeline's forward pass; auxiliary losses are averaged over microbatches."""
    count = pipeline.microbatches
    keys = context.dropout
    if keys is not None:
      keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(count))
    arrays = dataclasses.replace(context, dropout=None)
    contexts = dataclasses.replace(split_microbatches(arrays, count), dropout=keys)
    graph, weights = nnx.split(self.pattern)

    def chunk(weights, x_BTD, context, place):
      return self.chunk(x_BTD, context, place, nnx.merge(graph, weights))

    x_MBTD, aux = forward(pipeline, chunk, weights, split_microbatches(x_BTD, count), contexts)
    return x_MBTD.swapaxes(0, 1).reshape(x_BTD.shape), aux.averaged(count)


def _stacked(block: Block, layout: Layout) -> Block:
  """Adds a leading dim `layer` to every weight of an abstract block, in place; returns it."""
  size = layout.stacked_size
  for _, param in nnx.to_flat_state(nnx.state(block, nnx.Param)):
    shape = param.get_value()
    param.set_value(jax.ShapeDtypeStruct((size, *shape.shape), shape.dtype))
    param.set_metadata("dims", ("layer", *param.dims))
    param.set_metadata("padding", size - layout.repeats)
  return block


def layout_of(module: Any) -> Layout:
  """Returns the layout of the stack inside `module`; an empty layout if it has no stack."""
  for _, child in nnx.iter_modules(module):
    if isinstance(child, Stack):
      return child.layout
  return Layout(scanned=False, repeats=0)
