# SPDX-License-Identifier: Apache-2.0
"""What a profile changes in the schedule of a step, compiled for GPUs that are not attached.

    python benchmarks/pgle.py --topology=h100-8 --fdl_config=NAME [flags of paxlike]

compiles the step, derives a profile from rooflines (of kernels as `--mode=compile --kernels` has
them, of collectives from the bytes that a device sends over NVLink; nothing is measured), compiles
the step again with the profile, and prints both schedules, judged by the same durations. A real
profile is made on GPUs by `--mode=profile --save=FILE`.
"""

import dataclasses
import sys

from paxlike import root_graph, run_mode
from paxlike.cli import command_line, startup
from paxlike.compilation import aot, hlo_collectives, hlo_kernels, hlo_schedule
from paxlike.devices import chips, interconnect, pgle, topology
from paxlike.training.trainer import Trainer


def costs(program: str, trainer: Trainer) -> dict[str, float]:
  """Returns instruction -> microseconds by rooflines."""
  devices = trainer.devices
  kind = devices.devices.flat[0].device_kind
  chip, network = chips.find(kind), interconnect.find(kind)
  assert chip is not None and network is not None
  found = {one.name: 1e6 * one.seconds for one in hlo_kernels.kernels(program, chip)}
  for one in hlo_collectives.instructions(program, devices):
    found[one.name] = 1e6 * one.nbytes / one.count / network.fast
  return found


def main(argv: list[str]):
  """Prints the two schedules."""
  options = command_line.parse([argv[0], "--mode=compile", *argv[1:]])
  startup.set_up_jax(options)
  with topology.target(options.topology):
    trainer = run_mode.build_trainer(root_graph.of(options, root_graph.experiment_of(options)))
    texts = [aot.compile_step(trainer).text]
    profile = pgle.Profile("the derived profile", costs(texts[0], trainer))
    execution = dataclasses.replace(trainer.execution, pgle_profile=profile)
    texts.append(aot.compile_step(dataclasses.replace(trainer, execution=execution)).text)
  schedules = []
  for name, text in zip(("without a profile", "with it"), texts, strict=True):
    moves = {one.name: one for one in hlo_schedule.transfers(text)}
    left, whole = hlo_schedule.exposed(text, profile.costs)
    beside = sum(bool(one.between) for one in moves.values())
    print(f"{name}: {len(moves)} collectives, {beside} beside other instructions;", end=" ")
    print(f"{left / 1e3:.3f} of {whole / 1e3:.3f} ms are not hidden")
    schedules.append(moves)
  before, after = schedules
  moved = [n for n in before if n in after and before[n].between != after[n].between]
  print(f"{len(moved)} of {len(before)} collectives run beside other instructions than before:")
  for name in sorted(moved, key=lambda name: -profile.costs.get(name, 0))[:10]:
    sizes = len(before[name].between), len(after[name].between)
    print(f"  {name} ({profile.costs.get(name, 0):.1f} us): beside {sizes[0]}, now {sizes[1]}")


if __name__ == "__main__":
  main(sys.argv)
