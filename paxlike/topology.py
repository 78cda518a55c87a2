# SPDX-License-Identifier: Apache-2.0
"""The devices that a program is made for: those of this machine, or of another that is only named.

XLA compiles for GPUs without one. What it needs to know of them is in `_TARGET`; JAX asks a GPU a
few questions more before it emits calls of cuDNN, and gets our answers.
"""

import re
from collections.abc import Sequence
from typing import Any

from paxlike import chips
from paxlike.errors import UserError, did_you_mean

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
_GPUS = {"h200": (_HOPPER, (9, 0)), "h100": (_HOPPER, (9, 0)), "a100": (_AMPERE, (8, 0))}

# CUDA 13.0 with cuDNN 9.12, which the wheels of JAX bring at least.
_CUDNN = 91200
_TARGET = """\
gpu_device_info {{ {fields} cuda_compute_capability {{ {capability} }} name: "NVIDIA {name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "NVIDIA {name}"
"""

_named: Sequence[Any] | None = None


def devices() -> list[Any]:
  """Returns all devices that programs are made for, which need not be here."""
  import jax

  return list(jax.devices() if _named is None else _named)


def has_cudnn_attention(device: Any) -> bool:
  """Returns whether cuDNN has attention for a device: for NVIDIA's GPUs from Ampere on."""
  return _capability(device) >= 8


def has_tokamax_attention(device: Any) -> bool:
  """Returns whether tokamax has: for NVIDIA's GPUs from Hopper on."""
  return _capability(device) >= 9


def has_transformer_engine(device: Any) -> bool:
  """Returns whether Transformer Engine is for a device: NVIDIA's GPUs from Ampere on."""
  return _capability(device) >= 8


def has_splash_attention(device: Any) -> bool:
  """Returns whether the Pallas kernel for TPUs is for a device."""
  return device.platform == "tpu"


def _capability(device: Any) -> int:
  """Returns the first number of an NVIDIA GPU's compute capability; 0 for other devices."""
  # CPUs and TPUs have no such attribute; AMD's GPUs are gfx90a and the like.
  capability = re.fullmatch(r"(\d+)\.\d+", getattr(device, "compute_capability", ""))
  return 0 if capability is None else int(capability[1])


def use(name: str | None):
  """Makes programs for the devices of a topology, such as h200-1 or h100-64, from now on.

  They can be compiled, not run. None: for the devices of this machine again.

  Raises:
    UserError: There is no such topology, or JAX lacks what compiles for it.
  """
  global _named
  _named = None
  if name is None:
    return
  kind, count = parse(name)
  fields, capability = _GPUS[kind]
  _answer_for_cudnn(capability)
  _named = _gpus(kind.upper(), fields, capability, count)


def parse(name: str) -> tuple[str, int]:
  """Returns the kind of device and their number.

  Raises:
    UserError: There is no such topology.
  """
  known = ", ".join(f"{kind}-N" for kind in _GPUS)
  match = re.fullmatch(r"([a-z]+[0-9]+[a-z]*)-([1-9][0-9]*)", name)
  if match is None or match[1] not in _GPUS:
    hint = did_you_mean(name.partition("-")[0], _GPUS)
    raise UserError(f"--topology={name}: one of {known}, N being the number of GPUs.{hint}")
  count = int(match[2])
  if count > _NODE and count % _NODE:
    raise UserError(f"--topology={name}: more than {_NODE} GPUs are nodes of {_NODE}.")
  return match[1], count


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
