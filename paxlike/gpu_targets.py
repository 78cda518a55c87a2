# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's GPUs for XLA to compile for where there are none.

What it needs to know of them is in `_TARGET`; JAX asks a GPU a few questions more before it emits
calls of cuDNN, and gets our answers.
"""

import sys
import types
from typing import Any, NamedTuple

from paxlike import chips
from paxlike.errors import UserError

# Fields of XLA's `GpuDeviceInfoProto`, by name of the GPU.
_COMMON = {
  "threads_per_block_limit": 1024,
  "threads_per_warp": 32,
  "shared_memory_per_block": 49152,
  "threads_per_core_limit": 2048,
  "block_dim_limit_x": 2147483647,
  "block_dim_limit_y": 65535,
  "block_dim_limit_z": 65535,
  "registers_per_core_limit": 65536,
  "registers_per_block_limit": 65536,
}
_HOPPER = _COMMON | {
  "core_count": 132,
  "fpus_per_core": 128,
  "shared_memory_per_core": 233472,
  "shared_memory_per_block_optin": 232448,
  "l2_cache_size": 52428800,
  "clock_rate_ghz": 1.98,
}
_AMPERE = _COMMON | {
  "core_count": 108,
  "fpus_per_core": 64,
  "shared_memory_per_core": 167936,
  "shared_memory_per_block_optin": 166912,
  "l2_cache_size": 41943040,
  "clock_rate_ghz": 1.41,
}
# As in XLA's own xla/backends/gpu/target_config/specs, except the multiprocessors of B300: there
# they are 158, of which the FLOP/s would exceed its data sheet's; 148 give these.
_B200 = _HOPPER | {"core_count": 148, "l2_cache_size": 132644864, "clock_rate_ghz": 1.965}
_B300 = _B200 | {"l2_cache_size": 135528448}
_GB200 = _B300 | {"core_count": 152, "clock_rate_ghz": 2.062}


class Kind(NamedTuple):
  """What there is to say of GPUs of a kind.

  Attributes:
    fields: For XLA.
    capability: The compute capability.
    node: GPUs of a node. A node is one process.
    rack: GPUs of a rack, if NVLink joins all its nodes; None: it joins only GPUs of the same node.
  """

  fields: dict[str, Any]
  capability: tuple[int, int]
  node: int = 8
  rack: int | None = None


#: By name.
KINDS = {
  "gb200": Kind(_GB200, (10, 0), node=4, rack=72),
  "b300": Kind(_B300, (10, 3)),
  "b200": Kind(_B200, (10, 0)),
  "h200": Kind(_HOPPER, (9, 0)),
  "h100": Kind(_HOPPER, (9, 0)),
  "a100": Kind(_AMPERE, (8, 0)),
}

# CUDA 13.0 with cuDNN 9.12, which the wheels of JAX bring at least.
_CUDNN = 91200
_TARGET = """\
gpu_device_info {{ {fields} cuda_compute_capability {{ {capability} }} name: "NVIDIA {name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "NVIDIA {name}"
"""


def leave_out():
  """Keeps JAX from loading a plugin for GPUs, of 0.3 GB, in a process that compiles for none.

  Call it before JAX starts, which asks all plugins that are installed.
  """
  for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
    nothing: Any = types.ModuleType(name)
    nothing.initialize = lambda: None
    sys.modules.setdefault(name, nothing)


def check(kind: str, count: int):
  """Raises UserError unless `count` GPUs fit into a node, or are whole nodes of at most a rack."""
  _, _, node, rack = KINDS[kind]
  if count > node and count % node:
    raise UserError(f"--topology={kind}-{count}: more than {node} GPUs are nodes of {node}.")
  if rack is not None and count > rack:
    raise UserError(
      f"--topology={kind}-{count}: at most the {rack} GPUs of a rack, as JAX cannot describe which"
      " of more GPUs NVLink joins."
    )


def devices(kind: str, count: int) -> list[Any]:
  """Returns as many GPUs of a kind in `KINDS`, in nodes.

  Raises:
    UserError: JAX lacks what compiles for them.
  """
  _answer_for_cudnn(KINDS[kind].capability)
  return list(_gpus(kind.upper(), KINDS[kind], count))


def _gpus(name: str, kind: Kind, count: int) -> Any:
  from jax.experimental import topologies

  chip = chips.CHIPS[name]
  fields = kind.fields | {
    "device_memory_size": chip.memory,
    "memory_bandwidth": int(chip.bandwidth),
  }
  major, minor = kind.capability
  # From Hopper on, the features that only sm_90a and the like have, as a real one tells.
  told = f"major: {major} minor: {minor}" + (
    " feature_extension: ACCELERATED_FEATURES" * (major >= 9)
  )
  target = _TARGET.format(
    name=name,
    capability=told,
    fields=" ".join(f"{field}: {value}" for field, value in fields.items()),
  )
  nodes = -(-count // kind.node)
  try:
    found = topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      target_config=target,
      topology=f"1x{nodes}x{count // nodes}",
    )
  except (RuntimeError, ValueError, NotImplementedError) as error:
    raise UserError(
      "compiling for GPUs needs JAX's plugin for CUDA: pip install 'paxlike[cuda-aot]'"
      f" ({str(error).splitlines()[0]})."
    ) from None
  return found.devices


def _answer_for_cudnn(capability: tuple[int, int]):
  """Answers what JAX asks a GPU before it emits attention by cuDNN."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  class Versions:
    """Stands for the extension module of the plugin."""

    @staticmethod
    def cudnn_get_version() -> int:
      return _CUDNN

  def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))

  told: Any = cudnn
  told.cuda_versions = Versions
  told.check_compute_capability = lambda least: capability >= version(least)
  told.is_cuda_compute_capability_equal = lambda other: capability == version(other)
