# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics of steps without making the devices wait, and times the steps."""

import collections
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from paxlike.errors import RunError

# Prefix of the metrics that count tokens per data source.
TOKENS_OF = "tokens/"


class Reading(NamedTuple):
  """A completed step.

  Attributes:
    step: Counted from 0.
    values: Each metric: its sum divided by its weight.
    weight: Weight of the loss, such as the number of target tokens.
    seconds: Device time of the step; None if something else ran in between.
    layers: The `LayerMetrics` of the step as host arrays; None: it has none.
    causes: What ran in between, such as "evaluation"; empty if `seconds` is not None.
  """

  step: int
  values: dict[str, float]
  weight: float
  seconds: float | None
  layers: Any = None
  causes: tuple[str, ...] = ()


def check_finite(reading: Reading, skipped: int, *, most: int):
  """Raises a RunError if the number of consecutive skipped steps, `skipped`, reaches `most`."""
  if skipped < most:
    return
  values = reading.values
  if values.get("spike"):
    raise RunError(
      f"the last {skipped} steps, to step {reading.step}, were spikes (loss {values['loss']},"
      f" gradient norm {values['grad_norm']}). Their updates were dropped (ON_SPIKE=skip). Lower"
      " LEARNING_RATE, look at the data, or raise SPIKE_DEVIATIONS; older checkpoints are intact."
    )
  raise RunError(
    f"the last {skipped} steps, up to step {reading.step}, had a loss or gradient that is not"
    f" finite (loss {values['loss']}, gradient norm {values['grad_norm']}). Their updates were"
    " dropped. Lower LEARNING_RATE, look at the data, or set FPROP_DTYPE=float32; older checkpoints"
    " are intact."
  )


class Meter:
  """Holds the metrics of the last steps until the device has computed them.

  At most `depth` steps are in flight: adding another waits for the oldest. The time of a step is
  measured from the completion of the step before to its own.
  """

  def __init__(self, *, depth: int):
    self._depth = depth
    self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
    self._last: float | None = None
    self._causes = ["start", "compilation"]  # Why the next step has no time.

  def add(self, step: int, metrics: Any, layers: Any = None) -> Iterator[Reading]:
    """Adds the metrics, and those of layers, of a dispatched step; yields completed steps."""
    for leaf in jax.tree.leaves((metrics, layers)):
      leaf.copy_to_host_async()
    self._pending.append((step, metrics, layers))
    while len(self._pending) > self._depth:
      yield self._read()

  @property
  def is_computing(self) -> bool:
    """Whether the devices have not completed the last step that was added."""
    if not self._pending:
      return False
    return not jax.tree.leaves(self._pending[-1][1])[0].is_ready()

  def flush(self) -> Iterator[Reading]:
    """Waits for all steps in flight, and yields them."""
    while self._pending:
      yield self._read()

  def pause(self, cause: str):
    """Leaves the next step untimed, because `cause` precedes it; no step may be in flight."""
    self._last = None
    self._causes.append(cause)

  def _read(self) -> Reading:
    step, metrics, layers = self._pending.popleft()
    host, layers = jax.device_get((metrics, layers))
    now = time.perf_counter()
    seconds = None if self._last is None else now - self._last
    self._last = now
    values = {name: float(total / max(weight, 1e-9)) for name, (total, weight) in host.items()}
    causes, self._causes = tuple(self._causes), []
    return Reading(step, values, float(host["loss"][1]), seconds, layers, causes)
