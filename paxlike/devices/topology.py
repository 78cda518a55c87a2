# SPDX-License-Identifier: Apache-2.0
"""The target devices of compilation: those of this machine, or of a named topology.

XLA can compile for GPUs and TPUs that are not attached.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paxlike.devices import chips, gpu_targets, tpu_targets
from paxlike.errors import UserError, did_you_mean

_DRIVER = pathlib.Path("/proc/driver/nvidia")
_named: Sequence[Any] | None = None  # Set by `target` alone.


def devices() -> list[Any]:
  """Returns all target devices, which need not be attached."""
  import jax

  return list(jax.devices() if _named is None else _named)


def is_gpu() -> bool:
  """Returns whether the target devices, all of one kind, are GPUs."""
  return devices()[0].platform in ("gpu", "cuda")


def is_tpu() -> bool:
  """Returns whether the target devices, all of one kind, are TPUs."""
  return devices()[0].platform == "tpu"


def check_gpu_share():
  """Raises a UserError if the environment variable for the GPU memory fraction is not positive."""
  given = [name for name in chips.SHARE_NAMES if os.environ.get(name)]
  try:
    share = chips.gpu_share()
  except ValueError:
    share = 0.0
  if not share > 0:
    raise UserError(
      f"{given[0]}={os.environ[given[0]]}: expected a fraction of a GPU's memory, such as 0.9."
    )


def take_gpu_memory(communicators: int = 0):
  """Sets the fraction of GPU memory that JAX preallocates, unless the user has set it.

  JAX reads it when its backend starts. `communicators` is the number of NCCL communicators, each of
  which needs memory outside of JAX's allocation.
  """
  if _named is None and not any(os.environ.get(name) for name in chips.SHARE_NAMES):
    chip = _gpu_here()
    share = chips.gpu_share() if chip is None else chip.share_beside(communicators)
    os.environ[chips.SHARE_NAMES[1]] = str(share)


def _gpu_here() -> chips.Chip | None:
  """Returns the first GPU that NVIDIA's driver lists, without starting JAX's backend."""
  for path in sorted(_DRIVER.glob("gpus/*/information")):
    for line in path.read_text().splitlines():
      key, _, model = line.partition(":")
      if key == "Model":
        return chips.find(model.strip())
  return None


def has_cudnn_attention(device: Any) -> bool:
  """Returns whether cuDNN attention supports a device: NVIDIA GPUs from Ampere on."""
  return _capability(device) >= (8, 0)


def has_packed_cudnn_attention(device: Any) -> bool:
  """Returns whether cuDNN attention supports packed sequences: from Hopper on.

  The same holds for heads wider than 128, and for values narrower than keys.
  """
  return _capability(device) >= (9, 0)


def has_tokamax_attention(device: Any) -> bool:
  """Returns whether tokamax attention supports a device: NVIDIA GPUs from Hopper on."""
  return _capability(device) >= (9, 0)


def has_transformer_engine(device: Any) -> bool:
  """Returns whether Transformer Engine supports a device: NVIDIA GPUs from Ampere on."""
  return _capability(device) >= (8, 0)


def has_fp8(device: Any) -> bool:
  """Returns whether FP8 matmuls are allowed on a device: all but NVIDIA GPUs before Ada.

  On earlier GPUs, XLA would quantize and then multiply in bfloat16.
  """
  capability = _capability(device)
  return capability == (0, 0) or capability >= (8, 9)


def has_mxfp8(device: Any) -> bool:
  """Returns whether MXFP8 matmuls are allowed on a device: all but NVIDIA GPUs before Blackwell.

  CPUs and TPUs emulate them. On earlier GPUs, emulation would be slower than bfloat16, and FP8 is
  faster.
  """
  return _capability(device) == (0, 0) or multiplies_mxfp8(device)


def multiplies_mxfp8(device: Any) -> bool:
  """Returns whether a device has MXFP8 matmuls in hardware: NVIDIA GPUs from Blackwell on."""
  return _capability(device) >= (10, 0)


def has_triton(device: Any) -> bool:
  """Returns whether Triton kernels support a device: NVIDIA GPUs from Ampere on."""
  return _capability(device) >= (8, 0)


def has_splash_attention(device: Any) -> bool:
  """Returns whether the Pallas splash attention kernel supports a device: TPUs."""
  return device.platform == "tpu"


def _capability(device: Any) -> tuple[int, int]:
  """Returns an NVIDIA GPU's compute capability; (0, 0) for other devices."""
  # CPUs and TPUs have no such attribute; AMD's GPUs are gfx90a and the like.
  capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
  return (0, 0) if capability is None else (int(capability[1]), int(capability[2]))


@contextlib.contextmanager
def target(name: str | None, *, slices: int = 1) -> Iterator[None]:
  """Context in which the devices of a topology are the target of compilation, for all threads.

  Programs for them cannot run. Contexts may be nested; each restores the target before it.

  Args:
    name: A kind of device and a number, such as h200-1 or v5e-256; None: this machine's devices.
    slices: The number of TPU slices of this size.

  Raises:
    UserError: There is no such topology, or the compiler for it is not installed.
  """
  global _named
  with contextlib.ExitStack() as stack:
    found = None if name is None else _described(name, slices, stack)
    before, _named = _named, found
    try:
      yield
    finally:
      _named = before


def _described(name: str, slices: int, stack: contextlib.ExitStack) -> Sequence[Any]:
  """Returns the devices of a topology, with the patches of JAX for them entered into `stack`."""
  kind, count = parse(name)
  if kind in tpu_targets.KINDS:
    return tpu_targets.devices(kind, count, slices)
  if slices > 1:
    raise UserError(
      f"--slices={slices}: only TPUs come in slices; give the number of all GPUs, as in {kind}-64."
    )
  stack.enter_context(gpu_targets.patched_cudnn_queries(kind))
  return gpu_targets.devices(kind, count)


def parse(name: str) -> tuple[str, int]:
  """Returns the kind of device and the number in a topology's name.

  Raises:
    UserError: There is no such topology.
  """
  kinds = [*gpu_targets.KINDS, *tpu_targets.KINDS]
  match = re.fullmatch(r"([a-z]+[0-9]+[a-z]*)-([1-9][0-9]*)", name.lower())
  if match is None or match[1] not in kinds:
    kind = name.lower().partition("-")[0]
    hint = "" if kind in kinds else did_you_mean(kind, kinds)
    known = ", ".join(f"{kind}-N" for kind in kinds)
    raise UserError(
      f"--topology={name}: expected one of {known}, such as h100-64 or v5e-256.{hint}"
    )
  kind, count = match[1], int(match[2])
  (tpu_targets if kind in tpu_targets.KINDS else gpu_targets).check(kind, count)
  return kind, count
