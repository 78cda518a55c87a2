# SPDX-License-Identifier: Apache-2.0
"""Data sheets of accelerators, and the memory available to programs."""

import dataclasses
import math
import os
from typing import Any

# Environment variables for the fraction of GPU memory that JAX preallocates; JAX reads either.
SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Our default; JAX's is 0.75. CUDA, its libraries and NCCL use the rest.
_SHARE = "0.92"
# Bytes outside of JAX's allocation: CUDA and its libraries take about one GB (a guess), each NCCL
# communicator up to 0.7 GB (544 and 688 MB on A100s, github.com/NVIDIA/nccl/issues/964).
_LIBRARIES, _COMMUNICATOR = 1_000_000_000, 700_000_000


@dataclasses.dataclass(frozen=True)
class Chip:
  """The data sheet of one device.

  Attributes:
    flops: Peak dense bf16 FLOP/s.
    memory: Bytes; 0: unknown. For TPUs, the bytes that programs may use.
    bandwidth: Memory bandwidth in bytes/s; 0: unknown.
    is_gpu: Whether it is a GPU.
    fp8: FLOP/s in FP8 as a multiple of `flops`; 1: it multiplies in bf16 instead.
    int8: The same in int8; 0: unknown.
    family: The name of its rates in `kernel_rates.Fitted`; empty: there are none.
    cores: Streaming multiprocessors of a GPU; 0: a TPU.
    matrix: The rows and columns of a TPU's matrix unit.
  """

  flops: float
  memory: int = 0
  bandwidth: float = 0
  is_gpu: bool = False
  fp8: float = 1
  int8: float = 2
  family: str = ""
  cores: int = 0
  matrix: int = 128

  def peak(self, dtype: str) -> float | None:
    """Returns the peak dense FLOP/s in fp8, int8, bfloat16 or float32; None if unknown.

    GPUs multiply float32 in TF32, at half of the bf16 rate, and TPUs in bf16.
    """
    float32 = 0.5 if self.is_gpu else 1
    factor = {"fp8": self.fp8, "int8": self.int8, "float32": float32}.get(dtype, 1)
    return self.flops * factor or None

  @property
  def usable_memory(self) -> int:
    """Bytes that programs may use; 0: unknown."""
    return int(gpu_share() * self.memory) if self.is_gpu else self.memory

  def usable_memory_beside(self, communicators: int) -> int:
    """Returns the bytes that programs may use next to this many NCCL communicators; 0: unknown."""
    if not self.is_gpu or not communicators:
      return self.usable_memory
    return min(self.usable_memory, self.memory - _LIBRARIES - communicators * _COMMUNICATOR)

  def share_beside(self, communicators: int) -> float:
    """Returns `usable_memory_beside` as a fraction, for XLA_PYTHON_CLIENT_MEM_FRACTION."""
    usable = self.usable_memory_beside(communicators)
    if usable == self.usable_memory:
      return gpu_share()
    return math.floor(100 * usable / self.memory) / 100


def gpu_share() -> float:
  """Returns the fraction of GPU memory for programs: the user's setting or our default.

  Raises:
    ValueError: The user's setting is not a number.
  """
  return float(next(filter(None, map(os.environ.get, SHARE_NAMES)), _SHARE))


# The bytes that the compiler lets programs use; data sheets say 32, 16, 95 and 32 GB.
_V4, _V5E, _V5P = int(30.75 * 2**30), int(15.75 * 2**30), int(95.74 * 2**30)
_V6E = int(31.25 * 2**30)
_V7X = int(94.74 * 2**30)  # Of 96 GiB: a device is half of a chip.
# Their numbers of multiprocessors are those of SXM modules.
_AMPERE: Any = {"family": "a100", "cores": 108}
_HOPPER: Any = {"family": "h100", "cores": 132}
_BLACKWELL: Any = {"family": "blackwell", "cores": 148}
_A100_40GB = Chip(312e12, 42_331_013_120, 1.555e12, is_gpu=True, **_AMPERE)

# Keyed by a substring of JAX's `device_kind`, more specific names first. FLOP/s of GPUs are those
# of SXM modules. For Blackwell, memory and bandwidth are from XLA's device descriptions, and FLOP/s
# are half of the sparse FLOP/s in NVIDIA's sheets of HGX B200, HGX B300, GB200 and GB300 NVL72.
# int8 on B300 is 0.125e15. GH200 is the HBM3 version, with the memory that its driver reports.
CHIPS = {
  "GB300": Chip(2500e12, 297_021_079_552, 7.928e12, is_gpu=True, fp8=2, int8=0, **_BLACKWELL),
  "GB200": Chip(2500e12, 197_897_748_480, 7.928e12, is_gpu=True, fp8=2, **_BLACKWELL),
  "B300": Chip(
    2250e12, 297_021_865_984, 7.936e12, is_gpu=True, fp8=2, int8=0.125 / 2.25, **_BLACKWELL
  ),
  "B200": Chip(2250e12, 191_514_411_008, 7.672e12, is_gpu=True, fp8=2, **_BLACKWELL),
  "GH200": Chip(989.5e12, 102_005_473_280, 4.0e12, is_gpu=True, fp8=2, **_HOPPER),
  "H200": Chip(989.5e12, 151_397_597_184, 4.8e12, is_gpu=True, fp8=2, **_HOPPER),
  "H100": Chip(989.5e12, 85_028_765_696, 3.35e12, is_gpu=True, fp8=2, **_HOPPER),
  "A100-SXM4-40GB": _A100_40GB,
  "A100-PCIE-40GB": _A100_40GB,
  "A100": Chip(312e12, 85_094_105_088, 2.039e12, is_gpu=True, **_AMPERE),
  "TPU v4": Chip(275e12, _V4, 1.2e12, int8=1, family="v5p"),  # No published steps of its own.
  "TPU v5 lite": Chip(197e12, _V5E, 0.819e12, family="v5e"),
  "TPU v5e": Chip(197e12, _V5E, 0.819e12, family="v5e"),
  "TPU v5p": Chip(459e12, _V5P, 2.765e12, family="v5p"),
  "TPU v5": Chip(459e12, _V5P, 2.765e12, family="v5p"),
  "TPU v6": Chip(918e12, _V6E, 1.638e12, family="v6e", matrix=256),
  # One JAX device is half of a chip (docs.cloud.google.com/tpu/docs/tpu7x).
  "TPU7x": Chip(1153.5e12, _V7X, 3.69e12, fp8=2, int8=0, family="v7x", matrix=256),
}


def name(device_kind: str) -> str | None:
  """Returns the key in `CHIPS` for a JAX `device_kind`; None if unknown (CPUs)."""
  return next((name for name in CHIPS if name.lower() in device_kind.lower()), None)


def find(device_kind: str) -> Chip | None:
  """Returns the chip for a JAX `device_kind`; None if unknown (CPUs)."""
  known = name(device_kind)
  return None if known is None else CHIPS[known]
