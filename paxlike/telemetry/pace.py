# SPDX-License-Identifier: Apache-2.0
"""The pace of a run: the time that it still needs, and its speed at the end."""

import collections
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from paxlike.telemetry import formatting
from paxlike.telemetry.run_header import RunHeader
from paxlike.telemetry.step_metrics import Reading

_STEADY = 0.2
_KEPT = 10_000  # The last steps, of which the median is taken.


def typical(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
  """Returns the median of a value in the training records without the first fifth; None: none."""
  found = [one.get(name) for one in records if one.get("kind") == "train"]
  values = [value for value in found if isinstance(value, int | float)]
  return statistics.median(values[int(_STEADY * len(values)) :]) if values else None


class Pace:
  """The steps of this process, without the first few, in which caches and clocks warm up."""

  def __init__(
    self, header: RunHeader, *, num_steps: int, skip: int = 0, target_tokens: float | None = None
  ):
    """`skip` is SPEED_SKIP_STEPS, and `target_tokens` TARGET_TOKENS."""
    self._header = header
    self._num_steps = num_steps
    self._skip = skip
    self._target_tokens = target_tokens
    self._seconds = collections.deque[float](maxlen=_KEPT)
    self._num_seen = 0
    self._first: tuple[int, float] | None = None  # Of the first step that counts: step and time.

  def add(self, reading: Reading):
    """Adds a completed step."""
    self._num_seen += 1
    if self._num_seen <= max(self._skip, 1):
      return
    if self._first is None:
      self._first = reading.step, time.perf_counter()
    if reading.seconds is not None:
      self._seconds.append(reading.seconds)

  def left(self, step: int) -> float | None:
    """Returns the seconds from the end of `step` to that of the run, at the pace so far.

    Evaluations and checkpoints are part of the pace. None: no two steps count yet.
    """
    if self._first is None or step <= self._first[0]:
      return None
    first, began = self._first
    return (time.perf_counter() - began) / (step - first) * (self._num_steps - step - 1)

  def text(self) -> str | None:
    """Returns the lines at the end of a run on its speed.

    Without a step that counts, they say why there is no target, if one was given; else None.
    """
    if not self._seconds:
      if self._target_tokens is None or not self._num_seen:
        return None
      few = self._num_seen <= self._skip
      within = f"all {self._num_seen:,} steps are within SPEED_SKIP_STEPS={self._skip}"
      return f"no speed for TARGET_TOKENS: {within if few else 'no step ran by itself'}"
    seconds = statistics.median(self._seconds)
    speed = self._header.speed(seconds)
    left_out = f"the first {self._skip} are" if self._skip > 1 else "the first is"
    line = (
      f"speed: {seconds:.3f} s a step (median of {len(self._seconds):,} steps; {left_out} left out)"
    )
    if "tokens_per_second" not in speed:
      return line
    rates = []
    for name, attention in (("causal", "causal attention"), ("full", "full attention")):
      mfu = speed.get(f"mfu_{name}")
      percent = "" if mfu is None else f" = {mfu:.2%} MFU"
      rates.append(
        f"{speed[f'tflops_per_second_per_device_{name}']:.2f} TFLOP/s/device{percent} ({attention})"
      )
    line = f"{line}: {speed['tokens_per_second']:,.0f} tokens/s, {', '.join(rates)}"
    if self._target_tokens is None:
      return line
    whole = formatting.duration(self._target_tokens / speed["tokens_per_second"])
    return f"{line}\ntarget: {self._target_tokens:.4g} tokens take {whole} at this speed"
