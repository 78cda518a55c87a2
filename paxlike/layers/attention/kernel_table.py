# SPDX-License-Identifier: Apache-2.0
"""The attention kernels by name, with the devices that they need."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from paxlike.devices import topology
from paxlike.layers.attention.auto import auto
from paxlike.layers.attention.chunked import xla_chunked
from paxlike.layers.attention.context_parallel import gathered, ring
from paxlike.layers.attention.cudnn import cudnn
from paxlike.layers.attention.flash_cpu import flash_cpu
from paxlike.layers.attention.kernels import xla
from paxlike.layers.attention.splash import splash
from paxlike.layers.attention.tokamax import tokamax

#: The names of `KERNELS`, for annotations.
KernelName = Literal[
  "auto", "xla", "xla_chunked", "flash_cpu", "cudnn", "splash", "tokamax", "ring", "gathered"
]


def _any_device(device: Any) -> bool:
  del device
  return True


class KernelEntry(NamedTuple):
  """An attention kernel and its requirements.

  Attributes:
    function: A `Kernel`.
    supports: Returns whether a device supports it.
    devices: The devices that support it, in words; "": all.
    is_16_bit: Whether it is meant for 16-bit dtypes; on accelerators, `paxlike.checks` does not
      check it in float32.
    is_context_parallel: Whether it is for sequences that are sharded over the mesh axis `context`.
  """

  function: Callable[..., Any]
  supports: Callable[[Any], bool] = _any_device
  devices: str = ""
  is_16_bit: bool = False
  is_context_parallel: bool = False

  @property
  def limits_segments(self) -> bool:
    """Whether it has the argument `max_segments`."""
    return "max_segments" in inspect.signature(self.function).parameters


KERNELS: dict[KernelName, KernelEntry] = {
  "auto": KernelEntry(auto),
  "xla": KernelEntry(xla),
  "xla_chunked": KernelEntry(xla_chunked),
  "flash_cpu": KernelEntry(flash_cpu),
  "cudnn": KernelEntry(
    cudnn, topology.has_cudnn_attention, "NVIDIA GPUs from Ampere on", is_16_bit=True
  ),
  "splash": KernelEntry(splash, topology.has_splash_attention, "TPUs", is_16_bit=True),
  "tokamax": KernelEntry(
    tokamax, topology.has_tokamax_attention, "NVIDIA GPUs from Hopper on", is_16_bit=True
  ),
  "ring": KernelEntry(ring, is_context_parallel=True),
  "gathered": KernelEntry(gathered, is_context_parallel=True),
}
