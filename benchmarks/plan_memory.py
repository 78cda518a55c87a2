# SPDX-License-Identifier: Apache-2.0
"""Compares the predicted peak memory of random plans with that of the compiler.

    python benchmarks/plan_memory.py [--count=30] [--seed=1] [--topology=h100-64]

prints a row for each plan as it is compiled, in a process of its own, and at the end the mean error
and by how much the predictions are too small at most. No accelerator is needed; 30 plans take about
half an hour of one core. Plans are drawn from all configurations that are predicted to fit.
"""

import argparse
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


def plans(experiment: str, topology: str, batch: int) -> list[list[str]]:
  """Returns the knobs of the plans that are predicted to fit."""
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
          memory = memory_model.of(model, how, machine.network).total
          if memory > 0.95 * machine.chip.usable_memory:
            continue
          fitting.append([f"--fdl.{name}={_spelt(value)}" for name, value in how.knobs.items()])
  return fitting


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
  for number in range(options.count):
    one = experiment, topology, _ = chosen[number % len(chosen)]
    knobs = rng.choice(drawn[one])
    found = recipes.compiled([f"--fdl_config={experiment}", f"--topology={topology}", *knobs])
    shown = " ".join(knob.removeprefix("--fdl.") for knob in knobs)
    if isinstance(found, str) or found["predicted"] is None:
      print(f"| {experiment} | {topology} | {shown} | | | {found} |", flush=True)
      continue
    predicted = found["predicted"]["bytes_per_device"]["total"]
    compiled = found["bytes_per_device"]["peak"]
    errors.append(predicted / compiled - 1)
    sizes = f"{predicted / 1e9:.2f} | {compiled / 1e9:.2f} | {100 * errors[-1]:+.1f} %"
    print(f"| {experiment} | {topology} | {shown} | {sizes} |", flush=True)
  mean = statistics.mean(map(abs, errors))
  print(f"{len(errors)} plans: mean error {100 * mean:.1f} %, worst {100 * min(errors):+.1f} %")


if __name__ == "__main__":
  main()
