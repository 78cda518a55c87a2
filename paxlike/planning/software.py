# SPDX-License-Identifier: Apache-2.0
"""How another training program differs from paxlike, for predictions of its step times.

Published step times are of other programs; they calibrate the rates that all programs share.
"""

import dataclasses

from paxlike.devices.kernel_rates import AttentionKernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
  """A training program; the defaults are paxlike's.

  Attributes:
    attention: The attention kernel; None: the one that paxlike uses on the chip.
    libraries_of_2023: Whether matmuls on Hopper are those of the CUDA libraries of 2023.
    hides_tensor: Whether communication over `tensor` overlaps with matmuls on GPUs.
    optimizer_over_data: Whether the optimizer state is sharded over `data` in any case.
    all_to_all: Whether tokens are exchanged with the devices of their experts by an all-to-all; if
      not, dropless experts all-gather them.
    sends_once: Whether the all-to-all sends a token once to a device with several of its experts.
    splits_experts: Whether `tensor` splits each expert, and not the tokens.
    scans_ticks: Whether a pipeline is a loop over ticks, in which few collectives are hidden, and
      weights and gradients of chunks are copied.
    spreads_loss: Whether each stage of a pipeline computes the loss of a share of the tokens; if
      not, the last stage computes all of it.
    power: The power limit of the chips as a fraction of the data sheet's.
    bandwidth: Their memory bandwidth in bytes/s; None: that of the data sheet.
  """

  attention: AttentionKernel | None = None
  libraries_of_2023: bool = False
  hides_tensor: bool = False
  optimizer_over_data: bool = False
  all_to_all: bool = False
  sends_once: bool = False
  splits_experts: bool = True
  scans_ticks: bool = True
  spreads_loss: bool = True
  power: float = 1.0
  bandwidth: float | None = None


PAXLIKE = Software()
