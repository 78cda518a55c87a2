# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model and of its training state, as inputs of the cost and memory models."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from paxlike.devices import topology
from paxlike.layers import flops
from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.auto import Place
from paxlike.layers.attention.kernel_table import KERNELS
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.attention.sparse_latent_attention import SparseLatentAttention
from paxlike.layers.block import Block
from paxlike.layers.module import Definition
from paxlike.layers.moe.dispatch import Capacity
from paxlike.layers.moe.moe import Moe
from paxlike.layers.recurrent.mixer import RecurrentMixer
from paxlike.layers.stack import Stack
from paxlike.planning import weights
from paxlike.planning.weights import Weight
from paxlike.training import train_state
from paxlike.training.optimizers import Optimizer


class Span(NamedTuple):
  """Attention layers whose queries attend to the same number of keys.

  Attributes:
    length: That number, at most.
    pairs: The number of pairs of a query and a key per token, summed over heads and layers.
    flops: Causal forward FLOPs per token, summed over layers.
    keys: Elements of keys and values per token, summed over layers.
  """

  length: int
  pairs: float
  flops: float
  keys: float


class Recurrence(NamedTuple):
  """Layers with a recurrent state, summed over layers; zeros if there are none.

  Attributes:
    flops: Forward FLOPs per token of all matmuls within chunks and with states.
    chunk: The tokens of a chunk, at most.
    states: Elements of what devices of `context` exchange per sequence and device.
    numbers: float32 numbers per token that the backward pass of one layer works with, at most.
  """

  flops: float = 0.0
  chunk: int = 0
  states: float = 0.0
  numbers: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelSizes:
  """The sizes of a decoder and its training state.

  Attributes:
    weights: All weights.
    num_layers: L.
    repeats: How often a scan repeats the pattern of layers; 0: there is no scan.
    dim: D, the width of the residual stream.
    vocab: V.
    seq_len: T.
    loss_chunks: Chunks of a sequence over which the loss is computed.
    predictions: The tokens that a position predicts: 1, and those of multi-token prediction, whose
      layers are counted as layers that no scan repeats.
    heads: Attention heads, summed over layers.
    least_heads: The smallest N of any layer.
    head_dim: The smallest H of any layer of attention.
    scores: Attention's forward FLOPs per token: (full, causal); see `flops.attention_flops`.
    spans: All layers of attention, by their spans.
    recurrent: All layers with a recurrent state together.
    mlp_factor: The number of arrays of width F that the activation reads and writes: 3 if gated,
      else 2.
    moe_layers: The number of layers with experts.
    num_experts: E; 1: no experts.
    num_chosen: Top-k.
    capacity: Expert slots per token (top-k x capacity factor); None: dropless.
    moments: Bytes of optimizer state per trained parameter.
    over_data: Whether the optimizer state is sharded over the axis `data` too (ZeRO-1).
    sequence_parallel: Whether the residual stream is sharded over `tensor` too.
    optimizer_on_host: Whether the optimizer state is in the memory of the host between updates.
    beside: The weights of other models on the devices: the reference model, reward models.
    fused_attention: Whether a fused kernel computes attention without materializing logits.
    splits_sequences: Whether its kernels can shard sequences over `context`.
    whole_sequences: Whether its kernels can compute sequences that are not sharded.
    splits_layers: Whether its layers can be divided among the stages of a pipeline.
    flops: Training FLOPs per token; see `flops.TrainingFlops`.
  """

  weights: tuple[Weight, ...]
  num_layers: int
  repeats: int
  dim: int
  vocab: int
  seq_len: int
  loss_chunks: int = 4
  predictions: int = 1
  heads: int
  least_heads: int
  head_dim: int = 128
  scores: tuple[float, float]
  spans: tuple[Span, ...]
  recurrent: Recurrence
  mlp_factor: int
  moe_layers: int = 0
  num_experts: int = 1
  num_chosen: int = 1
  capacity: float | None = None
  moments: float = 8.0
  over_data: bool = False
  sequence_parallel: bool = False
  optimizer_on_host: bool = False
  beside: tuple[Weight, ...] = ()
  fused_attention: bool = True
  splits_sequences: bool = True
  whole_sequences: bool = True
  splits_layers: bool = True
  flops: flops.TrainingFlops

  @property
  def num_params(self) -> int:
    """The parameter count."""
    return sum(weight.size for weight in self.weights)

  def in_stages(self, stages: int, chunks: int) -> "ModelSizes":
    """Returns the sizes with the padding of a pipeline whose stages do not divide the repeats.

    Every virtual stage computes as many repeats as the largest.
    """
    if not self.repeats or self.repeats % (stages * chunks) == 0:
      return self
    return _padded(self, stages * chunks)

  @functools.cached_property
  def in_stack(self) -> tuple[Weight, ...]:
    """The weights of the stack."""
    return tuple(weight for weight in self.weights if weight.layers)

  @functools.cached_property
  def outside(self) -> tuple[Weight, ...]:
    """The weights of embeddings, the last norm and the output projection."""
    return tuple(weight for weight in self.weights if not weight.layers)

  @functools.cached_property
  def head(self) -> Weight:
    """The output projection."""
    return next(weight for weight in self.outside if weight.share and "vocab" in weight.dims)


@functools.cache
def _padded(model: ModelSizes, places: int) -> ModelSizes:
  size = -(-model.repeats // places) * places
  factor = size / model.repeats

  def padded(weight: Weight) -> Weight:
    if weight.layers <= 0:
      return weight
    shape = (size, *weight.shape[1:])
    return dataclasses.replace(weight, shape=shape, layers=size, flops=factor * weight.flops)

  full, causal = model.scores
  return dataclasses.replace(
    model,
    weights=tuple(map(padded, model.weights)),
    num_layers=round(factor * model.num_layers),
    repeats=size,
    heads=round(factor * model.heads),
    recurrent=model.recurrent._replace(
      flops=factor * model.recurrent.flops, states=factor * model.recurrent.states
    ),
    scores=(factor * full, factor * causal),
    spans=tuple(Span(s.length, *(factor * number for number in s[1:])) for s in model.spans),
    moe_layers=round(factor * model.moe_layers),
  )


def of_definition(
  definition: Definition, optimizer: Optimizer, *, seq_len: int, beside: Sequence[Definition] = ()
) -> ModelSizes:
  """Returns the sizes of a decoder that `optimizer` trains on sequences of `seq_len` tokens.

  `beside` are other models whose weights are on the devices.
  """
  decoder: Any = definition.module
  stack: Stack = decoder.stack
  layout = stack.layout
  heads, kernels, widths, moes, gated, dims_of_time = [], set(), [], [], [], set()
  spans: dict[int, Span] = {}
  scores: list[tuple[float, float]] = []
  mixers: list[RecurrentMixer] = []
  num_layers, splits_layers = 0, True
  for module, count in flops.modules(definition):
    if isinstance(module, Block):
      num_layers += count
      splits_layers = splits_layers and not module.reads_earlier_layers
    if isinstance(module, Attention | LatentAttention):
      heads += [module.num_heads] * count
      widths.append(module.head_dim)
      kernels.add(getattr(module.kernel, "func", module.kernel))
      scores += [module.score_flops(seq_len)] * count
      length, *own = _span(module, seq_len)
      sums = spans.get(length, Span(length, 0.0, 0.0, 0.0))
      spans[length] = Span(length, *(a + count * b for a, b in zip(sums[1:], own, strict=True)))
    if isinstance(module, RecurrentMixer):
      mixers += [module] * count
    if isinstance(module, Moe):
      moes += [module] * count
    if hasattr(module, "activation"):
      gated.append(getattr(module, "gate", None) is not None)
    dims_of_time.add(getattr(module, "time", "time"))
  device = topology.devices()[0]
  split = {name: one.function for name, one in KERNELS.items() if one.is_context_parallel}
  over_context = set(decoder.kernels(Place(device, context=2), seq_len=seq_len))
  first = moes[0] if moes else None
  placed = isinstance(getattr(first, "dispatch", None), Capacity)
  return ModelSizes(
    weights=weights.of_definition(definition),
    num_layers=num_layers,
    repeats=layout.repeats if layout.scanned else 0,
    dim=decoder.embedding.table.get_value().shape[-1],
    vocab=decoder.vocab_size,
    seq_len=seq_len,
    loss_chunks=decoder.loss_chunks,
    predictions=1 + flops.num_further(definition),
    heads=sum(heads),
    least_heads=min([*heads, *(mixer.num_heads for mixer in mixers)]),
    head_dim=min(widths, default=ModelSizes.head_dim),
    scores=(sum(full for full, _ in scores), sum(causal for _, causal in scores)),
    spans=tuple(spans.values()),
    recurrent=_recurrence(mixers),
    mlp_factor=3 if any(gated) else 2,
    moe_layers=len(moes),
    num_experts=first.num_experts if first else 1,
    num_chosen=first.num_chosen if first else 1,
    capacity=first.num_chosen * first.dispatch.factor if first and placed else None,
    moments=_moments(definition, optimizer),
    over_data=optimizer.over_data,
    optimizer_on_host=optimizer.on_host,
    sequence_parallel=dims_of_time != {"time"},
    beside=tuple(weight for one in beside for weight in weights.of_definition(one)),
    fused_attention="xla" not in decoder.kernels(Place(device), seq_len=seq_len),
    splits_sequences=over_context <= {*split, "sparse"},
    whole_sequences=kernels.isdisjoint(split.values()),
    splits_layers=splits_layers,
    flops=flops.per_token(definition, seq_len),
  )


def _recurrence(mixers: Sequence[RecurrentMixer]) -> Recurrence:
  """Returns the sums over all layers with a recurrent state."""
  return Recurrence(
    flops=sum(mixer.chunk_flops for mixer in mixers),
    chunk=max((mixer.chunk for mixer in mixers), default=0),
    states=sum(mixer.exchanged for mixer in mixers),
    numbers=max((mixer.chunk_numbers for mixer in mixers), default=0.0),
  )


def _span(module: Attention | LatentAttention, seq_len: int) -> Span:
  """Returns that of one layer."""
  if isinstance(module, SparseLatentAttention) and seq_len > (top_k := module.indexer.top_k):
    # Its queries and values have the width of what is gathered, and the indexer scores all pairs.
    width = module.rank + module.rope_dim
    pairs = module.num_heads * top_k * (1 - top_k / seq_len / 2)
    computed = 2 * pairs * (width + module.rank) + module.selection_flops(seq_len)[1]
    pairs += module.indexer.num_heads * seq_len / 2
    return Span(top_k, pairs, computed, width + module.indexer.head_dim)
  length = min(seq_len, getattr(module, "window", None) or seq_len)
  pairs = module.num_heads * length * (1 - length / seq_len / 2)
  return Span(length, pairs, module.score_flops(seq_len)[1], _keys(module))


def _keys(module: Attention | LatentAttention) -> int:
  """Returns the elements of keys and values per token; latent attention expands them."""
  if isinstance(module, LatentAttention):
    return module.num_heads * (module.head_dim + module.rope_dim + module.value_dim)
  return 2 * module.num_kv_heads * module.head_dim


def _moments(definition: Definition, optimizer: Optimizer) -> float:
  """Returns the bytes of optimizer state per trained parameter."""
  shapes: Any = {
    name: jax.ShapeDtypeStruct(spec.shape, spec.stored_dtype)
    for name, spec in definition.weights.items()
  }
  params, _, _ = train_state.split(definition, shapes)
  state = jax.eval_shape(optimizer.transformation(definition).init, definition.optimized(params))
  arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
  nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
  # With padding, as those of the state are.
  trained = definition.optimized(definition.weights).values()
  return nbytes / max(1, sum(math.prod(spec.shape) for spec in trained))
