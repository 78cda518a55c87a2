# SPDX-License-Identifier: Apache-2.0
"""A model of the time of a training step by its physical causes, from model sizes and data sheets.

- Each matmul takes the longer of its FLOPs and its memory traffic, at the rates of
  `devices.kernel_rates`. Attention counts causal pairs; its backward pass has 2.5 times the FLOPs
  of the forward pass. Norms, activations, rotary positions, residuals and casts to 8 bits move
  bytes.
- Outputs of linear maps that the remat policy does not save are computed again, as are attention
  and everything else between them, except with SAVE_EVERYTHING.
- All-gathers of weights, reductions of gradients (axes fsdp and data) and sends between stages
  overlap with the computation of layers: a pass takes the longer of the two, plus, on GPUs,
  `contention` times the shorter, since both use the same memory and multiprocessors.
- Over `context`, keys and values go around a ring beside attention, which is not fused.
- All-reduces of activations (tensor) and exchanges of tokens (expert) lie between dependent
  matmuls, so their time is added. On TPUs, where XLA overlaps chunks of an all-reduce with its
  matmul, only the time by which a pass's all-reduces exceed its matmuls is added.
- Every kernel on a GPU takes a moment to start.
- A pipeline takes 1 / (1 - bubble) of the time of its chunks. In a loop over ticks, compiled
  programs hide few collectives (docs/results.md): all are added, but on TPUs only half of the
  gathers, reductions and sends. Slices of weights and sums of gradients are copied.
- Weights are all-gathered in every pass of every microbatch. Gradients are reduced once per
  microbatch, on TPUs by all-reduces, which send twice as much as reduce-scatters; with
  `Configuration.reduced_once` only in the last one, by reduce-scatters.
- Activations that go to the host's memory overlap with their pass, optimizer state does not.
- Every doubling of the number of slices or nodes adds `jitter` to the step: all wait for the last.

Other programs than paxlike do some of this in other ways: see `software`.
"""

import functools

from paxlike.devices import interconnect
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning import matmul_time, memory_model
from paxlike.planning.attention_time import AttentionTime
from paxlike.planning.machines import Machine
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.times import Times
from paxlike.planning.weights import Weight

# Bytes that the loop of a pipeline moves for each number of a weight and microbatch, with one chunk
# per stage and with several: for slices of weights, and for the float32 sums of gradients. Weights
# outside of the stack have sums only. Counted from its operations; see docs/results.md.
_SLICED, _SUMMED, _OUTSIDE = (12, 20), (18, 30), 40
# Kernels of a layer, forward and backward: `--mode=compile --topology=h200-1 --kernels` has 84 for
# each of Synthetic126M, 89 of Llama3_8B. With recomputation or experts there are more.
_LAUNCHES = 85
# The share of gathers, reductions and sends that the loop of a pipeline on TPUs waits for: 0.07 to
# 0.83 in the programs of docs/results.md.
_WAITED_ON_TPUS = 0.5


def of(model: ModelSizes, how: Configuration, machine: Machine) -> Times:
  """Returns the seconds of an optimizer step."""
  if how.pipeline is not None:
    model = model.in_stages(how.pipeline.stages, how.pipeline.chunks)
  return _Step(model, how, machine).times()


class _Step:
  """One step."""

  def __init__(self, model: ModelSizes, how: Configuration, machine: Machine):
    self._model, self._how = model, how
    self._machine, self._software = machine, machine.software
    self._chip, self._network = machine.chip, machine.network
    self._bandwidth = machine.rates.memory_bandwidth(machine.chip)
    self._sizes = how.sizes
    self._tokens = how.tokens(model.seq_len)
    self._stages = how.sizes["pipeline"]
    self._attention = AttentionTime(model, how, machine)
    self._scans_ticks = how.pipeline is not None and self._software.scans_ticks

  def times(self) -> Times:
    how, pipeline = self._how, self._how.pipeline
    # The forward and the backward time of all chunks of one stage.
    forward = self._offloaded(self._layers(forward=True))
    backward = self._offloaded(self._layers(forward=False))
    gathered, returned = self._overlapped()
    backward_pass = self._beside(backward, returned)
    launches = _LAUNCHES * self._model.num_layers / self._stages
    layers = self._beside(forward, gathered) + backward_pass
    if self._scans_ticks:
      layers += self._copied()
    layers += Times(launch=launches * self._machine.rates.launch)
    if pipeline is not None:
      share = _bubble(pipeline)
      layers += Times(bubble=layers.total * share / (1 - share))
    step = (layers + self._loss()) * how.microbatches + self._update()
    if how.reduced_once:  # Beside the backward pass of the last microbatch.
      reduced = self._gathers(self._model.weights)[1]
      step += self._beside(backward, returned + reduced) + backward_pass * -1
    return step + Times(jitter=step.total * self._jitter())

  def _jitter(self) -> float:
    nodes = max(1.0, self._how.num_devices / self._how.group(*self._sizes).within)
    return self._machine.fitted.jitter * (int(nodes) - 1).bit_length()

  def _layers(self, *, forward: bool) -> Times:
    """Returns the time of a stage's layers in one direction, for a microbatch."""
    model, remat = self._model, self._how.remat
    matmuls = self._matmuls(model.in_stack, "forward")
    attention, others = self._attention.computed(), self._elementwise() + self._permuted()
    experts = self._reduced_experts
    exchanged = self._exchanged()
    # After attention, and after the MLP, or once for each row of the experts.
    reduced = self._tensor(2 * model.num_layers - model.moe_layers, experts)
    keys = self._attention.sent(attention)
    forward_pass = matmuls + attention + others + self._exposed(reduced, matmuls) + exchanged + keys
    if forward:
      return forward_pass
    trained = tuple(weight for weight in model.in_stack if weight.trained)
    products = self._matmuls(model.in_stack, "inputs") + self._matmuls(trained, "weights")
    attention_backward = self._attention.computed(backward=True)
    rest = (
      attention_backward
      + others * 2
      + exchanged
      + self._attention.sent(attention_backward, copies=3)
    )
    if remat is not Remat.SAVE_EVERYTHING:
      # Policies that save matmuls omit those of experts.
      recomputed = tuple(
        weight
        for weight in model.in_stack
        if not weight.is_last and (weight.is_routed or not remat.saves(weight.role))
      )
      products += self._matmuls(recomputed, "forward")
      rest += attention + others + exchanged + keys
      dense = 0 if remat.saves("output") else model.num_layers
      again = self._tensor(dense, experts)
      reduced = reduced[0] + again[0], reduced[1] + again[1]
    backward_pass = products + rest + self._exposed(reduced, products)
    pipeline = self._how.pipeline
    if pipeline is not None and pipeline.recompute:
      backward_pass += forward_pass
    return backward_pass

  def _offloaded(self, work: Times) -> Times:
    """Returns the work of a pass, and what it does not hide of activations that go to the host."""
    if not self._how.remat.on_host:
      return work
    layers = self._model.num_layers / self._stages
    nbytes = self._tokens * memory_model.kept(self._model, self._how) * layers
    return work + Times(host=max(0.0, nbytes / self._network.host - work.total))

  def _exposed(self, reduced: tuple[float, float], matmuls: Times) -> Times:
    """Returns what matmuls do not hide of all-reduces: those of `_tensor`, dense and of experts."""
    dense, experts = reduced
    if self._network.beside_products and not self._scans_ticks:
      return Times(tensor=max(0.0, dense + experts - matmuls.compute))
    if self._software.hides_tensor:
      dense = max(self._machine.fitted.unhidden * dense, dense - matmuls.compute)
    return Times(tensor=dense + experts)

  def _matmuls(self, weights: tuple[Weight, ...], direction: str) -> Times:
    """Returns the time of a stage's matmuls with weights.

    Args:
      weights: The weights.
      direction: "forward", "inputs" (for their gradients) or "weights" (for their gradients).
    """
    total = Times()
    for weight in weights:
      if weight.share:
        # Every stage computes the layers that are not repeated.
        stages = self._stages if weight.layers > 0 else 1
        total += self._matmul(weight, direction, self._tokens) * (max(1, weight.layers) / stages)
    return total

  def _matmul(self, weight: Weight, direction: str, tokens: float) -> Times:
    sizes = self._tensor_of(weight), self._sizes["expert"]
    return matmul_time.of(weight, direction, tokens, *sizes, self._model, self._machine)

  def _elementwise(self) -> Times:
    """Returns the time of the forward memory traffic of norms, activations and rotary positions."""
    model, sizes = self._model, self._sizes
    _, outputs = memory_model.widths(model, self._how)
    ffn = memory_model.ffn(model, sizes)
    # RoPE reads and writes queries and keys.
    rotated = max(0.0, outputs - model.dim - (model.mlp_factor - 1) * ffn)
    if model.moe_layers and model.capacity is None:
      ffn *= self._copies / model.num_chosen
    width = 10 * model.dim / self._how.residual_shards + 2 * rotated + model.mlp_factor * ffn
    nbytes = 2 * width * self._tokens * model.num_layers / self._stages
    return Times(memory=nbytes / self._bandwidth)

  def _permuted(self) -> Times:
    """Returns the time of moving tokens into the order of their experts and back."""
    model = self._model
    if not model.moe_layers:
      return Times()
    # Each row is read and written, once on either way.
    rows = self._copies * self._tokens
    in_columns = model.capacity is not None and not self._software.all_to_all
    if in_columns or not self._software.splits_experts:
      rows /= self._sizes["tensor"]
    seconds = self._machine.fitted.permuted * 8 * rows * model.dim / self._bandwidth
    return Times(memory=seconds * model.moe_layers / self._stages)

  def _tensor(self, dense: float, experts: float = 0.0) -> tuple[float, float]:
    """Returns the seconds of all-reduces over `tensor`, so many of the tokens of all layers."""
    group = self._how.group("tensor")
    one = interconnect.reduce(self._network, group, 2 * self._tokens * self._model.dim)
    return dense * one / self._stages, experts * one / self._stages

  @property
  def _copies(self) -> float:
    """The rows that a device computes of each of its tokens in a layer of experts."""
    model = self._model
    if model.capacity is not None:
      return model.capacity
    # Gathered tokens are permuted whether the device has their experts or not.
    gathered = 1 if self._software.all_to_all else self._sizes["expert"]
    return model.num_chosen * gathered

  @property
  def _in_columns(self) -> bool:
    """Whether each device along `tensor` sends only some columns of the tokens to experts."""
    placed = self._model.capacity is not None
    return not self._software.all_to_all and (placed or self._sums_experts_first)

  @property
  def _sums_experts_first(self) -> bool:
    """Whether outputs of a token's dropless experts are summed before they are over `tensor`."""
    tensor, model = self._sizes["tensor"], self._model
    routed = [weight for weight in model.in_stack if weight.is_routed]
    # Weights in less than 16 bits are quantized.
    are_plain = all(weight.operands is None and weight.held >= 2 for weight in routed)
    are_split = all("tensor" in weight.axes(self._sizes) for weight in routed)
    is_dropless = model.capacity is None and not self._software.all_to_all
    return is_dropless and are_plain and are_split and model.dim % tensor == 0

  @property
  def _reduced_experts(self) -> float:
    """How many all-reduces of all tokens the outputs of experts take in a forward pass."""
    if not self._software.splits_experts:
      return 0.0
    each = self._copies
    if self._sums_experts_first:
      # Gathered tokens take an all-gather and a reduce-scatter, which are half an all-reduce each,
      # and the device's own outputs an all-gather.
      gathered = self._sizes["expert"]
      each = 1 if gathered == 1 else gathered + 0.5
    return self._model.moe_layers * each

  def _exchanged(self) -> Times:
    """Returns the exposed time of the exchange of tokens to experts and back."""
    model, group = self._model, self._how.group("expert")
    nbytes = 2 * self._tokens * model.dim
    if self._software.all_to_all:  # Each device along `tensor` sends its share of the tokens.
      nbytes /= self._how.residual_shards
    if self._in_columns:
      nbytes /= self._sizes["tensor"]
    if model.capacity is not None or self._software.all_to_all:
      copies = self._copies
      if self._software.sends_once:  # The mean number of devices that have its experts.
        copies = group.size * (1 - (1 - 1 / group.size) ** copies)
      one = interconnect.exchange(self._network, group, copies * nbytes)
    else:
      one = interconnect.gather(self._network, group, group.size * nbytes)
    return Times(expert=2 * one * model.moe_layers / self._stages)

  def _overlapped(self) -> tuple[float, float]:
    """Returns (forward, backward) seconds of communication that overlaps with a stage's layers."""
    gathered, reduced = self._gathers(self._model.in_stack)
    sent = 0.0
    if (pipeline := self._how.pipeline) is not None:
      nbytes = 2 * self._tokens * self._model.dim / self._how.residual_shards
      group = self._how.group("pipeline")
      sent = pipeline.chunks * interconnect.send(self._network, group, nbytes)
      gathered_again = gathered if pipeline.recompute else 0.0
    else:
      gathered_again = 0.0
    backward = gathered + gathered_again + (0 if self._how.reduced_once else reduced)
    return gathered + sent, backward + sent

  def _gathers(self, weights: tuple[Weight, ...]) -> tuple[float, float]:
    """Returns the seconds of all-gathering weights once, and of reducing their gradients once.

    There is a collective for each layer.
    """
    how = self._how
    gathered = reduced = 0.0
    groups = set()
    times = 2 if self._network.sums_whole and not how.reduced_once else 1
    for weight in weights:
      axes = weight.axes(self._sizes)
      here = weight.computed * weight.per_device(self._sizes)
      if "fsdp" in axes:
        whole = here * self._sizes["fsdp"]
        once = interconnect.gather(self._network, how.group("fsdp"), whole, count=0)
        gathered += once
        reduced += times * once if weight.trained else 0.0
      copies = {"data", "fsdp", "expert", "context"} - axes
      if weight.trained:
        reduced += interconnect.reduce(self._network, how.group(*copies), here, count=0)
        groups.add(how.group(*copies))
    layers = [self._model.num_layers if weight.layers < 0 else weight.layers for weight in weights]
    count = max(1.0, max(layers) / self._stages)
    if gathered:
      started = count * interconnect.latency(self._network, how.group("fsdp"))
      gathered, reduced = gathered + started, reduced + (times * started if groups else 0.0)
    for group in groups:
      reduced += interconnect.reduce(self._network, group, 0.0, count=count)
    return gathered, reduced

  def _loss(self) -> Times:
    """Returns the time of embeddings and logits of a microbatch, forward and backward."""
    model, head = self._model, self._model.head
    tensor = self._tensor_of(head)
    tokens = self._tokens / (self._stages if self._software.spreads_loss else 1)
    times = self._matmul(head, "forward", tokens) + self._matmul(head, "inputs", tokens)
    if head.trained:
      times += self._matmul(head, "weights", tokens)
    # Logits: written, read for the logsumexp and for the gradient. Gradient: written, read twice.
    times += Times(memory=12 * tokens * model.vocab / tensor / self._bandwidth)
    times *= model.predictions
    if self._scans_ticks:
      sums = sum(w.trained * w.per_device(self._sizes) for w in model.outside)
      times += Times(memory=_OUTSIDE * sums / self._bandwidth)
    gathered, reduced = self._gathers(model.outside)
    times = self._beside(times, gathered + (0 if self._how.reduced_once else reduced))
    times += Times(tensor=self._tensor(2 * self._stages)[0])
    if not self._software.spreads_loss:
      return times
    group = self._how.group("pipeline")
    spread = 2 * interconnect.gather(self._network, group, 2 * self._tokens * model.dim)
    return times + Times(weights=spread)

  def _update(self) -> Times:
    """Returns the time of the optimizer update and of gradient accumulation."""
    model, total, moved = self._model, 0.0, 0.0
    over_data = model.over_data or self._software.optimizer_over_data
    parts = self._how.microbatches
    for weight in model.weights:
      if weight.trained:
        own = memory_model.optimized(weight, self._sizes, over_data=over_data)
        total += own * (2 * weight.held + 2 * model.moments + 4) + own * weight.computed
        moved += 2 * own * model.moments if model.optimizer_on_host else 0.0
        if parts > 1 and not self._scans_ticks:  # The float32 sum is read and written.
          total += 8 * parts * weight.per_device(self._sizes)
    return Times(update=total / self._bandwidth, host=moved / self._network.host)

  def _copied(self) -> Times:
    """Returns the time in which the loop of a pipeline copies weights and gradients of chunks."""
    assert self._how.pipeline is not None
    several, total = self._how.pipeline.chunks > 1, 0.0
    for weight in self._model.in_stack:
      if weight.layers > 0:
        nbytes = _SLICED[several] + weight.trained * _SUMMED[several]
        total += nbytes * weight.per_device(self._sizes)
    return Times(memory=total / self._bandwidth)

  def _tensor_of(self, weight: Weight) -> int:
    return self._sizes["tensor"] if "tensor" in weight.axes(self._sizes) else 1

  def _beside(self, work: Times, exchanged: float) -> Times:
    """Returns the work plus the seconds by which communication that runs beside it delays it."""
    if self._scans_ticks:
      return work + Times(weights=(1.0 if self._chip.is_gpu else _WAITED_ON_TPUS) * exchanged)
    shorter = min(work.total, exchanged)
    delay = max(0.0, exchanged - work.total)
    if self._chip.is_gpu:
      delay += self._machine.fitted.contention * shorter
    return work + Times(weights=delay)


@functools.cache
def _bubble(pipeline: Pipeline) -> float:
  return pipeline.plan.bubble
