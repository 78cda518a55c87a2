# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes to start a run, for the first time and again.

    python benchmarks/startup.py [--repeats=3]

prints JSON lines. A start is the program as a user runs it, from the command to the end of its
first step and of the process: with an empty cache of compiled programs, and again with that of the
run before. What it takes to begin a step is in dispatch.py.
"""

import argparse
import json
import os
import resource
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


def main():
  """Measures all of it."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=3)
  for _ in range(parser.parse_args().repeats):
    with tempfile.TemporaryDirectory() as cache:
      first, again = start(cache), start(cache)
    ratio = round(again["seconds"] / first["seconds"], 3)
    print(json.dumps({"case": "start", "first": first, "again": again, "ratio": ratio}), flush=True)


if __name__ == "__main__":
  main()
