# SPDX-License-Identifier: Apache-2.0
"""How the cases of benchmarks/gpu.py take time, and what they are told and tell."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_STARTED = time.monotonic()

WARM_UP_STEPS = 5
GROUPS = 3
# Of a group, at least; more where they take less than half a second. On a CPU speed is not told.
STEPS, GROUP_SECONDS = 20, 0.5
STEPS_ON_CPU = 3
# Batches that take turns: on the device beforehand, so that no side waits for its data.
BATCHES = 4


class Task(NamedTuple):
  """What a case is asked to do: the one argument of its process, as JSON.

  Attributes:
    case: `gpu_suites.Case` as a dict.
    model: `gpu_suites.Model` as a dict; empty of the roofline.
    facts: What `gpu_experiment.facts` tells of it.
    gpu: Whether the device is one.
    seconds: From the start of the process to its deadline.
    output: A folder for files.
  """

  case: dict[str, Any]
  model: dict[str, Any]
  facts: dict[str, Any]
  gpu: bool
  seconds: float
  output: str

  @property
  def left(self) -> float:
    """Seconds to the deadline, less some to end in."""
    return self.seconds - (time.monotonic() - _STARTED) - 5


class Times(NamedTuple):
  """What `measure` found.

  Attributes:
    first_seconds: Of the first step, waited for.
    groups: Seconds a step, of each group.
    steps: Of a group.
    before, after: What `card` told.
  """

  first_seconds: float
  groups: list[float]
  steps: int
  before: dict[str, float]
  after: dict[str, float]


def task() -> Task:
  """Returns what this process is to do."""
  return Task(**json.loads(sys.argv[1]))


def tell(**result: Any):
  """Prints the result, the last line of this process's output."""
  print(json.dumps(result), flush=True)


def measure(step: Callable[[], None], wait: Callable[[], None], task: Task) -> Times:
  """Times groups of steps, of which only the last is waited for.

  Args:
    step: Begins a step.
    wait: Waits for the last one.
    task: Its deadline makes groups smaller, and drops all but the first.
  """

  def timed(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
      step()
    wait()
    return time.perf_counter() - began

  first = timed(1)
  timed(WARM_UP_STEPS - 2)
  one = timed(1)
  before, groups = card(), []
  wanted = max(STEPS, int(GROUP_SECONDS / one)) if task.gpu else STEPS_ON_CPU
  steps = max(min(wanted, int(0.8 * task.left / one / GROUPS)), 3)
  for _ in range(GROUPS):
    if not groups or task.left > 1.5 * steps * groups[-1]:
      groups.append(timed(steps) / steps)
  return Times(first, groups, steps, before, card())


def card() -> dict[str, float]:
  """Returns what nvidia-smi tells of clocks (MHz), power (W) and heat (C), if it exists."""
  program = shutil.which("nvidia-smi")
  if program is None:
    return {}
  names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
  which = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
  query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", f"--id={which}"]
  try:
    told = subprocess.run([program, *query], capture_output=True, text=True, timeout=20).stdout
  except subprocess.TimeoutExpired:
    return {}
  values = told.strip().split(", ")
  if len(values) != len(names):
    return {}
  return {
    name: float(value) for name, value in zip(names, values, strict=True) if _is_number(value)
  }


def _is_number(text: str) -> bool:
  return text.replace(".", "", 1).isdigit()
