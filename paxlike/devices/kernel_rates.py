# SPDX-License-Identifier: Apache-2.0
"""The rates that kernels reach, as fractions of those in data sheets.

- A matmul reaches `matmul` of the chip's peak if it is large. On GPUs, the last wave of output
  tiles leaves multiprocessors idle, and each tile has a prologue and an epilogue: a matmul of w
  waves that contracts k numbers reaches w / (w + `part_wave`) * k / (k + `depth`) of that. On
  TPUs, dims are padded to those of the matrix unit.
- On TPUs, matmuls of groups of tokens that differ in size are one kernel, whose tiles on the border
  of two groups are computed for both: with t tokens in a group, it reaches t / (t + `border`).
- Attention over T tokens reaches T / (T + `length`) of its rate: causal kernels also compute the
  masked half of the blocks on the diagonal.
- Other kernels move bytes at `bandwidth` of the memory's.

`FITTED` holds the fractions that were fitted to published step times; `benchmarks/calibration.py`
fits them, and says how well they predict steps that they were not fitted to.
"""

import dataclasses
import math
from typing import Literal

from paxlike.devices.chips import Chip

AttentionKernel = Literal["flash1", "flash2", "cudnn", "splash"]
#: The rows and columns of an output tile of a matmul on a GPU.
_TILE = (128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
  """The constants that are fitted to published step times; most are fractions.

  Attributes:
    a100, h100, blackwell, v5e, v5p, v6e, v7x: What a large bf16 matmul reaches of the peak.
    h100_2023: The same on Hopper with the libraries of 2023 (CUDA 11.8 and 12.0).
    fp8_gpu, fp8_tpu: What a large FP8 or INT8 matmul reaches of its peak, divided by what a bf16
      matmul reaches of its own.
    grouped: The rate of grouped matmuls of experts, divided by that of one large matmul. On TPUs
      only of groups that differ in size.
    depth: Of k, at which a matmul on a GPU reaches half of its rate.
    part_wave: The idle part of the last wave.
    flash1_a100, flash1_h100: What the forward pass of FlashAttention in Triton reaches of the peak
      with heads of 128.
    flash2_a100, flash2_h100: The same of FlashAttention-2.
    cudnn_a100, cudnn_h100, cudnn_blackwell: The same of cuDNN's attention.
    splash: The same of splash attention on TPUs.
    flash1_backward, backward: What backward passes reach of that of forward ones.
    flash1_narrow, narrow: What heads of 64 reach of that of heads of 128, on GPUs.
    length: T at which causal attention reaches half of its rate.
    bandwidth: Of memory-bound kernels on GPUs; `bandwidth_tpu` on TPUs.
    fast, fast_tpu: Of the fast network.
    slow, slow_tpu: Of the slow network.
    contention: How much longer computation and communication on a GPU take together than the
      longer of both, divided by the shorter.
    unhidden: What is exposed of all-reduces over `tensor` that a program hides behind matmuls.
    jitter: The slowdown by each doubling of the number of slices or nodes.
    power: The exponent of the power limit with which matmul rates fall.
    permuted: A factor of the memory traffic of moving tokens to their experts and back.
    border: Tokens of a group with which grouped matmuls on TPUs reach half of their rate.
  """

  a100: float = 0.805
  h100: float = 0.769
  h100_2023: float = 0.644
  blackwell: float = 0.628
  v5e: float = 0.802
  v5p: float = 0.755
  v6e: float = 0.678
  v7x: float = 0.557
  fp8_gpu: float = 0.99
  fp8_tpu: float = 0.792
  grouped: float = 0.829
  depth: float = 72.2
  part_wave: float = 0.262
  flash1_a100: float = 0.464
  flash1_h100: float = 0.264
  flash2_a100: float = 0.62
  flash2_h100: float = 0.352
  cudnn_a100: float = 0.588
  cudnn_h100: float = 0.564
  cudnn_blackwell: float = 0.49
  splash: float = 0.457
  flash1_backward: float = 0.584
  backward: float = 0.603
  flash1_narrow: float = 0.991
  narrow: float = 0.613
  length: float = 739.0
  bandwidth: float = 0.77
  bandwidth_tpu: float = 0.833
  fast: float = 0.58
  slow: float = 0.904
  fast_tpu: float = 0.829
  slow_tpu: float = 0.7
  contention: float = 0.436
  unhidden: float = 0.149
  jitter: float = 0.0045
  power: float = 0.755
  permuted: float = 2.14
  border: float = 249.0


FITTED = Fitted()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRates:
  """The rates of kernels on a chip, as fractions of its data sheet.

  Attributes:
    matmul: Of a large bf16 matmul, of the bf16 peak.
    matmul_8_bits: Of a large FP8 or INT8 matmul, of the peak in 8 bits.
    matmul_f32: Of a large float32 matmul, of the float32 peak.
    grouped: The rate of grouped matmuls on GPUs, divided by that of one large matmul.
    ragged: The rate of groups that differ in size, divided by that of equal groups.
    depth, part_wave, border: See the module.
    attention: Of the forward pass with heads of at least 128, of the bf16 peak, counting causal
      FLOPs.
    attention_backward: The same of the backward pass.
    narrow: The rate with heads of 64, divided by that with heads of 128.
    length: See the module.
    bandwidth: Of memory-bound kernels.
    launch: Seconds of each launch (assumed).
  """

  matmul: float = 1.0
  matmul_8_bits: float = 1.0
  matmul_f32: float = 1.0
  grouped: float = 1.0
  ragged: float = 1.0
  depth: float = 0.0
  part_wave: float = 0.0
  attention: float = 1.0
  attention_backward: float = 1.0
  narrow: float = 1.0
  length: float = 0.0
  border: float = 0.0
  bandwidth: float = 1.0
  launch: float = 0.0

  def matmul_flops(
    self, chip: Chip, m: float, n: float, k: float, *, dtype: str = "bfloat16", groups: float = 1
  ) -> float:
    """Returns the FLOP/s of `groups` matmuls [m, k] x [k, n] in one kernel.

    Args:
      chip: The chip.
      m: Rows.
      n: Columns.
      k: The contracted dim.
      dtype: "bfloat16", "float32", "fp8" or "int8".
      groups: The number of matmuls.
    """
    peak = chip.peak(dtype) or chip.flops
    fraction = self.matmul_f32 if dtype == "float32" else self.matmul
    if dtype in ("fp8", "int8") and peak != chip.flops:  # Else it multiplies in bf16.
      fraction = self.matmul_8_bits
    rate = peak * fraction
    if not chip.cores:
      for size in (n, k):
        rate *= size / (chip.matrix * math.ceil(size / chip.matrix))
      return rate
    rows, columns = (math.ceil(size / tile) for size, tile in zip((m, n), _TILE, strict=True))
    if groups > 1:  # Experts have too few tokens to hide a tile that is not full.
      rate *= self.grouped * m / (rows * _TILE[0])
    waves = groups * rows * columns / chip.cores
    return rate * waves / (waves + self.part_wave) * k / (k + self.depth)

  def ragged_share(self, tokens: float) -> float:
    """Returns the rate of matmuls of groups that differ in size, divided by that of equal groups.

    Args:
      tokens: The mean size.
    """
    return self.ragged * tokens / (tokens + self.border)

  def attention_flops(
    self,
    chip: Chip,
    length: float,
    head_dim: float,
    *,
    backward: bool = False,
    causal: bool = True,
  ) -> float:
    """Returns the FLOP/s of a fused attention kernel, on the pairs that the mask keeps.

    Args:
      chip: The chip.
      length: The keys that a query attends to, at most.
      head_dim: H.
      backward: Of the backward pass, which has 2.5 times the FLOPs of the forward pass.
      causal: Whether there is a causal mask.
    """
    fraction = self.attention_backward if backward else self.attention
    if head_dim <= 64:
      fraction *= self.narrow
    return chip.flops * fraction * (length / (length + self.length) if causal else 1)

  def memory_bandwidth(self, chip: Chip) -> float:
    """Returns the bytes/s of memory-bound kernels."""
    return chip.bandwidth * self.bandwidth


def of_chip(
  chip: Chip,
  attention: AttentionKernel | None = None,
  *,
  libraries_of_2023: bool = False,
  power: float = 1.0,
  fitted: Fitted = FITTED,
) -> KernelRates:
  """Returns the rates of kernels on a chip with a data sheet.

  Args:
    chip: The chip.
    attention: The attention kernel; None: paxlike's, cuDNN's on GPUs and splash on TPUs.
    libraries_of_2023: Whether matmuls are those of the CUDA libraries of 2023.
    power: The power limit as a fraction of the data sheet's.
    fitted: The fractions.
  """
  matmul = getattr(fitted, chip.family)
  if libraries_of_2023 and chip.family == "h100":
    matmul = fitted.h100_2023
  matmul *= power**fitted.power
  kernel = (attention or "cudnn") if chip.is_gpu else "splash"
  forward = fitted.splash
  if chip.is_gpu:
    known = f"{kernel}_{chip.family}", f"cudnn_{chip.family}"
    forward = getattr(fitted, known[0] if hasattr(fitted, known[0]) else known[1])
  forward *= power**fitted.power
  is_first = kernel == "flash1"
  return KernelRates(
    matmul=matmul,
    matmul_8_bits=matmul * (fitted.fp8_gpu if chip.is_gpu else fitted.fp8_tpu),
    matmul_f32=matmul,
    grouped=fitted.grouped,
    depth=fitted.depth if chip.is_gpu else 0.0,
    part_wave=fitted.part_wave,
    attention=forward,
    attention_backward=forward * (fitted.flash1_backward if is_first else fitted.backward),
    # Assumed: matrix units of TPUs contract 128 or 256 numbers at a time, whatever H is.
    narrow=(fitted.flash1_narrow if is_first else fitted.narrow) if chip.is_gpu else 0.5,
    length=fitted.length,
    bandwidth=fitted.bandwidth if chip.is_gpu else fitted.bandwidth_tpu,
    ragged=1.0 if chip.is_gpu else fitted.grouped,
    border=0.0 if chip.is_gpu else fitted.border,
    launch=2e-6 if chip.is_gpu else 0.0,
  )
