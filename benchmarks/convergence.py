# SPDX-License-Identifier: Apache-2.0
"""Trains TinyPython in bfloat16 and in fewer bits, and compares what it comes to.

    python benchmarks/convergence.py [--steps=300] [--seeds=3] [--kinds=fp8,fp8_delayed,int8]

prints one JSON line for each run: the loss in nats a token, of held-out files after the last step
and of training, a mean over the last 50 steps. Then the table: means over the seeds, and the
largest distance of a seed's held-out loss from that of bfloat16 with the same seed.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import NamedTuple


class Losses(NamedTuple):
  """What a run came to, in nats a token."""

  heldout: float
  training: float


def train(kind: str, seed: int, num_steps: int) -> Losses:
  """Returns what a run of its own process comes to; kind none is bfloat16 alone."""
  with tempfile.TemporaryDirectory() as folder:
    flags = {
      "FPROP_DTYPE": "bfloat16",
      "QUANTIZATION": kind,
      "RANDOM_SEED": seed,
      "MAX_STEPS": num_steps,
      "EVAL_INTERVAL_STEPS": 0,
      "SUMMARY_INTERVAL_STEPS": 1,
      "SAMPLE_PROMPT": "none",
    }
    command = [sys.executable, "-m", "paxlike.main", "--fdl_config=TinyPython"]
    command += [f"--fdl.{knob}={value}" for knob, value in flags.items()]
    command += [f"--job_log_dir={folder}", "--enable_checkpoint_saving=False"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  heldout = [record["loss"] for record in records if record["kind"] == "eval"]
  training = [record["loss"] for record in records if record["kind"] == "train"]
  return Losses(heldout[-1], statistics.fmean(training[-50:]))


def table(found: dict[str, list[Losses]], kinds: Iterable[str]) -> str:
  """Returns markdown, of the seeds that all kinds have."""
  rows = ["| | held out | training | held out, over bfloat16 | the seed that is farthest off |"]
  rows.append("|---|---:|---:|---:|---:|")
  exact = found["none"]
  for kind in ("none", *kinds):
    pairs = list(zip(found[kind], exact, strict=True))
    heldout, training = (statistics.fmean(values) for values in zip(*found[kind], strict=True))
    ratio = heldout / statistics.fmean(losses.heldout for losses in exact) - 1
    farthest = max((a.heldout / b.heldout - 1 for a, b in pairs), key=abs)
    name = "bfloat16" if kind == "none" else f"`QUANTIZATION={kind}`"
    rows.append(f"| {name} | {heldout:.4f} | {training:.4f} | {ratio:+.2%} | {farthest:+.2%} |")
  return "\n".join(rows)


def main():
  """Runs every kind with every seed."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--kinds", default="fp8,fp8_delayed,int8")
  arguments = parser.parse_args()
  kinds = arguments.kinds.split(",")
  found: dict[str, list[Losses]] = {kind: [] for kind in ("none", *kinds)}
  for seed in range(1, arguments.seeds + 1):
    for kind, losses in found.items():
      losses.append(train(kind, seed, arguments.steps))
      print(json.dumps({"kind": kind, "seed": seed, **losses[-1]._asdict()}), flush=True)
  print(table(found, kinds))


if __name__ == "__main__":
  main()
