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
# What grows -> the knobs that do.
GROWN = {
  "layers": ("NUM_LAYERS",),
  "width": ("MODEL_DIMS", "HIDDEN_DIMS", "NUM_HEADS"),
  "sequence length": ("MAX_SEQ_LEN",),
  "batch": ("PERCORE_BATCH_SIZE",),
  "vocabulary": ("VOCAB_SIZE",),
  "devices": (),
}
TIMES = (1, 2, 4, 8)


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
    grown, first = GROWN[name], None
    for times in TIMES:
      knobs = base | {knob: base[knob] * times for knob in grown}
      devices = 1 if grown else times
      knobs["PERCORE_BATCH_SIZE"] //= devices
      found = measure(knobs, devices=devices, steps=options.steps)
      first = first or found
      ratios = (f"{x / y:.2f}" for x, y in zip(found, first, strict=True))
      print(f"| {name} | {times} | {found[0]:.3f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
  main()
