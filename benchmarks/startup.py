# SPDX-License-Identifier: Apache-2.0
"""Measures what there is besides the arithmetic of steps: starting a run, and launching a step.

    python benchmarks/startup.py [--repeats=3]

prints JSON lines. A start is the program as a user runs it, from the command to the end of its
first step and of the process: with an empty cache of compiled programs, and again with that of the
run before. A launch hands the state of a model with 400 parameters, 1,200 arrays as Adam has two
more for each, to a program that gives it back: all that JAX does for a step but computing it.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

FLAGS = (
  "--fdl_config=Synthetic126M",
  "--fdl.NUM_LAYERS=4",
  "--fdl.MODEL_DIMS=256",
  "--fdl.HIDDEN_DIMS=1024",
  "--fdl.NUM_HEADS=4",
  "--fdl.DIMS_PER_HEAD=64",
  "--fdl.VOCAB_SIZE=8192",
  "--fdl.MAX_SEQ_LEN=256",
  "--fdl.PERCORE_BATCH_SIZE=8",
  "--fdl.FPROP_DTYPE=float32",
  "--fdl.MAX_STEPS=1",
  "--fdl.EVAL_INTERVAL_STEPS=0",
  "--enable_checkpoint_saving=False",
)


def start(cache: str) -> dict[str, float]:
  """Runs one step in a process of its own; returns its seconds and CPU-seconds."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "paxlike.main", *FLAGS, f"--job_log_dir={folder}/run"]
    own = os.environ | {"PAXLIKE_CACHE": cache}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=own, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}


def launch(num_arrays: int, *, times: int = 200) -> float:
  """Returns the median milliseconds of a program that gives its arguments back."""
  import jax
  import jax.numpy as jnp

  state = {f"array {number}": jnp.ones(8) for number in range(num_arrays)}
  program = jax.jit(lambda state: state, donate_argnums=0).lower(state).compile()
  taken = []
  for _ in range(times):
    began = time.perf_counter()
    state = program(state)
    taken.append(time.perf_counter() - began)
    jax.block_until_ready(state)
  return 1e3 * statistics.median(taken)


def main():
  """Measures all of it."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=3)
  for _ in range(parser.parse_args().repeats):
    with tempfile.TemporaryDirectory() as cache:
      first, again = start(cache), start(cache)
    ratio = round(again["seconds"] / first["seconds"], 3)
    print(json.dumps({"case": "start", "first": first, "again": again, "ratio": ratio}), flush=True)
  for num_arrays in (1, 400, 1200):
    milliseconds = round(launch(num_arrays), 3)
    print(json.dumps({"case": "launch", "arrays": num_arrays, "milliseconds": milliseconds}))


if __name__ == "__main__":
  main()
