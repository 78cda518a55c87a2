# SPDX-License-Identifier: Apache-2.0
"""Measures how the cost of a new token on a CPU grows with the model, the prompts and their length.

    python benchmarks/decode_growth.py [--dtype=float32] [--new_tokens=32] [--only=context]

prints CPU-milliseconds of a decoding step of a GPT, a token for each prompt, as one size grows 2, 4
and 8 times, and how many times the first they are. Each is the median of three differences: a run
with the new tokens less one that ends after the first of them.
"""

import argparse
import statistics
import time
from typing import Any

import experiments
import gpu_experiment
import jax
import numpy as np

from paxlike.inference.generate import Generator
from paxlike.inference.request import Request
from paxlike.training import train_state

BASE: dict[str, Any] = {
  "USE_REPEATED_LAYER": False,
  "NUM_LAYERS": 4,
  "MODEL_DIMS": 512,
  "HIDDEN_DIMS": 2048,
  "NUM_HEADS": 8,
  "DIMS_PER_HEAD": 64,
  "VOCAB_SIZE": 8192,
  "MAX_SEQ_LEN": 8192,
}
# What grows -> the knobs that do, if it is the model.
GROWN = {
  "layers": ("NUM_LAYERS",),
  "width": ("MODEL_DIMS", "HIDDEN_DIMS", "NUM_HEADS"),
  "vocabulary": ("VOCAB_SIZE",),
  "prompts": (),
  "context": (),
}
CONTEXT = 256  # Tokens before the first new one.
TIMES = (1, 2, 4, 8)


def measure(knobs: dict[str, Any], *, prompts: int, context: int, new_tokens: int) -> float:
  """Returns the CPU-seconds of a decoding step."""
  _, trainer = experiments.build("Synthetic126M", gpu_experiment.arguments(knobs))
  given = np.random.default_rng(0).integers(3, knobs["VOCAB_SIZE"], (prompts, context), np.int32)
  with jax.set_mesh(trainer.devices):
    params = train_state.init_params(trainer.definition, trainer.devices, seed=0)
    generator = Generator(
      trainer.definition, params, num_rows=prompts, max_len=context + new_tokens + 1
    )

    def cpu_seconds(count: int) -> float:
      began = time.process_time()
      for _ in generator.run([Request(tokens=one, max_new_tokens=count) for one in given]):
        pass
      return time.process_time() - began

    cpu_seconds(new_tokens + 1)
    taken = [cpu_seconds(new_tokens + 1) - cpu_seconds(1) for _ in range(3)]
  return statistics.median(taken) / new_tokens


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--new_tokens", type=int, default=32)
  parser.add_argument("--only", choices=GROWN, help="what grows")
  options = parser.parse_args()
  base = BASE | {"FPROP_DTYPE": options.dtype}
  print("| what grows | times | CPU-milliseconds a step | of the first |")
  print("|---|---:|---:|---:|", flush=True)
  for name in [options.only] if options.only else GROWN:
    first = None
    for times in TIMES:
      seconds = measure(
        base | {knob: base[knob] * times for knob in GROWN[name]},
        prompts=times if name == "prompts" else 1,
        context=CONTEXT * (times if name == "context" else 1),
        new_tokens=options.new_tokens,
      )
      first = first or seconds
      print(f"| {name} | {times} | {seconds * 1e3:.2f} | {seconds / first:.2f} |", flush=True)


if __name__ == "__main__":
  main()
