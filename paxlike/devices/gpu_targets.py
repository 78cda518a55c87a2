# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPU topologies for ahead-of-time compilation without GPUs.

`_TARGET` is XLA's description of a GPU. JAX queries the GPU before it emits cuDNN calls; those
queries are patched while such a GPU is the target.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from paxlike.devices import chips
from paxlike.errors import UserError

# Fields of XLA's `GpuDeviceInfoProto` for each GPU architecture.
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
# As in XLA's xla/backends/gpu/target_config/specs, except for the multiprocessors of B300: XLA has
# 158, whose FLOP/s would exceed the data sheet's; 148 match it.
_B200 = _HOPPER | {"core_count": 148, "l2_cache_size": 132644864, "clock_rate_ghz": 1.965}
_B300 = _B200 | {"l2_cache_size": 135528448}
_GB200 = _B300 | {"core_count": 152, "clock_rate_ghz": 2.062}


class GpuKind(NamedTuple):
  """A GPU model.

  Attributes:
    fields: Fields of XLA's `GpuDeviceInfoProto`.
    capability: The compute capability.
    node: GPUs per node; a node is one process.
    rack: GPUs per rack if NVLink connects its nodes; None: NVLink connects only GPUs of a node.
  """

  fields: dict[str, Any]
  capability: tuple[int, int]
  node: int = 8
  rack: int | None = None


#: Name in --topology -> GPU model.
KINDS = {
  "gb200": GpuKind(_GB200, (10, 0), node=4, rack=72),
  "b300": GpuKind(_B300, (10, 3)),
  "b200": GpuKind(_B200, (10, 0)),
  "h200": GpuKind(_HOPPER, (9, 0)),
  "h100": GpuKind(_HOPPER, (9, 0)),
  "a100": GpuKind(_AMPERE, (8, 0)),
}

# CUDA 13.0 with cuDNN 9.12, the minimum versions that JAX's wheels require.
_CUDNN = 91200
_TARGET = """\
gpu_device_info {{ {fields} cuda_compute_capability {{ {capability} }} name: "NVIDIA {name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "NVIDIA {name}"
"""


def leave_out():
  """Keeps JAX from loading its GPU plugin (0.3 GB) in a process that does not need it.

  Call it before JAX's backend starts, because that loads all installed plugins.
  """
  for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
    nothing: Any = types.ModuleType(name)
    nothing.initialize = lambda: None
    sys.modules.setdefault(name, nothing)


def check(kind: str, count: int):
  """Raises UserError unless `count` GPUs fit into a node, or are full nodes of at most one rack."""
  _, _, node, rack = KINDS[kind]
  if count > node and count % node:
    raise UserError(
      f"--topology={kind}-{count}: more than {node} GPUs must be full nodes of {node}."
    )
  if rack is not None and count > rack:
    raise UserError(
      f"--topology={kind}-{count}: at most the {rack} GPUs of one rack: JAX cannot describe NVLink"
      " domains of several racks."
    )


def devices(kind: str, count: int) -> list[Any]:
  """Returns `count` GPUs of a kind in `KINDS`, grouped into nodes.

  Raises:
    UserError: JAX's CUDA plugin is not installed.
  """
  return list(_gpus(kind.upper(), KINDS[kind], count))


def _gpus(name: str, kind: GpuKind, count: int) -> Any:
  from jax.experimental import topologies

  chip = chips.CHIPS[name]
  fields = kind.fields | {
    "device_memory_size": chip.memory,
    "memory_bandwidth": int(chip.bandwidth),
  }
  major, minor = kind.capability
  # From Hopper on, GPUs report the architecture-specific features of sm_90a and the like.
  capability = f"major: {major} minor: {minor}" + (
    " feature_extension: ACCELERATED_FEATURES" * (major >= 9)
  )
  target = _TARGET.format(
    name=name,
    capability=capability,
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


@contextlib.contextmanager
def patched_cudnn_queries(kind: str) -> Iterator[None]:
  """Context in which the GPU queries that JAX makes before it emits cuDNN attention are patched."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  capability = KINDS[kind].capability

  class Versions:
    """Replaces the extension module of the CUDA plugin."""

    @staticmethod
    def cudnn_get_version() -> int:
      return _CUDNN

  def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))

  patches = {
    "cuda_versions": Versions,
    "check_compute_capability": lambda least: capability >= version(least),
    "is_cuda_compute_capability_equal": lambda other: capability == version(other),
  }
  before = {name: getattr(cudnn, name) for name in patches}
  try:
    for name, value in patches.items():
      setattr(cudnn, name, value)
    yield
  finally:
    for name, value in before.items():
      setattr(cudnn, name, value)
