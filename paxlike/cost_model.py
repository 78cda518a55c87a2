# SPDX-License-Identifier: Apache-2.0
"""How long a training step takes, predicted from sizes and data sheets: a roofline.

Every rate of a data sheet, of products, memory and networks alike, is multiplied by one number for
the family of the chip, `ACHIEVED`: all in it that is fitted. The rules are:

- Products take the longer of their FLOPs and the bytes that they read and write. What norms,
  activations, rotary positions and residuals read and write is added. Attention counts the pairs
  that a causal mask leaves, its way back two and a half times the way forward.
- What is not saved is computed again: see `_again`.
- Gathers and sums of weights and gradients (axes fsdp and data), and sends between stages, go on
  beside the computation of layers: a pass takes the longer of the two.
- Sums of activations (tensor) and exchanges of tokens (expert) stand between products that need
  each other: they are added, but on TPUs, where XLA sends parts of a sum beside its product, only
  as far as the sums of a pass take longer than its products.
- A pipeline takes 1 / (1 - bubble) of the time of its chunks, by the bubble of its schedule.
- Weights are gathered in every pass of every part of the batch, and gradients summed once in each,
  unless `Configuration.reduced_once`; on TPUs as wholes, which sends twice as much.
"""

import dataclasses
import functools

from paxlike import chips, memory_model, networks
from paxlike.chips import Chip
from paxlike.configuration import Configuration
from paxlike.layers.pipeline import Pipeline
from paxlike.layers.remat import Remat
from paxlike.model_sizes import ModelSizes, Weight
from paxlike.networks import Network

# By a part of JAX's `device_kind`: the median of what published steps reach, of all rows of
# benchmarks/calibration.py for chips of the family; v6e has none, and takes that of v5e; Blackwell
# has none either, and takes that of Hopper.
ACHIEVED = {"H200": 0.66, "H100": 0.66, "A100": 0.66, "TPU v5 lite": 0.79, "TPU v5e": 0.79}
ACHIEVED |= {"B200": 0.66, "B300": 0.66}  # GB200 is a B200, too.
ACHIEVED |= {"TPU v5": 0.75, "TPU v6": 0.79}
_OF_BACKWARD = 2.5  # Attention's: five products for two.


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of a step, or of a part of it, by what they go to.

  Attributes:
    compute: FLOPs, those that are computed again among them.
    memory: Reading and writing, as far as it takes longer.
    tensor: Sums of activations over that axis.
    expert: Exchanges of tokens over that axis.
    weights: Gathering weights and summing gradients, as far as it takes longer than all of these.
    update: The optimizer.
    bubble: Stages that wait.
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
    """The seconds of each."""
    return dict(vars(self))

  def __add__(self, other: "Times") -> "Times":
    others = vars(other)
    return Times(**{name: seconds + others[name] for name, seconds in vars(self).items()})

  def __mul__(self, factor: float) -> "Times":
    return Times(**{name: factor * seconds for name, seconds in vars(self).items()})

  @property
  def total(self) -> float:
    """All of it."""
    return sum(vars(self).values())

  @property
  def bound(self) -> str:
    """What takes the largest part."""
    parts = vars(self)
    return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class Machine:
  """What a model is trained on.

  Attributes:
    chip: Each device.
    network: What joins them.
    achieved: Share of what data sheets say.
  """

  chip: Chip
  network: Network
  achieved: float


def machine(device_kind: str) -> Machine | None:
  """Returns what JAX calls so; None where too little is known of it."""
  chip, network = chips.find(device_kind), networks.find(device_kind)
  if chip is None or network is None or not chip.memory or not chip.bandwidth:
    return None
  kind = device_kind.lower()
  achieved = next(share for name, share in ACHIEVED.items() if name.lower() in kind)
  return Machine(chip, network, achieved)


def of(model: ModelSizes, how: Configuration, machine: Machine) -> Times:
  """Returns the seconds of an optimizer step."""
  return _Step(model, how, machine).times() * (1 / machine.achieved)


class _Step:
  """One step, at the rates of data sheets."""

  def __init__(self, model: ModelSizes, how: Configuration, machine: Machine):
    self._model, self._how = model, how
    self._chip, self._network = machine.chip, machine.network
    self._sizes = how.sizes
    self._tokens = how.rows * model.seq_len
    self._stages = how.sizes["pipeline"]

  def times(self) -> Times:
    how, pipeline = self._how, self._how.pipeline
    # Layers of one stage; a chunk is one v-th of them, and there are v times as many.
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
    """Returns what a stage's layers take in one direction for a microbatch."""
    again, attention_again, chunk_again = _again(self._how)
    ahead = self._products(self._model.in_stack)
    scores, others = self._scores(), self._elementwise()
    reduced = self._tensor(2)
    exchanged = self._experts()
    whole = ahead + scores + others + reduced + exchanged
    if forward:
      return whole
    trained = tuple(weight for weight in self._model.in_stack if weight.trained)
    back = ahead + self._products(trained)
    back += scores * _OF_BACKWARD + others * 2 + reduced + exchanged
    if again:
      kept = tuple(weight for weight in self._model.in_stack if not weight.is_last)
      back += self._products(kept) + reduced * 0.5 + exchanged
    if attention_again:
      back += scores + others
    if attention_again and not again:  # Policies that name products know none of experts.
      routed = tuple(weight for weight in self._model.in_stack if weight.is_routed)
      back += self._products(routed) + exchanged
    return back + whole if chunk_again else back

  def _products(self, weights: tuple[Weight, ...]) -> Times:
    """Returns the products of a stage's layers with weights, in one direction."""
    flops = nbytes = 0.0
    for weight in weights:
      if not weight.share:
        continue
      # Layers that are not repeated are computed by every stage.
      stages = self._stages if weight.layers > 0 else 1
      tensor = self._tensor_of(weight)
      factor = 0.5 if weight.in_8_bits else 1.0
      flops += factor * self._tokens * weight.flops / tensor / stages
      layers = max(1, weight.layers) / stages
      width = (weight.inputs + weight.outputs) / tensor * layers
      gathered = weight.per_device(self._sizes, "fsdp")
      nbytes += 2 * factor * (self._tokens * width + gathered)
      if weight.in_8_bits:  # Their operands are read, and written in 8 bits, first.
        nbytes += 3 * self._tokens * width
    return self._roofline(flops, nbytes)

  def _scores(self) -> Times:
    model, tensor = self._model, self._sizes["tensor"]
    flops = model.scores[1 if model.fused_attention else 0] / tensor / self._stages
    nbytes = 0.0
    if not model.fused_attention:  # Logits and weights, each written and read.
      nbytes = 8 * model.seq_len * model.heads / tensor / self._stages
    return Times(
      compute=self._tokens * flops / self._chip.flops,
      memory=self._tokens * nbytes / self._chip.bandwidth,
    )

  def _elementwise(self) -> Times:
    """Returns what norms, activations and the like read and write, forward."""
    model, sizes = self._model, self._sizes
    _, outputs = memory_model.widths(model, sizes)
    ffn = memory_model.ffn(model, sizes)
    # Of queries and keys, what turns is read and written.
    turned = max(0.0, outputs - model.dim - (model.mlp_factor - 1) * ffn)
    width = 10 * model.dim / self._how.residual_cut + 2 * turned + model.mlp_factor * ffn
    nbytes = 2 * width * self._tokens * model.num_layers / self._stages
    return Times(memory=nbytes / self._chip.bandwidth)

  def _tensor(self, count: int) -> Times:
    """Returns `count` sums of each layer's activations."""
    model, group = self._model, self._how.group("tensor")
    one = networks.reduce(self._network, group, 2 * self._tokens * model.dim)
    # Of tokens that go to several experts, all rows are summed.
    rows = model.num_layers + model.moe_layers * (model.num_chosen - 1) / 2
    return Times(tensor=count * one * rows / self._stages)

  def _experts(self) -> Times:
    """Returns one way of tokens to experts and back."""
    model, group = self._model, self._how.group("expert")
    nbytes = 2 * self._tokens * model.dim
    if model.capacity is None:
      one = networks.gather(self._network, group, group.size * nbytes)
    else:
      one = networks.exchange(self._network, group, model.capacity * nbytes)
    return Times(expert=2 * one * model.moe_layers / self._stages)

  def _exchanged(self) -> tuple[float, float]:
    """Returns the seconds of what goes on beside a stage's layers, forward and backward."""
    gathered, reduced = self._gathers(self._model.in_stack)
    sent = 0.0
    if (pipeline := self._how.pipeline) is not None:
      nbytes = 2 * self._tokens * self._model.dim
      group = self._how.group("pipeline")
      sent = pipeline.chunks * networks.send(self._network, group, nbytes)
      gathered_again = gathered if pipeline.recompute else 0.0
    else:
      gathered_again = 0.0
    back = gathered + gathered_again + (0 if self._how.reduced_once else reduced)
    return gathered + sent, back + sent

  def _reduced(self) -> float:
    """Returns the seconds of summing the gradients of a stage's layers."""
    return self._gathers(self._model.in_stack)[1]

  def _gathers(self, weights: tuple[Weight, ...]) -> tuple[float, float]:
    """Returns the seconds of gathering weights once, and of summing their gradients."""
    how = self._how
    gathered = reduced = 0.0
    times = 2 if self._network.sums_whole and not how.reduced_once else 1
    for weight in weights:
      axes = weight.axes(self._sizes)
      here = weight.computed * weight.per_device(self._sizes)
      if "fsdp" in axes:
        once = networks.gather(self._network, how.group("fsdp"), here * self._sizes["fsdp"])
        gathered += once
        reduced += times * once if weight.trained else 0.0
      copies = {"data", "fsdp", "expert"} - axes
      if weight.trained:
        reduced += networks.reduce(self._network, how.group(*copies), here)
    return gathered, reduced

  def _loss(self) -> Times:
    """Returns what embeddings and logits of a microbatch take, forward and backward."""
    model, head = self._model, self._model.head
    tensor = self._tensor_of(head)
    tokens = self._tokens / self._stages
    flops = (3 if head.trained else 2) * tokens * head.flops / tensor
    # Written, read for the sum and for the gradient, that is written, and read for two products.
    nbytes = 12 * tokens * model.vocab / tensor + 4 * head.computed * head.size / tensor
    times = self._roofline(flops, nbytes)
    gathered, reduced = self._gathers(model.outside)
    times = _beside(times, gathered + (0 if self._how.reduced_once else reduced))
    group = self._how.group("pipeline")
    spread = 2 * networks.gather(self._network, group, 2 * self._tokens * model.dim)
    return times + self._tensor(2) * (self._stages / model.num_layers) + Times(weights=spread)

  def _update(self) -> Times:
    """Returns what the optimizer, and sums of gradients of parts of the batch, take."""
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
  """Returns the work with what of the exchange goes on when it is done."""
  return work + Times(weights=max(0.0, exchanged - work.total))


def _again(how: Configuration) -> tuple[bool, bool, bool]:
  """Returns what is computed again: products, attention and the like, and whole chunks.

  Of products the last of a layer is not: nothing but a sum needs it.
  """
  nothing, everything = Remat.SAVE_NOTHING, Remat.SAVE_EVERYTHING
  chunks = how.pipeline is not None and how.pipeline.recompute
  return how.remat is nothing, how.remat is not everything, chunks


@functools.cache
def _bubble(pipeline: Pipeline) -> float:
  return pipeline.plan.bubble
