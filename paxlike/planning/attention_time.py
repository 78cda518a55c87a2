# SPDX-License-Identifier: Apache-2.0
"""The time of attention and of layers with a recurrent state, without their linear maps."""

from paxlike.devices import interconnect
from paxlike.planning.machines import Machine
from paxlike.planning.model_sizes import ModelSizes, Span
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.times import Times

_OF_BACKWARD = 2.5  # Five matmuls backward, two forward.


class AttentionTime:
  """The time that a stage's layers take for a microbatch."""

  def __init__(self, model: ModelSizes, how: Configuration, machine: Machine):
    self._model, self._how = model, how
    self._rates, self._chip, self._network = machine.rates, machine.chip, machine.network
    self._sizes, self._stages = how.sizes, how.sizes["pipeline"]
    self._tokens = how.tokens(model.seq_len)

  def computed(self, *, backward: bool = False) -> Times:
    """Returns the time of a pass of a stage's layers but for their linear maps."""
    if not self._model.spans:
      return self._recurrent(backward=backward)
    return self._scores(backward=backward) + self._recurrent(backward=backward)

  def _recurrent(self, *, backward: bool) -> Times:
    """Returns the time of layers with a recurrent state; their backward pass recomputes them."""
    of = self._model.recurrent
    if not of.flops:
      return Times()
    rate = self._rates.matmul_flops(self._chip, self._tokens, of.chunk, of.chunk)
    seconds = (3 if backward else 1) * of.flops / rate
    return Times(attention=seconds * self._tokens / self._sizes["tensor"] / self._stages)

  def _scores(self, *, backward: bool) -> Times:
    model, shards = self._model, self._sizes["tensor"] * self._stages
    over_context = self._sizes["context"] > 1
    if model.fused_attention and not over_context:
      seconds = 0.0
      for span in model.spans:
        rate = self._rates.attention_flops(
          self._chip, span.length, model.head_dim, backward=backward
        )
        seconds += span.flops * (_OF_BACKWARD if backward else 1) / rate
      return Times(attention=seconds * self._tokens / shards)
    flops, pairs = model.scores[0], float(model.seq_len * model.heads)
    if over_context:  # In pieces.
      flops, pairs = map(sum, zip(*map(self._in_blocks, model.spans), strict=True))
    # Half of the FLOPs contract H numbers for logits, half contract T for weighted values.
    length, seconds = model.seq_len, 0.0
    for n, k in ((length, model.head_dim), (model.head_dim, length)):
      rate = self._rates.matmul_flops(self._chip, length * model.heads, n, k)
      seconds += flops / 2 / rate
    # Logits and softmax weights are both written and read.
    seconds += 8 * pairs / self._rates.memory_bandwidth(self._chip)
    return Times(attention=(2 if backward else 1) * seconds * self._tokens / shards)

  def _in_blocks(self, span: Span) -> tuple[float, float]:
    """Returns the FLOPs and pairs per token over `context`, where all causal blocks count."""
    if self._is_near(span):
      return span.flops, span.pairs
    length = self._model.seq_len
    more = length / 2 / (span.length * (1 - span.length / length / 2))
    return more * span.flops, more * span.pairs

  def _is_near(self, span: Span) -> bool:
    """Returns whether a window needs keys of the previous device only; see `window_halo`."""
    return span.length - 1 <= self._model.seq_len / self._sizes["context"]

  def sent(self, attention: Times, *, copies: float = 1) -> Times:
    """Returns what attention does not hide of keys and values that go around `context`.

    With gradients, which are in float32, there are three `copies` of their bytes.
    """
    group, sent = self._how.group("context"), 0.0
    shard = self._model.seq_len / group.size
    for span in self._model.spans:
      hops = span.length / shard if self._is_near(span) else group.size - 1
      nbytes = copies * 2 * self._tokens * span.keys / self._sizes["tensor"]
      sent += hops * interconnect.send(self._network, group, nbytes) / self._stages
    if group.size > 1 and self._model.recurrent.states:
      nbytes = 4 * self._model.recurrent.states / self._sizes["tensor"]
      nbytes *= self._tokens / shard  # Sequences of this device.
      sent += (group.size - 1) * interconnect.send(self._network, group, nbytes) / self._stages
    return Times(context=max(0.0, sent - attention.total))
