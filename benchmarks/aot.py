# SPDX-License-Identifier: Apache-2.0
"""Compiles a recipe for TPUs that are not attached, by paxlike and by MaxText in turns.

    python benchmarks/aot.py 16b-v5e-256 --maxtext_python=PATH [--python=PATH] [--rounds=3]

MaxText is that of an environment of its own, made by

    python3.12 -m venv DIR && DIR/bin/pip install 'maxtext[tpu]==0.2.5'

and --python runs paxlike; its JAX and libtpu should have MaxText's versions. Prints a row for each:
the medians of CPU-seconds and of resident memory of the whole command, the peak memory of a chip,
the bytes that it sends in a step, by axes, how many of them it waits for in loops, and the seconds
of a step as `--mode=compile` predicts them from a program.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from jax.sharding import Mesh

from paxlike.compilation import hlo_collectives
from paxlike.devices import topology
from paxlike.devices.mesh import MeshSpec
from paxlike.planning import machines, program_time


class Recipe(NamedTuple):
  """One model and topology, as both name it."""

  experiment: str
  topology: str
  mesh: dict[str, int]
  maxtext: dict[str, Any]


# MaxText's configs/v5e/16b.sh and configs/v5p/32b.sh.
RECIPES = {
  "16b-v5e-256": Recipe(
    "Scaled16BV5e256",
    "v5e-256",
    {"fsdp": 256},
    {"global_parameter_scale": 16, "per_device_batch_size": 6, "remat_policy": "full"},
  ),
  "32b-v5p-128": Recipe(
    "Scaled32BV5p128",
    "v5p-128",
    {"fsdp": 16, "tensor": 4},
    {"global_parameter_scale": 32, "per_device_batch_size": 6, "remat_policy": "minimal"},
  ),
}

# Runs MaxText's compiler, and keeps the program that it has compiled.
MAXTEXT = """
import json, pathlib, runpy, sys
import jax

folder = pathlib.Path(sys.argv.pop(1))
compile = jax.stages.Lowered.compile

def keep(lowered, *arguments, **options):
  compiled = compile(lowered, *arguments, **options)
  if "jit_train_step" in compiled.as_text()[:200]:
    (folder / "program.txt").write_text(compiled.as_text())
    peak = compiled.memory_analysis().peak_memory_in_bytes
    (folder / "peak.json").write_text(json.dumps(peak))
  return compiled

jax.stages.Lowered.compile = keep
runpy.run_module("maxtext.trainers.pre_train.train_compile", run_name="__main__", alter_sys=True)
"""


class Compiled(NamedTuple):
  """CPU-seconds and resident bytes of compiling; a chip's bytes, and the seconds of its step."""

  cpu: float
  resident: float
  peak: float
  sent: dict[str, float]
  waited: float
  step: float


def run(command: list[str]) -> tuple[str, float, float]:
  """Runs a command; returns its output, its CPU-seconds, and its peak resident bytes."""
  environ = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
  environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  environ.pop("TPU_LIBRARY_PATH", None)  # JAX has set it to the libtpu of this process.
  with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
    process = subprocess.Popen(command, stdout=out, stderr=log, text=True, env=environ)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    out.seek(0)
    log.seek(0)
    if process.returncode:
      raise SystemExit(f"aot.py: {command[0]} has failed:\n{log.read()[-2000:]}")
    return out.read(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def paxlike(recipe: Recipe, python: str) -> Compiled:
  """Compiles by paxlike."""
  flags = [f"--fdl_config={recipe.experiment}", f"--topology={recipe.topology}"]
  text, cpu, resident = run([python, "-m", "paxlike.main", "--mode=compile", "--json", *flags])
  found = json.loads(text)
  waited = sum(one["synchronous_nbytes"] for one in found["overlap"] if one["in_loop"])
  sent: dict[str, float] = {}
  for one in found["collectives"]:
    axes = " x ".join(one["axes"])
    sent[axes] = sent.get(axes, 0.0) + one["nbytes"]
  peak, step = found["bytes_per_device"]["peak"], found["predicted"]["program"]["total"]
  return Compiled(cpu, resident, peak, sent, waited, step)


def maxtext(recipe: Recipe, python: str) -> Compiled:
  """Compiles by MaxText."""
  settings = recipe.maxtext | {f"ici_{axis}_parallelism": n for axis, n in recipe.mesh.items()}
  settings |= {"compile_topology": recipe.topology, "compile_topology_num_slices": 1}
  settings |= {"max_target_length": 2048, "attention": "flash", "dataset_type": "synthetic"}
  with tempfile.TemporaryDirectory() as folder:
    settings |= {"run_name": "aot", "base_output_directory": folder, "enable_checkpointing": False}
    found = [python, "-c", "import maxtext.configs as m; print(list(m.__path__)[0])"]
    configs = pathlib.Path(run(found)[0].split()[-1])
    flags = [f"{name}={value}" for name, value in settings.items()]
    command = [python, "-c", MAXTEXT, folder, str(configs / "base.yml"), *flags]
    _, cpu, resident = run(command)
    text = pathlib.Path(folder, "program.txt").read_text()
    peak = json.loads(pathlib.Path(folder, "peak.json").read_text())
  mesh = devices(recipe)
  sent: dict[str, float] = {}
  for one in hlo_collectives.instructions(text, mesh):
    axes = " x ".join(one.axes)
    sent[axes] = sent.get(axes, 0.0) + one.nbytes
  overlap = hlo_collectives.overlap(text, mesh)
  waited = sum(one.synchronous_nbytes for one in overlap if one.in_loop)
  chips = list(mesh.devices.flat)
  machine = machines.find(chips[0].device_kind)
  assert machine is not None
  with topology.target(recipe.topology):
    step = program_time.predict(text, chips, machine).total
  return Compiled(cpu, resident, peak, sent, waited, step)


def devices(recipe: Recipe) -> Mesh:
  """Returns the mesh of a recipe, whose axes MaxText orders alike."""
  with topology.target(recipe.topology):
    return MeshSpec(ici=recipe.mesh).build()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("recipe", choices=RECIPES)
  parser.add_argument("--maxtext_python", required=True, help="of an environment with MaxText")
  parser.add_argument("--python", default=sys.executable, help="of one with paxlike")
  parser.add_argument("--rounds", type=int, default=3)
  options = parser.parse_args()
  recipe = RECIPES[options.recipe]
  found: dict[str, list[Compiled]] = {"paxlike": [], "MaxText": []}
  for _ in range(options.rounds):
    found["paxlike"].append(paxlike(recipe, options.python))
    found["MaxText"].append(maxtext(recipe, options.maxtext_python))
  print("| | CPU-seconds | resident GB | peak GB | GB sent, over axes | GB waited for | step, s |")
  print("|---|---:|---:|---:|---:|---:|---:|")
  for name, rounds in found.items():
    one = rounds[0]
    cpu, resident = (statistics.median(values) for values in list(zip(*rounds, strict=True))[:2])
    sent = ", ".join(f"{axes} {n / 1e9:.1f}" for axes, n in one.sent.items() if n > 1e8)
    memory = f"{resident / 1e9:.2f} | {one.peak / 1e9:.2f}"
    print(f"| {name} | {cpu:.1f} | {memory} | {sent} | {one.waited / 1e9:.1f} | {one.step:.4g} |")


if __name__ == "__main__":
  main()
