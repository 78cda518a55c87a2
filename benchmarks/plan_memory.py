# SPDX-License-Identifier: Apache-2.0
"""Compares the predicted peak memory of random plans with that of the compiler.

    python benchmarks/plan_memory.py [--count=30] [--seed=1] [--topology=h100-64]

prints a row for each plan as it is compiled, in a process of its own, and at the end the mean error
and by how much the predictions are too small at most. No accelerator is needed; 30 plans take about
an hour of one core. Plans are drawn from all configurations that are predicted to fit.

Where there is room, XLA holds buffers longer than it has to. So each plan is compiled twice: with
all of the device's memory, and for a device that has no more than predicted ("tight").
"""

import argparse
import math
import random
import statistics
from typing import Any

import recipes

# Compiling does not depend on the number of layers, which are scanned.
PLANNED = (
  ("Synthetic5B", "h100-8", 64),
  ("Synthetic5B", "a100-16", 128),
  ("SyntheticLLaMA7B", "h100-16", 64),
  ("SyntheticLLaMA70B", "h100-64", 128),
  ("Synthetic175B", "h100-128", 256),
  ("Scaled16B", "v5e-64", 128),
  ("Scaled32B", "v6e-64", 128),
  ("Scaled64B", "v5p-64", 128),
)


COLUMNS = ("compiled, GB", "tight, GB", "error", "error if tight")


def plans(experiment: str, topology: str, batch: int) -> list[tuple[list[str], dict[str, str]]]:
  """Returns the plans that are predicted to fit: their knobs, and variables that limit XLA."""
  from paxlike import registry, root_graph, run_mode
  from paxlike.cli import command_line, startup
  from paxlike.devices import topology as devices
  from paxlike.planning import machines, memory_model, model_sizes, planner

  flags = [f"--fdl_config={experiment}", "--mode=plan", f"--topology={topology}"]
  startup.set_up_jax(command_line.parse(["paxlike", *flags]))
  with devices.target(topology):
    found = devices.devices()
    machine = machines.find(found[0].device_kind)
    assert machine is not None
    built = registry.find(experiment)()
    trainer = run_mode.build_trainer(root_graph.of_experiment(built))
    model = model_sizes.of_definition(
      trainer.definition, trainer.optimizer, seq_len=trainer.data.seq_len
    )
    within = min(8, len(found)) if machine.chip.is_gpu else len(found)
    fitting = []
    for ici, dcn in planner.meshes(model, (within, len(found) // within)):
      for series in planner.configurations(model, ici, dcn, batch):
        for how in series:
          memory = memory_model.of(model, how, machine.network)
          if memory.total > 0.95 * machine.chip.usable_memory:
            continue
          knobs = [f"--fdl.{name}={_spelt(value)}" for name, value in how.knobs.items()]
          fitting.append((knobs, _limits(memory, machine.chip)))
  return fitting


def _limits(memory: Any, chip: Any) -> dict[str, str]:
  """Returns environment variables by which XLA schedules for no more memory than predicted."""
  if not chip.is_gpu:
    share = math.ceil(100 * memory.total / chip.usable_memory)
    return {"LIBTPU_INIT_ARGS": f"--xla_tpu_scheduler_percent_shared_memory_limit={share}"}
  # Of the temporaries, in percent of what arguments leave of 80 % of the memory; 95 by default
  # (GetSchedulerMemoryLimit in xla/service/gpu/gpu_hlo_schedule.cc).
  room = max(1.0, 0.8 * chip.memory - memory.arguments)
  share = min(95, math.ceil(100 * (memory.total - memory.arguments) / room))
  return {"XLA_FLAGS": f"--xla_gpu_memory_limit_slop_factor={share}"}


def _spelt(value: Any) -> str:
  if isinstance(value, dict):
    return "{" + ", ".join(f"{name}: {size}" for name, size in value.items()) + "}"
  return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)


def main():
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--count", type=int, default=30)
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--topology", help="only plans for this one")
  options = parser.parse_args()
  rng, errors = random.Random(options.seed), []
  chosen = [one for one in PLANNED if options.topology in (None, one[1])]
  drawn = {one: plans(*one) for one in chosen}
  recipes.print_row("experiment", "topology", "knobs", "predicted, GB", *COLUMNS)
  print(f"|---|---|---|---:|{'---:|' * len(COLUMNS)}")
  for number in range(options.count):
    one = experiment, topology, _ = chosen[number % len(chosen)]
    knobs, limits = rng.choice(drawn[one])
    flags = [f"--fdl_config={experiment}", f"--topology={topology}", *knobs]
    both: list[Any] = [recipes.compiled(flags, environ) for environ in ({}, limits)]
    shown = " ".join(knob.removeprefix("--fdl.") for knob in knobs)
    failed = [found for found in both if isinstance(found, str)]
    if failed:
      recipes.print_row(experiment, topology, shown, failed[0])
      continue
    predicted = both[0]["predicted"]["bytes_per_device"]["total"]
    peaks = [found["bytes_per_device"]["peak"] for found in both]
    errors.append([predicted / peak - 1 for peak in peaks])
    cells = [f"{number / 1e9:.2f}" for number in (predicted, *peaks)]
    recipes.print_row(experiment, topology, shown, *cells, *map(_percent, errors[-1]))
  if not errors:
    parser.error("no plan was compiled.")
  for name, of_name in zip(("with all memory", "tight"), zip(*errors, strict=True), strict=True):
    mean = statistics.mean(map(abs, of_name))
    print(f"{len(of_name)} plans, {name}: mean {100 * mean:.1f} %, worst {_percent(min(of_name))}")


def _percent(fraction: float) -> str:
  return f"{100 * fraction:+.1f} %"


if __name__ == "__main__":
  main()
