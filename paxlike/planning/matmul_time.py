# SPDX-License-Identifier: Apache-2.0
"""The time of a matmul with a weight, from its FLOPs and its memory traffic."""

import functools

from paxlike.planning.machines import Machine
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.times import Times
from paxlike.planning.weights import Weight


@functools.lru_cache(maxsize=1 << 16)
def of(
  weight: Weight,
  direction: str,
  tokens: float,
  tensor: int,
  expert: int,
  model: ModelSizes,
  machine: Machine,
) -> Times:
  """Returns the time of one layer's matmul with a weight.

  Args:
    weight: The weight.
    direction: "forward", "inputs" (for their gradients) or "weights" (for their gradients).
    tokens: The tokens of a device.
    tensor: The shards of the weight over `tensor`.
    expert: The size of `expert`.
    model: The model.
    machine: The machine.
  """
  chip, rates = machine.chip, machine.rates
  flops = tokens * weight.flops / max(1, weight.layers) / tensor
  groups = 1.0
  k, n = float(weight.inputs), float(weight.outputs)
  if weight.is_routed:
    # `inputs` and `outputs` are of all chosen experts; a group is an expert.
    k, n = k / model.num_chosen, n / model.num_chosen
    copies = model.num_chosen if model.capacity is None else model.capacity
    flops *= copies / model.num_chosen
    groups = model.num_experts / expert
    tokens *= copies
    if not machine.software.splits_experts:
      tokens, tensor = tokens / tensor, 1
  k, n = (k, n / tensor) if weight.splits_outputs else (k / tensor, n)
  m = tokens / groups
  is_ragged = weight.is_routed and model.capacity is None
  shape = {"forward": (m, n, k), "inputs": (m, k, n), "weights": (k, n, m)}[direction]
  dtype = weight.operands or "bfloat16"
  if is_ragged and direction == "weights" and not chip.is_gpu:
    # `ragged_share` has what the tokens of a group, which are contracted, leave of tiles.
    shape = k, n, float(chip.matrix)
  rate = rates.matmul_flops(chip, *shape, dtype=dtype, groups=groups)
  if is_ragged:
    rate *= rates.ragged_share(m)
  # Elements of the layer's input and output, and of its weight or the weight's gradient.
  rows, matrix = (tokens * k, tokens * n), groups * k * n
  read, written = {
    "forward": (rows[0] + matrix, rows[1]),
    "inputs": (rows[1] + matrix, rows[0]),
    "weights": (sum(rows), matrix),
  }[direction]
  bandwidth = rates.memory_bandwidth(chip)
  nbytes = (1 if weight.operands else 2) * read + 2 * written
  compute, memory = flops / rate, nbytes / bandwidth
  times = Times(compute=compute, memory=max(0.0, memory - compute))
  if weight.operands and chip.is_gpu:
    # Operands are quantized (16 bits read, 8 written) and, for the gradient, transposed.
    quantized = {"forward": 3 * read, "inputs": 3 * rows[1], "weights": 2 * sum(rows)}[direction]
    times += Times(memory=quantized / bandwidth)
  return times
