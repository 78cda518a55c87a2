# SPDX-License-Identifier: Apache-2.0
"""Measures how the time to compile a train step grows with its layers.

    python benchmarks/compile_growth.py [--scanned=1,2,4,8,16,32,64,96] [--unrolled=1,2,4,8,16]
        [--repeats=3] [EXPERIMENT [--fdl.KNOB=VALUE ...]]

prints a table: medians of CPU-seconds, of all threads, of tracing and lowering a step and of
compiling it for the devices of this machine, scanned (USE_REPEATED_LAYER) and unrolled. Nothing is
allocated, and no cache is used. Without an EXPERIMENT: the LLaMA of cpu.py.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import cpu
import experiments
import gpu_experiment
import jax


def seconds(name: str, arguments: Sequence[str]) -> tuple[float, float]:
  """Returns the CPU-seconds of lowering a step, and of compiling it."""
  _, trainer = experiments.build(name, arguments)
  jax.config.update("jax_enable_compilation_cache", False)
  jax.clear_caches()
  state, batch = trainer.abstract()
  with jax.set_mesh(trainer.devices):
    began = time.process_time()
    lowered = trainer.lower(state, batch)
    between = time.process_time()
    trainer.execution.compile_step(lowered)
    return between - began, time.process_time() - between


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--scanned", default="1,2,4,8,16,32,64,96")
  parser.add_argument("--unrolled", default="1,2,4,8,16")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("experiment", nargs="?")
  options, flags = parser.parse_known_args()
  name = options.experiment
  if name is None:
    name, flags = "SyntheticLLaMA7B", [*gpu_experiment.arguments(cpu.LLAMA), *flags]
  print("| layers | | lowering | compiling |\n|---:|---|---:|---:|", flush=True)
  for kind in ("scanned", "unrolled"):
    for layers in getattr(options, kind).split(","):
      given = {"NUM_LAYERS": layers, "USE_REPEATED_LAYER": kind == "scanned"}
      arguments = [*flags, *gpu_experiment.arguments(given)]
      seconds(name, arguments)  # What is done once in a process is not of a step.
      times = [seconds(name, arguments) for _ in range(options.repeats)]
      medians = (statistics.median(column) for column in zip(*times, strict=True))
      print(f"| {layers} | {kind} | {' | '.join(f'{x:.2f}' for x in medians)} |", flush=True)


if __name__ == "__main__":
  main()
