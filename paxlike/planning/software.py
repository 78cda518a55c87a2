# SPDX-License-Identifier: Apache-2.0
"""What a step time depends on beside the configuration: the program that computes the step.

A prediction is of a program. `PAXLIKE` is this one; the others are those of published step times,
which calibrate the rates that all programs share.
"""

import dataclasses

from paxlike.devices.kernel_rates import AttentionKernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
  """A training program.

  Attributes:
    attention: The attention kernel; None: the one that paxlike uses on the chip.
    libraries_of_2023: Whether its matmuls are those of the CUDA libraries of 2023.
    hides_tensor: Whether communication over `tensor` overlaps with matmuls on GPUs.
    reduces_once: Whether gradients are reduced once per step instead of once per microbatch.
    gradient_bytes: Bytes per number in which gradients are reduced; None: as computed.
    optimizer_over_data: Whether the optimizer is sharded over `data` whatever the model says.
    all_to_all: Whether tokens are exchanged with their experts' devices; else all tokens are
      gathered, unless experts have a capacity.
    splits_experts: Whether `tensor` splits each expert, and not the tokens.
    hides_exchange: The fraction of that exchange that overlaps with matmuls.
    spreads_loss: Whether all stages of a pipeline compute the loss, each of a share of the tokens.
    power: The power limit of the chips as a fraction of the data sheet's.
    bandwidth: Their memory bandwidth in bytes/s; None: that of the data sheet.
  """

  attention: AttentionKernel | None = None
  libraries_of_2023: bool = False
  hides_tensor: bool = False
  reduces_once: bool = False
  gradient_bytes: int | None = None
  optimizer_over_data: bool = False
  all_to_all: bool = False
  splits_experts: bool = True
  hides_exchange: float = 0.0
  spreads_loss: bool = True
  power: float = 1.0
  bandwidth: float | None = None


PAXLIKE = Software()
