# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model and of its training state, as a plain description for models of cost."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike import flops, mesh, topology, train_state
from paxlike.layers.attention import Attention
from paxlike.layers.auto_attention import Place
from paxlike.layers.dispatch import Capacity
from paxlike.layers.experts import ExpertLinear
from paxlike.layers.latent_attention import LatentAttention
from paxlike.layers.linear import Linear
from paxlike.layers.lora import Lora
from paxlike.layers.module import Definition
from paxlike.layers.moe import Moe
from paxlike.layers.stack import Stack
from paxlike.optimizers import Optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """A weight, or those of all repeats of a layer.

  Attributes:
    dims: Names of its dims, as `mesh.RULES` has them.
    shape: Their sizes.
    layers: Repeats that it is of; 0: it is outside of the stack, -1: of a layer without repeats.
    inputs: Width of what it is multiplied with, 0 if it is no matrix.
    outputs: Width of what that gives.
    share: Of it, that one token meets: less than 1 of experts, 0 of what is only looked up.
    held: Bytes of a number between steps.
    computed: Bytes of one that is computed with.
    trained: Whether an optimizer changes it.
    in_8_bits: Whether products with it are.
    is_last: Whether nothing but a sum needs its product: it is not made again to go back.
  """

  dims: tuple[str, ...]
  shape: tuple[int, ...]
  layers: int = 0
  inputs: int = 0
  outputs: int = 0
  share: float = 0.0
  held: float = 4
  computed: int = 2
  trained: bool = True
  in_8_bits: bool = False
  is_last: bool = False

  @property
  def size(self) -> int:
    """Numbers in it."""
    return math.prod(self.shape)

  @property
  def flops(self) -> float:
    """FLOPs of a forward pass for one token, through all its layers."""
    return 2 * self.size * self.share

  @property
  def is_routed(self) -> bool:
    """Whether it is a matrix of experts, of which a token meets a few."""
    return bool(self.share) and "experts" in self.dims and self.dims[-1] != "experts"

  def axes(self, sizes: Mapping[str, int]) -> set[str]:
    """Returns the axes of a mesh with such `sizes` that cut it."""
    return _axes(self.dims, self.shape, tuple(sizes.items()))

  def per_device(self, sizes: Mapping[str, int], *without: str) -> int:
    """Returns its numbers on a device of such a mesh, gathered over the axes `without`."""
    axes = self.axes(sizes) - set(without)
    return self.size // math.prod(sizes[axis] for axis in axes)


@functools.cache
def _axes(dims: mesh.Dims, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> set[str]:
  return mesh.axes_of(mesh.partition(dims, shape, dict(sizes)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
  """A decoder and what is trained of it.

  Attributes:
    weights: All of them.
    num_layers: L.
    repeats: How often the pattern of layers is repeated in a loop; 0: there is no loop.
    dim: D, the width of the residual stream.
    vocab: V.
    seq_len: T.
    loss_chunks: Parts of a sequence whose logits are held one after another.
    heads: Attention heads of all layers together.
    least_heads: N of the layer with the fewest.
    scores: FLOPs of attention's products for one token, forward: of all pairs, of causal ones.
    mlp_factor: Widths of a feed-forward that its activation reads and writes, 3 if it is gated.
    moe_layers: Of the layers, those with experts.
    num_experts: E of each; 1: there are none.
    num_chosen: Of those that a token sees.
    capacity: Places of experts for each token, if their number is fixed.
    moments: Bytes of the optimizer's state for each trained number.
    over_data: Whether that is cut over the axis data too.
    cuts_sequences: Whether what goes from layer to layer is cut over the axis tensor too.
    reference: Whether weights are there a second time.
    fused_attention: Whether a kernel computes attention, and never writes its logits.
    flops: FLOPs of training on one token: see `flops.TrainingFlops`.
  """

  weights: tuple[Weight, ...]
  num_layers: int
  repeats: int
  dim: int
  vocab: int
  seq_len: int
  loss_chunks: int = 4
  heads: int
  least_heads: int
  scores: tuple[float, float]
  mlp_factor: int
  moe_layers: int = 0
  num_experts: int = 1
  num_chosen: int = 1
  capacity: float | None = None
  moments: float = 8.0
  over_data: bool = False
  cuts_sequences: bool = False
  reference: bool = False
  fused_attention: bool = True
  flops: flops.TrainingFlops

  @property
  def num_params(self) -> int:
    """Numbers in all weights."""
    return sum(weight.size for weight in self.weights)

  @property
  def in_stack(self) -> tuple[Weight, ...]:
    """The weights of the layers."""
    return tuple(weight for weight in self.weights if weight.layers)

  @property
  def outside(self) -> tuple[Weight, ...]:
    """The weights of embeddings, the last norm and the output projection."""
    return tuple(weight for weight in self.weights if not weight.layers)

  @property
  def head(self) -> Weight:
    """What projects to the vocabulary."""
    return next(weight for weight in self.outside if weight.share)


def of_definition(
  definition: Definition, optimizer: Optimizer, *, seq_len: int, with_reference: bool = False
) -> ModelSizes:
  """Returns the sizes of a decoder that `optimizer` trains on sequences of `seq_len` tokens."""
  decoder: Any = definition.module
  stack: Stack = decoder.stack
  repeats = stack.layout.repeats if stack.layout.scanned else 0
  modules: dict[str, Any] = {
    ".".join(map(str, path)): module for path, module in nnx.iter_modules(decoder)
  }
  heads, scores = [], [0.0, 0.0]
  moes, gated = [], []
  for name, module in modules.items():
    times = repeats if ".pattern." in f".{name}." else 1
    if isinstance(module, Attention | LatentAttention):
      heads += [module.num_heads] * times
      of_layer = module.score_flops(seq_len)
      scores = [total + times * one for total, one in zip(scores, of_layer, strict=True)]
    if isinstance(module, Moe):
      moes += [module] * times
    if hasattr(module, "activation"):
      gated.append(getattr(module, "gate", None) is not None)
  first = moes[0] if moes else None
  placed = isinstance(getattr(first, "dispatch", None), Capacity)
  return ModelSizes(
    weights=tuple(_weight(definition, modules, name, repeats) for name in definition.weights),
    num_layers=len(heads),
    repeats=repeats,
    dim=decoder.embedding.table.get_value().shape[-1],
    vocab=decoder.vocab_size,
    seq_len=seq_len,
    loss_chunks=decoder.loss_chunks,
    heads=sum(heads),
    least_heads=min(heads),
    scores=(scores[0], scores[1]),
    mlp_factor=3 if any(gated) else 2,
    moe_layers=len(moes),
    num_experts=first.num_experts if first else 1,
    num_chosen=first.num_chosen if first else 1,
    capacity=first.num_chosen * first.dispatch.factor if first and placed else None,
    moments=_moments(definition, optimizer),
    over_data=optimizer.over_data,
    cuts_sequences=any(getattr(m, "time", "time") != "time" for m in modules.values()),
    reference=with_reference,
    fused_attention="xla" not in decoder.kernels(Place(topology.devices()[0])),
    flops=flops.per_token(definition, seq_len),
  )


def _weight(definition: Definition, modules: Mapping[str, Any], name: str, repeats: int) -> Weight:
  spec = definition.weights[name]
  owner, _, own = name.rpartition(".")
  module, role = modules.get(owner), getattr(modules.get(owner), "role", "")
  layers = repeats if "layer" in spec.dims else -1 if ".stack." in f".{name}" else 0
  experts = spec.shape[spec.dims.index("experts")] if "experts" in spec.dims else 1
  in_moe = isinstance(module, ExpertLinear)
  shape = spec.shape[("layer" in spec.dims) + in_moe :]
  inputs, outputs, share = 0, 0, 0.0
  if isinstance(module, Linear) and own == "w":
    inputs, share = math.prod(shape[: module.num_inputs]), 1.0
  elif in_moe and own == "w":
    moe: Any = modules[owner.rpartition(".experts.")[0]]
    inputs, share = shape[0], moe.num_chosen / experts
  elif isinstance(module, Lora) and own in ("a", "b"):
    inputs, share = spec.fan_in if own == "a" else shape[0], 1.0
  elif own == "table" and owner == "embedding" and "head" not in modules:
    inputs, share = shape[1], 1.0
  if inputs:
    times = share * experts if in_moe else 1
    outputs = int(times * math.prod(shape)) // inputs
    inputs = int(times * inputs)
  held = jax.eval_shape(spec.stored, jax.ShapeDtypeStruct(spec.shape, spec.stored_dtype))
  nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
  return Weight(
    dims=spec.dims,
    shape=spec.shape,
    layers=layers,
    inputs=inputs,
    outputs=outputs,
    share=share,
    held=nbytes / math.prod(spec.shape),
    computed=jnp.dtype(spec.compute_dtype).itemsize,
    trained=spec.trained,
    in_8_bits=getattr(module, "dot", None) is not None,
    is_last=role == "down" and not in_moe,
  )


def _moments(definition: Definition, optimizer: Optimizer) -> float:
  """Returns the bytes of an optimizer's state for each number that it trains."""
  shapes: Any = {
    name: jax.ShapeDtypeStruct(spec.shape, spec.stored_dtype)
    for name, spec in definition.weights.items()
  }
  params, _, _ = train_state.split(definition, shapes)
  state = jax.eval_shape(optimizer.transform.init, definition.optimized(params))
  arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
  nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
  return nbytes / max(1, definition.num_trained)
