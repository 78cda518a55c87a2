# SPDX-License-Identifier: Apache-2.0
"""A model of the peak memory of a device in a training step, from model sizes.

The training state is counted exactly. Temporaries are the saved activations (bytes per token from
traces of `jax.vjp`) and the working set of one layer's backward pass, whose constants are fitted to
compiled programs for v5e-256 (their peaks are in `docs/results.md`) and for 64 GPUs; those of
pipelines to random plans (`benchmarks/plan_memory.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from paxlike.devices import mesh
from paxlike.devices.interconnect import Network
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.weights import Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes per device.

  Attributes:
    weights: Stored weights.
    optimizer: Optimizer state.
    batch: Inputs, targets and loss weights.
    copies: Weights in the compute dtype (also those of a reference model, and the slices of chunks
      that a pipeline copies), and gradients.
    gathered: All-gathered weights of the layers in flight; in a pipeline on GPUs, also the
      gradients of a chunk.
    activations: Residuals that the forward pass saves for the backward pass.
    working: Temporaries of a layer's backward pass.
    logits: Logits of a chunk of the loss, with the output projection and its gradient.
    logits_beside_layers: Whether XLA holds logits together with the temporaries of a layer. In
      pipelines, whose ticks compute both, it does for TPUs, not for GPUs.
  """

  weights: float
  optimizer: float
  batch: float
  copies: float
  gathered: float
  activations: float
  working: float
  logits: float
  logits_beside_layers: bool = False

  @property
  def arguments(self) -> float:
    """The training state and the batch."""
    return self.weights + self.optimizer + self.batch

  @property
  def total(self) -> float:
    """The peak."""
    layers = self.gathered + self.working
    temporaries = layers + self.logits if self.logits_beside_layers else max(layers, self.logits)
    return self.arguments + self.copies + self.activations + temporaries


def of(model: ModelSizes, how: Configuration, network: Network) -> Memory:
  """Returns the memory of a device."""
  if how.pipeline is not None:
    model = model.in_stages(how.pipeline.stages, how.pipeline.chunks)
  sizes = how.sizes
  tokens = how.tokens(model.seq_len)
  here = {weight: weight.per_device(sizes) for weight in {*model.weights, *model.beside}}
  layer, head = _gathered(model, how)
  gathered = network.layers_gathered * layer
  working = tokens * _working(model, how)
  saved = _saved(model, how)
  layers = model.num_layers
  if how.pipeline is None:
    activations = tokens * saved * layers
  else:
    stages, chunks = how.pipeline.stages, how.pipeline.chunks
    of_chunk = layers / stages / chunks
    if not network.dims:
      gathered = _gathered_on_gpus(model, how, layer)
    # Besides the slots: the received activations and cotangents and, with recomputation, the
    # residuals of the current chunk.
    stream, residuals = 2 * model.dim / how.residual_shards, saved * of_chunk
    slots = _num_slots(how.pipeline)
    if how.pipeline.recompute:
      activations = tokens * (slots * stream + 2 * stream + residuals)
    else:
      activations = tokens * (slots * (stream + residuals) + 2 * stream)
  return Memory(
    weights=sum(here[weight] * weight.held for weight in model.weights),
    optimizer=_optimizer(model, sizes),
    batch=12 * how.batch * model.seq_len / _shards(sizes) / sizes["context"],
    copies=sum(here[w] * _copies(w, how) for w in model.weights)
    + sum(here[w] * w.computed for w in model.beside)
    + _slices(model, how, network),
    gathered=gathered,
    activations=activations,
    working=working,
    logits=_logits(model, how, head),
    logits_beside_layers=how.pipeline is not None and network.dims > 0,
  )


@functools.cache
def _num_slots(pipeline: Pipeline) -> int:
  return pipeline.plan.num_slots


def _shards(sizes: Mapping[str, int]) -> int:
  return math.prod(sizes[axis] for axis in mesh.RULES["batch"])


def _optimizer(model: ModelSizes, sizes: Mapping[str, int]) -> float:
  if model.optimizer_on_host:
    return 0.0
  return sum(
    model.moments * optimized(weight, sizes, over_data=model.over_data)
    for weight in model.weights
    if weight.trained
  )


def optimized(weight: Weight, sizes: Mapping[str, int], *, over_data: bool) -> int:
  """Returns the number of elements of a weight that a device's optimizer updates."""
  if not over_data:
    return weight.per_device(sizes)
  spec = mesh.partition(weight.dims, weight.shape, sizes)
  spec = mesh.shard_over_data(spec, weight.shape, sizes)
  return weight.size // math.prod(sizes[axis] for axis in mesh.axes_of(spec))


def _copies(weight: Weight, how: Configuration) -> float:
  """Returns bytes per parameter of the compute-dtype copy, gradient and accumulated gradient.

  In a pipeline, that is the sum, and outside of the stack also a gradient; gradients of chunks are
  in `Memory.gathered`.
  """
  copy = weight.computed if weight.held != weight.computed else 0
  if not weight.trained:
    return copy if weight.held > weight.computed else 0
  if how.pipeline is not None:
    return copy + (4 if weight.layers > 0 else 4 + weight.computed)
  return copy + weight.computed + (4 if how.accumulation > 1 else 0)


def _gathered(model: ModelSizes, how: Configuration) -> tuple[float, float]:
  """Returns the bytes of a layer's all-gathered weights, and of the output projection."""
  sizes = how.sizes
  looped = [weight for weight in model.in_stack if weight.layers > 0]
  layer = 0.0
  for weight in looped or model.in_stack:
    if "fsdp" in weight.axes(sizes):
      size = weight.per_device(sizes, "fsdp", "pipeline")
      layer += weight.computed * size / (weight.layers if looped else model.num_layers)
  head = model.head.computed * model.head.per_device(sizes, "fsdp")
  return layer, head


def _slices(model: ModelSizes, how: Configuration, network: Network) -> float:
  """Returns the bytes of weights that the loop of a pipeline copies, as in compiled programs."""
  if how.pipeline is None:
    return 0.0
  if network.dims:  # Of the only chunk about half (fitted).
    copies = 1.0 if how.pipeline.chunks > 1 else 0.5
  elif how.pipeline.chunks == 1:
    copies = 0.0
  else:  # A loop over layers copies those of the forward and of the backward chunk.
    copies = 2.0 if how.pipeline.recompute else 1.0
  return copies * sum(
    weight.computed * weight.per_device(how.sizes) / how.pipeline.chunks
    for weight in model.in_stack
    if weight.layers > 0
  )


def _gathered_on_gpus(model: ModelSizes, how: Configuration, repeat: float) -> float:
  """Returns the bytes of all-gathered weights, and of gradients, in a chunk of a pipeline.

  They are the weights of a repeat of the pattern of layers, its gradients before fsdp scatters
  them, and the gradients of the chunk. `repeat` is the bytes of these weights.
  """
  assert how.pipeline is not None
  repeats = model.repeats / how.pipeline.num_places
  unreduced = sharded = 0.0
  for weight in model.in_stack:
    if weight.layers > 0 and weight.trained:
      nbytes = weight.computed / how.pipeline.chunks
      sharded += nbytes * weight.per_device(how.sizes)
      if "fsdp" in weight.axes(how.sizes):
        unreduced += nbytes * weight.per_device(how.sizes, "fsdp") / repeats
  return repeat + unreduced + sharded


def _saved(model: ModelSizes, how: Configuration) -> float:
  """Returns the bytes of residuals per token of a layer, an average over layers."""
  sizes, dim = how.sizes, model.dim / how.residual_shards
  if how.remat is not Remat.SAVE_EVERYTHING:
    return 2 * dim + (0 if how.remat.on_host else kept(model, how))
  inputs, outputs = widths(model, how)
  # Each norm saves two float32 arrays, in addition to the residual stream and matmul operands.
  activation = 2 * (model.mlp_factor - 1) * ffn(model, sizes)
  scores = 0 if model.fused_attention else 6 * model.seq_len * _heads(model, sizes)
  return 20 * dim + 2 * (inputs + outputs) + activation + scores


def kept(model: ModelSizes, how: Configuration) -> float:
  """Returns the bytes per token of a layer's matmul outputs that the remat policy saves.

  Policies that save matmuls omit those of experts.
  """
  outputs = 0.0
  for weight in model.in_stack:
    is_output = weight.share and not weight.is_last and not weight.is_routed
    if is_output and how.remat.saves(weight.role):
      outputs += max(1, weight.layers) * weight.outputs / _output_shards(weight, how)
  return 2 * outputs / model.num_layers


def _output_shards(weight: Weight, how: Configuration) -> int:
  if not weight.splits_outputs:
    return how.residual_shards
  return how.sizes["tensor"] if "tensor" in weight.axes(how.sizes) else 1


def _working(model: ModelSizes, how: Configuration) -> float:
  """Returns the bytes of temporaries per token of a layer's backward pass."""
  sizes = how.sizes
  scores = 0 if model.fused_attention else 10 * model.seq_len * _heads(model, sizes)
  scores = max(scores, 4 * model.recurrent.numbers / sizes["tensor"])
  wide = ffn(model, sizes)
  if model.moe_layers and model.capacity is None:
    # Tokens are all-gathered over `expert`, and have a row for each choice: four arrays of width F
    # and K + 2 of width D in bfloat16.
    rows = 8 * wide + 2 * (model.num_chosen + 2) * model.dim
    return sizes["expert"] * rows + 8 * model.dim + scores
  if model.capacity is not None:
    wide *= model.capacity / model.num_chosen
  # Four arrays in bfloat16, and a quarter of it twice, as in compiled programs.
  return 10 * (wide + model.dim) + scores


def widths(model: ModelSizes, how: Configuration) -> tuple[float, float]:
  """Returns the widths per device of a layer's matmul operands and of its saved matmul outputs.

  Both are averages over layers.
  """
  inputs = outputs = 0.0
  for weight in model.in_stack:
    if not weight.share:
      continue
    times = max(1, weight.layers)
    is_split = "tensor" in weight.axes(how.sizes) and not weight.splits_outputs
    inputs += times * weight.inputs / (how.sizes["tensor"] if is_split else how.residual_shards)
    if not weight.is_last:
      outputs += times * weight.outputs / _output_shards(weight, how)
  return inputs / model.num_layers, outputs / model.num_layers


def ffn(model: ModelSizes, sizes: Mapping[str, int]) -> float:
  """Returns F per device, an average over layers."""
  found = 0.0
  for weight in model.in_stack:
    if weight.share and weight.dims[-1] == "model" and "ffn" in weight.dims:
      tensor = sizes["tensor"] if "tensor" in weight.axes(sizes) else 1
      found += max(1, weight.layers) * weight.inputs / tensor
  return found / model.num_layers


def _heads(model: ModelSizes, sizes: Mapping[str, int]) -> float:
  return model.heads / model.num_layers / sizes["tensor"]


def _logits(model: ModelSizes, how: Configuration, head: float) -> float:
  """Returns the bytes of a chunk's logits, and of the output projection with its gradient."""
  sizes = how.sizes
  tensor = sizes["tensor"] if "tensor" in model.head.axes(sizes) else 1
  tokens = how.tokens(model.seq_len) / (1 if how.pipeline is None else how.pipeline.stages)
  logits = tokens / model.loss_chunks * model.vocab / tensor
  # The projection, its accumulated float32 gradient, and the chunk's gradient.
  return 8 * logits + 4 * head
