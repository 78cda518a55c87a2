# SPDX-License-Identifier: Apache-2.0
"""Measures how the cost of a train step on a CPU grows with the model, its input, and the devices.

    python benchmarks/growth.py [--dtype=float32] [--steps=5] [--only=width]

prints medians of CPU-seconds of a GPT's step as one size grows 2, 4 and 8 times, and how many times
the time and the FLOPs of the first they are. With more devices the whole batch stays the same. Each
is measured in a process of its own.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from cpu_sides import Worker

BASE: dict[str, Any] = {
  "LR_SCHEDULE": "constant",
  "USE_REPEATED_LAYER": False,
  "CHECKPOINT_POLICY": "SAVE_EVERYTHING",
  "NUM_LAYERS": 2,
  "MODEL_DIMS": 256,
  "HIDDEN_DIMS": 1024,
  "NUM_HEADS": 4,
  "DIMS_PER_HEAD": 64,
  "VOCAB_SIZE": 2048,
  "MAX_SEQ_LEN": 256,
  "PERCORE_BATCH_SIZE": 8,
}
# What grows of a model -> the knobs to multiply.
MODEL = {
  "layers": ("NUM_LAYERS",),
  "width": ("MODEL_DIMS", "HIDDEN_DIMS", "NUM_HEADS"),
  "vocabulary": ("VOCAB_SIZE",),
}
GROWN = MODEL | {
  "sequence length": ("MAX_SEQ_LEN",),
  "batch": ("PERCORE_BATCH_SIZE",),
  "devices": (),
}
TIMES = (1, 2, 4, 8)


def print_rows(name: str, digits: int, measure: Callable[[int], Sequence[float]]):
  """Prints a row of a table for each of `TIMES`.

  Args:
    name: What grows.
    digits: After the point of the first figure.
    measure: Returns the figures for so many times the size; the first one is printed, and then by
      how much each is larger than it was.
  """
  first = None
  for times in TIMES:
    found = measure(times)
    first = found if first is None else first
    ratios = (f"{x / y:.2f}" for x, y in zip(found, first, strict=True))
    print(f"| {name} | {times} | {found[0]:.{digits}f} | {' | '.join(ratios)} |", flush=True)


def measure(knobs: dict[str, Any], *, devices: int, steps: int) -> tuple[float, float]:
  """Returns the median of CPU-seconds of a step, and its FLOPs."""
  os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
  task = {"experiment": "Synthetic126M", "knobs": knobs}
  with Worker("paxlike", task) as worker:
    tokens = worker.facts["batch"] * knobs["MAX_SEQ_LEN"]
    turns = [worker.turn() for _ in range(steps)]
    return statistics.median(one.cpu for one in turns), tokens * worker.facts["flops_causal"]


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--steps", type=int, default=5)
  parser.add_argument("--only", choices=GROWN, help="what grows")
  options = parser.parse_args()
  base = BASE | {"FPROP_DTYPE": options.dtype}
  print("| what grows | times | CPU-seconds | of the first | FLOPs of the first |")
  print("|---|---:|---:|---:|---:|", flush=True)
  for name in [options.only] if options.only else GROWN:

    def measured(times: int, name: str = name) -> tuple[float, float]:
      knobs = base | {knob: base[knob] * times for knob in GROWN[name]}
      devices = times if name == "devices" else 1
      knobs["PERCORE_BATCH_SIZE"] //= devices
      return measure(knobs, devices=devices, steps=options.steps)

    print_rows(name, 3, measured)


if __name__ == "__main__":
  main()
