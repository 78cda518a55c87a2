# SPDX-License-Identifier: Apache-2.0
"""Compiles the recipes that are named for their hardware, and tells what each device holds.

    python benchmarks/recipes.py [--only=PATTERN]

prints one row of a table for each as it is done, a process of its own each, and at the end how many
collectives of each program run beside computation. No accelerator is needed; all together take
about an hour of one core.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from typing import Any

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
  flags = [f"--fdl_config={name}", f"--topology={topology}"]
  if slices > 1:
    flags += [f"--slices={slices}", f"--fdl.DCN_MESH_SHAPE=[{slices},1,1]"]
  return flags


def compiled(flags: list[str], environ: dict[str, str] | None = None) -> dict[str, Any] | str:
  """Returns what `--mode=compile --json` says; if it fails, its error's last line.

  `environ` are further environment variables.
  """
  program = [sys.executable, "-m", "paxlike.main", "--mode=compile", "--json", *flags]
  environ = os.environ | {"JAX_PLATFORMS": "cpu"} | (environ or {})
  done = subprocess.run(program, capture_output=True, text=True, env=environ)
  if done.returncode not in (0, 3):
    return done.stderr.strip().splitlines()[-1]
  return json.loads(done.stdout)


MEMORY = ("parameters, 10^9", "arguments, GB", "peak, GB", "", "PFLOP a step")
MEMORY += ("GB sent by a device, over axes",)


def memory(found: dict[str, Any]) -> tuple[str, ...]:
  """Returns the columns of `MEMORY`."""
  room, sent = found["bytes_of_device"] / 1e9, {}
  arguments, peak = (found["bytes_per_device"][name] / 1e9 for name in ("arguments", "peak"))
  for one in found["collectives"]:
    axes = " x ".join(one["axes"])
    sent[axes] = sent.get(axes, 0) + one["nbytes"] / 1e9
  return (
    f"{found['parameters'] / 1e9:.1f}",
    f"{arguments:.1f}",
    f"{peak:.1f} of {room:.1f}",
    "fits" if found["fits"] else "does not fit",
    f"{found['flops_per_step'] / 1e15:.0f}",
    ", ".join(f"{axes} {size:.3g}" for axes, size in sent.items() if size > 0.1),
  )


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
OVERLAP = (*KINDS, "GB sent synchronously, of all")


def overlap(found: dict[str, Any]) -> tuple[str, ...]:
  """Returns the columns of `OVERLAP`: asynchronous/synchronous, in loops + outside."""
  rows = found["overlap"]
  cells = []
  for kind in KINDS:
    inside, outside = (
      next((row for row in rows if (row["kind"], row["in_loop"]) == (kind, looped)), None)
      for looped in (True, False)
    )
    pairs = [
      f"{row['asynchronous']}/{row['synchronous']}" if row else "0" for row in (inside, outside)
    ]
    cells.append(" + ".join(pairs) if inside or outside else "")
  waited = sum(row["synchronous_nbytes"] for row in rows) / 1e9
  every = waited + sum(row["asynchronous_nbytes"] for row in rows) / 1e9
  return (*cells, f"{waited:.3g} of {every:.3g}")


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", default="", help="recipes whose name has this pattern")
  options = parser.parse_args()
  found = {}
  print_row("recipe", "topology", "slices", *MEMORY)
  print(f"|---|---|---:|{'---:|' * len(MEMORY)}")
  for recipe in RECIPES:
    if re.search(options.only, recipe[0]):
      found[recipe] = compiled(command(*recipe))
      print_recipe(recipe, found[recipe], memory)
  print()
  print_row("recipe", "topology", "slices", *OVERLAP)
  print(f"|---|---|---:|{'---:|' * len(OVERLAP)}")
  for recipe, one in found.items():
    print_recipe(recipe, one, overlap)


def print_recipe(recipe: tuple[str, str, int], found: dict[str, Any] | str, cells: Any):
  """Prints the row of a recipe, or why it could not be compiled."""
  name, topology, slices = recipe
  told = (found,) if isinstance(found, str) else cells(found)
  print_row(f"`{name}`", topology, str(slices), *told)


def print_row(*cells: str):
  """Prints a row of a table in Markdown."""
  print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
  main()
