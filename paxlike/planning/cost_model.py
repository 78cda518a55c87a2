# SPDX-License-Identifier: Apache-2.0
"""A roofline model of the time of a training step, from model sizes and data sheets.

All rates of a data sheet (FLOP/s, memory and network bandwidth) are multiplied by one number per
chip family, `ACHIEVED`, the only fitted parameter. The rules are:

- A matmul takes the longer of its FLOPs and its memory traffic. The traffic of norms, activations,
  rotary positions and residuals is added. Attention counts causal pairs; its backward pass takes
  2.5 times the forward pass.
- Activations that are not saved are recomputed: see `_recomputed`.
- All-gathers of weights, reductions of gradients (axes fsdp and data) and sends between stages
  overlap with the computation of layers: a pass takes the longer of the two.
- All-reduces of activations (tensor) and exchanges of tokens (expert) lie between dependent
  matmuls, so their time is added. On TPUs, where XLA overlaps chunks of an all-reduce with its
  matmul, only the time by which a pass's all-reduces exceed its matmuls is added.
- A pipeline takes 1 / (1 - bubble) of the time of its chunks.
- Weights are all-gathered in every pass of every microbatch. Gradients are reduced once per
  microbatch, on TPUs by all-reduces, which send twice as much as reduce-scatters. With
  `Configuration.reduced_once`, they are reduced once per step, by reduce-scatters.
"""

import dataclasses
import functools

from paxlike.devices import chips, interconnect
from paxlike.devices.chips import Chip
from paxlike.devices.interconnect import Network
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning import memory_model
from paxlike.planning.model_sizes import ModelSizes, Weight
from paxlike.planning.parallel_config import Configuration

# Keyed by a substring of JAX's `device_kind`: the median over the published steps of the family in
# benchmarks/calibration.py. There are none of v6e, which uses the value of v5e, and of Blackwell,
# which uses that of Hopper.
ACHIEVED = {"H200": 0.66, "H100": 0.66, "A100": 0.66, "TPU v5 lite": 0.79, "TPU v5e": 0.79}
ACHIEVED |= {"B200": 0.66, "B300": 0.66}  # "B200" also matches GB200.
ACHIEVED |= {"TPU v5": 0.75, "TPU v6": 0.79}
_OF_BACKWARD = 2.5  # Attention: five matmuls backward, two forward.


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of a step, or of a part of it, by cause.

  Attributes:
    compute: FLOPs, recomputation included.
    memory: Memory traffic, as far as it takes longer than the FLOPs.
    tensor: All-reduces of activations over `tensor`.
    expert: Exchanges of tokens over `expert`.
    weights: Exposed all-gathers of weights, reductions of gradients and sends between stages.
    update: The optimizer.
    bubble: Idle pipeline stages.
  """

  compute: float = 0.0
  memory: float = 0.0
  tensor: float = 0.0
  expert: float = 0.0
  weights: float = 0.0
  update: float = 0.0
  bubble: float = 0.0

  @property
  def parts(self) -> dict[str, float]:
    """The seconds by cause."""
    return dict(vars(self))

  def __add__(self, other: "Times") -> "Times":
    others = vars(other)
    return Times(**{name: seconds + others[name] for name, seconds in vars(self).items()})

  def __mul__(self, factor: float) -> "Times":
    return Times(**{name: factor * seconds for name, seconds in vars(self).items()})

  @property
  def total(self) -> float:
    """The sum."""
    return sum(vars(self).values())

  @property
  def bound(self) -> str:
    """The cause that takes the longest."""
    parts = vars(self)
    return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class Machine:
  """The hardware of a run.

  Attributes:
    chip: The chip of each device.
    network: The interconnect.
    achieved: The achieved fraction of data sheet rates.
  """

  chip: Chip
  network: Network
  achieved: float


def machine(device_kind: str) -> Machine | None:
  """Returns the machine of a JAX `device_kind`; None if its data sheet is unknown."""
  chip, network = chips.find(device_kind), interconnect.find(device_kind)
  if chip is None or network is None or not chip.memory or not chip.bandwidth:
    return None
  kind = device_kind.lower()
  achieved = next(share for name, share in ACHIEVED.items() if name.lower() in kind)
  return Machine(chip, network, achieved)


def of(model: ModelSizes, how: Configuration, machine: Machine) -> Times:
  """Returns the seconds of an optimizer step."""
  return _Step(model, how, machine).times() * (1 / machine.achieved)


class _Step:
  """One step at data sheet rates."""

  def __init__(self, model: ModelSizes, how: Configuration, machine: Machine):
    self._model, self._how = model, how
    self._chip, self._network = machine.chip, machine.network
    self._sizes = how.sizes
    self._tokens = how.sequences * model.seq_len
    self._stages = how.sizes["pipeline"]

  def times(self) -> Times:
    how, pipeline = self._how, self._how.pipeline
    # The forward and the backward time of all chunks of one stage.
    work = [self._layers(forward=True), self._layers(forward=False)]
    exchanged = self._exchanged()
    if self._network.beside_products:
      work = [dataclasses.replace(one, tensor=max(0.0, one.tensor - one.compute)) for one in work]
    passes = [_beside(one, others) for one, others in zip(work, exchanged, strict=True)]
    layers = passes[0] + passes[1]
    if pipeline is not None:
      share = _bubble(pipeline)
      layers += Times(bubble=layers.total * share / (1 - share))
    every = (layers + self._loss()) * how.microbatches + self._update()
    return every + Times(weights=self._reduced() if how.reduced_once else 0.0)

  def _layers(self, *, forward: bool) -> Times:
    """Returns the time of a stage's layers in one direction, for a microbatch."""
    matmuls_again, attention_again, chunk_again = _recomputed(self._how)
    matmuls = self._matmuls(self._model.in_stack)
    scores, others = self._scores(), self._elementwise()
    reduced = self._tensor(2)
    exchanged = self._experts()
    forward_pass = matmuls + scores + others + reduced + exchanged
    if forward:
      return forward_pass
    trained = tuple(weight for weight in self._model.in_stack if weight.trained)
    backward_pass = matmuls + self._matmuls(trained)
    backward_pass += scores * _OF_BACKWARD + others * 2 + reduced + exchanged
    if matmuls_again:
      again = tuple(weight for weight in self._model.in_stack if not weight.is_last)
      backward_pass += self._matmuls(again) + reduced * 0.5 + exchanged
    if attention_again:
      backward_pass += scores + others
    if attention_again and not matmuls_again:  # Policies that save matmuls omit expert matmuls.
      routed = tuple(weight for weight in self._model.in_stack if weight.is_routed)
      backward_pass += self._matmuls(routed) + exchanged
    return backward_pass + forward_pass if chunk_again else backward_pass

  def _matmuls(self, weights: tuple[Weight, ...]) -> Times:
    """Returns the time of a stage's matmuls with weights, in one direction."""
    flops = nbytes = 0.0
    for weight in weights:
      if not weight.share:
        continue
      # Every stage computes the layers that are not repeated.
      stages = self._stages if weight.layers > 0 else 1
      tensor = self._tensor_of(weight)
      factor = 0.5 if weight.in_8_bits else 1.0
      flops += factor * self._tokens * weight.flops / tensor / stages
      layers = max(1, weight.layers) / stages
      width = (weight.inputs + weight.outputs) / tensor * layers
      gathered = weight.per_device(self._sizes, "fsdp")
      nbytes += 2 * factor * (self._tokens * width + gathered)
      if weight.in_8_bits:  # Quantization reads 16-bit operands and writes 8-bit ones.
        nbytes += 3 * self._tokens * width
    return self._roofline(flops, nbytes)

  def _scores(self) -> Times:
    model, tensor = self._model, self._sizes["tensor"]
    flops = model.scores[1 if model.fused_attention else 0] / tensor / self._stages
    nbytes = 0.0
    if not model.fused_attention:  # Logits and softmax weights are both written and read.
      nbytes = 8 * model.seq_len * model.heads / tensor / self._stages
    return Times(
      compute=self._tokens * flops / self._chip.flops,
      memory=self._tokens * nbytes / self._chip.bandwidth,
    )

  def _elementwise(self) -> Times:
    """Returns the time of the forward memory traffic of norms, activations and rotary positions."""
    model, sizes = self._model, self._sizes
    _, outputs = memory_model.widths(model, sizes)
    ffn = memory_model.ffn(model, sizes)
    # RoPE reads and writes queries and keys.
    rotated = max(0.0, outputs - model.dim - (model.mlp_factor - 1) * ffn)
    width = 10 * model.dim / self._how.residual_shards + 2 * rotated + model.mlp_factor * ffn
    nbytes = 2 * width * self._tokens * model.num_layers / self._stages
    return Times(memory=nbytes / self._chip.bandwidth)

  def _tensor(self, count: int) -> Times:
    """Returns the time of `count` all-reduces of each layer's activations over `tensor`."""
    model, group = self._model, self._how.group("tensor")
    one = interconnect.reduce(self._network, group, 2 * self._tokens * model.dim)
    # In layers with experts, a token is all-reduced once for each of its experts.
    layers = model.num_layers + model.moe_layers * (model.num_chosen - 1) / 2
    return Times(tensor=count * one * layers / self._stages)

  def _experts(self) -> Times:
    """Returns the time of the exchange of tokens to experts and back."""
    model, group = self._model, self._how.group("expert")
    nbytes = 2 * self._tokens * model.dim
    if model.capacity is None:
      one = interconnect.gather(self._network, group, group.size * nbytes)
    else:
      one = interconnect.exchange(self._network, group, model.capacity * nbytes)
    return Times(expert=2 * one * model.moe_layers / self._stages)

  def _exchanged(self) -> tuple[float, float]:
    """Returns (forward, backward) seconds of communication that overlaps with a stage's layers."""
    gathered, reduced = self._gathers(self._model.in_stack)
    sent = 0.0
    if (pipeline := self._how.pipeline) is not None:
      nbytes = 2 * self._tokens * self._model.dim
      group = self._how.group("pipeline")
      sent = pipeline.chunks * interconnect.send(self._network, group, nbytes)
      gathered_again = gathered if pipeline.recompute else 0.0
    else:
      gathered_again = 0.0
    backward = gathered + gathered_again + (0 if self._how.reduced_once else reduced)
    return gathered + sent, backward + sent

  def _reduced(self) -> float:
    """Returns the seconds of reducing the gradients of a stage's layers."""
    return self._gathers(self._model.in_stack)[1]

  def _gathers(self, weights: tuple[Weight, ...]) -> tuple[float, float]:
    """Returns the seconds of all-gathering weights once, and of reducing their gradients once."""
    how = self._how
    gathered = reduced = 0.0
    times = 2 if self._network.sums_whole and not how.reduced_once else 1
    for weight in weights:
      axes = weight.axes(self._sizes)
      here = weight.computed * weight.per_device(self._sizes)
      if "fsdp" in axes:
        once = interconnect.gather(self._network, how.group("fsdp"), here * self._sizes["fsdp"])
        gathered += once
        reduced += times * once if weight.trained else 0.0
      copies = {"data", "fsdp", "expert"} - axes
      if weight.trained:
        reduced += interconnect.reduce(self._network, how.group(*copies), here)
    return gathered, reduced

  def _loss(self) -> Times:
    """Returns the time of embeddings and logits of a microbatch, forward and backward."""
    model, head = self._model, self._model.head
    tensor = self._tensor_of(head)
    tokens = self._tokens / self._stages
    flops = (3 if head.trained else 2) * tokens * head.flops / tensor
    # Logits: written, read for the logsumexp and for the gradient. Gradient: written, read twice.
    nbytes = 12 * tokens * model.vocab / tensor + 4 * head.computed * head.size / tensor
    times = self._roofline(flops, nbytes)
    gathered, reduced = self._gathers(model.outside)
    times = _beside(times, gathered + (0 if self._how.reduced_once else reduced))
    group = self._how.group("pipeline")
    spread = 2 * interconnect.gather(self._network, group, 2 * self._tokens * model.dim)
    return times + self._tensor(2) * (self._stages / model.num_layers) + Times(weights=spread)

  def _update(self) -> Times:
    """Returns the time of the optimizer update and of gradient accumulation."""
    model, total = self._model, 0.0
    for weight in model.weights:
      here = weight.per_device(self._sizes)
      if weight.trained:
        total += here * (2 * weight.held + 2 * model.moments + 4 + weight.computed)
        parts = self._how.microbatches
        total += here * (parts * (8 + weight.computed) if parts > 1 else 0)
    return Times(update=total / self._chip.bandwidth)

  def _tensor_of(self, weight: Weight) -> int:
    return self._sizes["tensor"] if "tensor" in weight.axes(self._sizes) else 1

  def _roofline(self, flops: float, nbytes: float) -> Times:
    compute, memory = flops / self._chip.flops, nbytes / self._chip.bandwidth
    return Times(compute=compute, memory=max(0.0, memory - compute))


def _beside(work: Times, exchanged: float) -> Times:
  """Returns the work plus the seconds of communication that it does not hide."""
  return work + Times(weights=max(0.0, exchanged - work.total))


def _recomputed(how: Configuration) -> tuple[bool, bool, bool]:
  """Returns whether the backward pass recomputes (matmuls, attention and elementwise, chunks)."""
  nothing, everything = Remat.SAVE_NOTHING, Remat.SAVE_EVERYTHING
  chunks = how.pipeline is not None and how.pipeline.recompute
  return how.remat is nothing, how.remat is not everything, chunks


@functools.cache
def _bubble(pipeline: Pipeline) -> float:
  return pipeline.plan.bubble
