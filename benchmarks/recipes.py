# SPDX-License-Identifier: Apache-2.0
"""Compiles the recipes that are named for their hardware, and tells what each device holds.

    python benchmarks/recipes.py [--only=PATTERN]

prints one row of a table for each as it is done, a process of its own each. No accelerator is
needed; all together take about an hour of one core.
"""

import argparse
import json
import os
import re
import subprocess
import sys

# Experiment, topology, slices.
RECIPES = (
  ("Scaled16BV5e256", "v5e-256", 1),
  ("Scaled16BV5e256", "v5e-256", 2),
  ("Scaled32BV5e256", "v5e-256", 1),
  ("Scaled32BV5e256", "v5e-256", 2),
  ("Scaled64BV5e256", "v5e-256", 1),
  ("Scaled64BV5e256", "v5e-256", 2),
  ("Scaled128BV5e256", "v5e-256", 1),
  ("Scaled128BV5e256", "v5e-256", 2),
  ("Scaled32BV5p128", "v5p-128", 1),
  ("Scaled64BV5p128", "v5p-128", 1),
  ("Scaled128BV5p256", "v5p-256", 1),
  ("Scaled256BV5p1024", "v5p-1024", 1),
  ("Scaled512BV5p1024", "v5p-1024", 1),
  ("Scaled1024BV5p4096", "v5p-4096", 1),
  ("SyntheticLLaMA70B64Gpus", "h100-64", 1),
  ("Synthetic175B64Gpus", "h100-64", 1),
  ("Synthetic5B256Gpus", "h100-256", 1),
  ("Synthetic175B256Gpus", "h100-256", 1),
  ("SyntheticGLaM64B64E512Gpus", "h100-512", 1),
  ("SyntheticLLaMA7B16Gpus", "h100-16", 1),
  ("SyntheticLLaMA7BLora16Gpus", "h100-16", 1),
)


def command(name: str, topology: str, slices: int) -> list[str]:
  """Returns the flags that compile a recipe; slices share the batch, each with all weights."""
  flags = [f"--fdl_config={name}", "--mode=compile", f"--topology={topology}"]
  if slices > 1:
    flags += [f"--slices={slices}", f"--fdl.DCN_MESH_SHAPE=[{slices},1,1]"]
  return flags


def row(name: str, topology: str, slices: int) -> str:
  """Returns a line of the table."""
  program = [sys.executable, "-m", "paxlike.main", *command(name, topology, slices), "--json"]
  environ = os.environ | {"JAX_PLATFORMS": "cpu"}
  done = subprocess.run(program, capture_output=True, text=True, env=environ)
  if done.returncode not in (0, 3):
    return f"| `{name}` | {topology} | {slices} | {done.stderr.strip().splitlines()[-1]} |"
  facts = json.loads(done.stdout)
  room, sent = facts["bytes_of_device"] / 1e9, {}
  arguments, peak = (facts["bytes_per_device"][name] / 1e9 for name in ("arguments", "peak"))
  for one in facts["collectives"]:
    axes = " x ".join(one["axes"])
    sent[axes] = sent.get(axes, 0) + one["nbytes"] / 1e9
  told = ", ".join(f"{axes} {size:.3g}" for axes, size in sent.items() if size > 0.1)
  verdict = "fits" if facts["fits"] else "does not fit"
  return (
    f"| `{name}` | {topology} | {slices} | {facts['parameters'] / 1e9:.1f} |"
    f" {arguments:.1f} | {peak:.1f} of {room:.1f} | {verdict} |"
    f" {facts['flops_per_step'] / 1e15:.0f} | {told} |"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", default="", help="recipes whose name has this pattern")
  options = parser.parse_args()
  columns = ("recipe", "topology", "slices", "parameters, 10^9", "arguments, GB", "peak, GB", "")
  columns += ("PFLOP a step", "GB sent by a device, over axes")
  print(f"| {' | '.join(columns)} |")
  print("|---|---|---:|---:|---:|---:|---|---:|---|")
  for recipe in RECIPES:
    if re.search(options.only, recipe[0]):
      print(row(*recipe), flush=True)


if __name__ == "__main__":
  main()
