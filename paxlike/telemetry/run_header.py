# SPDX-License-Identifier: Apache-2.0
"""The header that a run prints, and its speed (tokens/s, FLOP/s, MFU) from the time of a step."""

import dataclasses

import jax
from etils import epath

from paxlike.devices import chips
from paxlike.layers import flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunHeader:
  """The facts in the header of a run, and its speed.

  Attributes:
    num_params: All parameters of the model.
    num_trained: Those that are trained.
    batch_size: Sequences of a global batch.
    seq_len: Tokens of a sequence.
    epoch_rows: Full-length sequences of an epoch; None if it is endless or not known.
    stages: Lines on the stages of a ramp, if there is one.
    num_sequences: Full-length sequences of the run; None: `batch_size` in each step.
    devices: The mesh.
    flops: FLOPs per token of training.
    attention: The attention kernels in use, as printed; `auto` is resolved.
    answers: The answers that are sampled in each step, in words; empty if none are.
    matmul_dtype: The dtype of most matmuls: "fp8", "int8" or a compute dtype.
  """

  num_params: int
  num_trained: int
  batch_size: int
  seq_len: int
  epoch_rows: int | None = None
  stages: str = ""
  num_sequences: int | None = None
  devices: jax.sharding.Mesh
  flops: flops.TrainingFlops
  attention: str
  answers: str = ""
  matmul_dtype: str = "bfloat16"

  def text(self, folder: epath.Path, num_steps: int) -> str:
    """Returns the lines that a run of `num_steps` steps prints first."""
    devices = self.devices
    axes = ", ".join(f"{axis} {size}" for axis, size in devices.shape.items() if size > 1)
    kind = devices.devices.flat[0].device_kind
    tokens = self.batch_size * self.seq_len
    sampled = f"answers:    {self.answers} in each step\n" if self.answers else ""
    has_frozen = self.num_trained < self.num_params
    trained = f", {self.num_trained:,} of them trained" if has_frozen else ""
    return (
      f"parameters: {self.num_params:,}{trained}\n"
      f"devices:    {devices.size} x {kind}{f' ({axes})' if axes else ''}\n"
      f"batch:      {self.batch_size} sequences x {self.seq_len} tokens = {tokens:,} tokens\n"
      f"{sampled}"
      f"{self.stages}"
      f"{self._epochs(num_steps)}"
      f"FLOPs:      {self.flops.causal:.4g} per token (causal attention, as in TFLOP/s below),"
      f" {self.flops.full:.4g} (full)\n"
      f"{self._peak_line()}"
      f"attention:  {self.attention}\n"
      f"folder:     {folder}"
    )

  def _peak(self) -> float | None:
    chip = chips.find(self.devices.devices.flat[0].device_kind)
    return None if chip is None else chip.peak(self.matmul_dtype)

  def _peak_line(self) -> str:
    """Returns the header's line on the peak that MFU is a fraction of; "" if it is unknown."""
    peak = self._peak()
    if peak is None:
      return ""
    return f"peak:       {peak / 1e12:,.1f} TFLOP/s/device in {self.matmul_dtype}, for MFU\n"

  def _epochs(self, num_steps: int) -> str:
    """Returns the header's line on epochs; "" if their length is unknown."""
    rows = self.epoch_rows
    if not rows or self.answers:
      return ""
    steps = rows / self.batch_size
    tokens = rows * self.seq_len
    total = num_steps * self.batch_size if self.num_sequences is None else self.num_sequences
    return (
      f"epoch:      {rows:,} sequences = {steps:,.4g} steps = {tokens:,} tokens;"
      f" {num_steps:,} steps = {total / rows:,.4g} epochs\n"
    )

  def speed(self, seconds: float) -> dict[str, float]:
    """Returns the rates of a step of `seconds` seconds, by their names in metrics.

    MFU is the fraction of the peak in `matmul_dtype`; it is left out where that is unknown. Steps
    that sample answers have no rate: see `sampled_tokens_per_second`.
    """
    if self.answers:
      return {"seconds_per_step": seconds}
    num_devices = self.devices.size
    tokens = self.batch_size * self.seq_len / seconds
    peak = self._peak()
    values = {
      "seconds_per_step": seconds,
      "tokens_per_second": tokens,
      "tokens_per_second_per_device": tokens / num_devices,
    }
    for name, count in (("causal", self.flops.causal), ("full", self.flops.full)):
      rate = tokens / num_devices * count
      values[f"tflops_per_second_per_device_{name}"] = rate / 1e12
      if peak is not None:
        values[f"mfu_{name}"] = rate / peak
    return values
