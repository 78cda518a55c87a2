# SPDX-License-Identifier: Apache-2.0
"""Measures how a decoding step on a CPU grows with the model, the prompts and the cache.

    python benchmarks/decode_growth.py [--dtype=float32] [--calls=2] [--only=slots]

A decoding step adds a token to each prompt. Prints its CPU-milliseconds for a GPT, the work of the
host included, as one size grows to 2, 4 and 8 times, and their ratio to the first. Each is the
median of three differences: a run with --calls more calls of the program, minus one without them.
"""

import argparse
import statistics
import time
from typing import Any

import experiments
import gpu_experiment
import growth
import jax
import numpy as np

from paxlike.checks.check import is_cpu
from paxlike.inference.generate import STEPS_PER_CALL, Generator
from paxlike.inference.request import Request
from paxlike.training import train_state

BASE = growth.BASE | {
  "NUM_LAYERS": 4,
  "MODEL_DIMS": 512,
  "HIDDEN_DIMS": 2048,
  "NUM_HEADS": 8,
  "VOCAB_SIZE": 8192,
  "MAX_SEQ_LEN": 8192,
}
GROWN: dict[str, tuple[str, ...]] = growth.MODEL | {"prompts": (), "slots": ()}
SLOTS = 256  # Of the cache, for each prompt.


def measure(knobs: dict[str, Any], *, prompts: int, slots: int, calls: int) -> float:
  """Returns the CPU-seconds of a decoding step."""
  _, trainer = experiments.build("Synthetic126M", gpu_experiment.arguments(knobs))
  assert is_cpu(trainer.devices), "CPU-seconds tell nothing about accelerators"
  length = slots - (1 + calls) * STEPS_PER_CALL - 1
  given = np.random.default_rng(0).integers(3, knobs["VOCAB_SIZE"], (prompts, length), np.int32)
  with jax.set_mesh(trainer.devices):
    params = train_state.init_params(trainer.definition, trainer.devices, seed=0)
    generator = Generator(trainer.definition, params, num_rows=prompts, max_len=slots)

    def cpu_seconds(num_calls: int) -> float:
      count = num_calls * STEPS_PER_CALL + 1  # The first token is that of the prefill.
      began = time.process_time()
      for _ in generator.run([Request(tokens=one, max_new_tokens=count) for one in given]):
        pass
      return time.process_time() - began

    cpu_seconds(1 + calls)
    taken = [cpu_seconds(1 + calls) - cpu_seconds(1) for _ in range(3)]
  return statistics.median(taken) / (calls * STEPS_PER_CALL)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--calls", type=int, default=2)
  parser.add_argument("--only", choices=GROWN, help="what grows")
  options = parser.parse_args()
  base = BASE | {"FPROP_DTYPE": options.dtype}
  print("| what grows | times | CPU-milliseconds a step | of the first |")
  print("|---|---:|---:|---:|", flush=True)
  for name in [options.only] if options.only else GROWN:

    def measured(times: int, name: str = name) -> tuple[float]:
      seconds = measure(
        base | {knob: base[knob] * times for knob in GROWN[name]},
        prompts=times if name == "prompts" else 1,
        slots=SLOTS * (times if name == "slots" else 1),
        calls=options.calls,
      )
      return (seconds * 1e3,)

    growth.print_rows(name, 2, measured)


if __name__ == "__main__":
  main()
