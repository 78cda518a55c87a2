# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's GPUs for XLA to compile for where there are none.

What it needs to know of them is in `_TARGET`; JAX asks a GPU a few questions more before it emits
calls of cuDNN, and gets our answers.
"""

import sys
import types
from typing import Any

from paxlike import chips
from paxlike.errors import UserError

_NODE = 8  # GPUs that NVLink joins.

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
#: Name -> what XLA is told, and the compute capability.
KINDS = {"h200": (_HOPPER, (9, 0)), "h100": (_HOPPER, (9, 0)), "a100": (_AMPERE, (8, 0))}

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
  """Raises UserError unless `count` GPUs are one node, or whole nodes."""
  if count > _NODE and count % _NODE:
    raise UserError(f"--topology={kind}-{count}: more than {_NODE} GPUs are nodes of {_NODE}.")


def devices(kind: str, count: int) -> list[Any]:
  """Returns as many GPUs of a kind in `KINDS`, in nodes of eight.

  Raises:
    UserError: JAX lacks what compiles for them.
  """
  fields, capability = KINDS[kind]
  _answer_for_cudnn(capability)
  return list(_gpus(kind.upper(), fields, capability, count))


def _gpus(name: str, fields: dict[str, Any], capability: tuple[int, int], count: int) -> Any:
  from jax.experimental import topologies

  chip = chips.CHIPS[name]
  fields = fields | {
    "device_memory_size": chip.memory,
    "memory_bandwidth": int(chip.bandwidth),
  }
  major, minor = capability
  # Of Hopper, the features that only sm_90a has, as a real one tells.
  told = f"major: {major} minor: {minor}" + (
    " feature_extension: ACCELERATED_FEATURES" * (major == 9)
  )
  target = _TARGET.format(
    name=name,
    capability=told,
    fields=" ".join(f"{field}: {value}" for field, value in fields.items()),
  )
  nodes = -(-count // _NODE)
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
