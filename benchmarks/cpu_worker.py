# SPDX-License-Identifier: Apache-2.0
"""A process of benchmarks/cpu.py: paxlike's train step, plain JAX's, or PyTorch's.

    python benchmarks/cpu_worker.py {paxlike,plain,torch,torch.compile}

reads a JSON line that says what to train, tells its facts, then takes a step for each further line.
A step includes its batch.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from cpu_sides import WARM_UP_STEPS, Turn


def paxlike(task: dict[str, Any]):
  """Trains the experiment `task["experiment"]` with the knobs `task["knobs"]`."""
  import experiments
  import gpu_experiment
  import jax
  import step as step_lib

  experiment, trainer = experiments.build(
    task["experiment"], gpu_experiment.arguments(task["knobs"])
  )
  facts = gpu_experiment.facts_of(experiment, trainer)
  with (
    jax.set_mesh(trainer.devices),
    trainer.data.batches(trainer.batch_size, rows=trainer.placer.rows) as batches,
  ):
    facts |= {"jax": jax.__version__, "batch": trainer.batch_size}
    answer(step_lib.Step(trainer, batches), facts)


def plain(task: dict[str, Any]):
  """Trains the GPT of benchmarks/plain_gpt.py, of its own sizes."""
  import jax
  from plain_gpt import PlainGpt

  del task
  gpt = PlainGpt()
  answer(gpt.step, {"jax": jax.__version__, "trained": gpt.num_parameters})


def torch(task: dict[str, Any], *, compiled: bool):
  """Trains the same with the script `task["peer"]`, given the facts of paxlike's side."""
  import importlib

  import torch
  import torch_training

  facts, device = task["facts"], torch.device("cpu")
  torch.manual_seed(0)
  module = importlib.import_module(task["peer"]).make(facts, device)
  loss = torch.compile(module) if compiled else module
  training = torch_training.Training(
    module, loss, facts, device, batch_size=facts["batch"], casts=task["casts"]
  )

  def step() -> float:
    training.step()
    return training.loss

  versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
  trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
  answer(step, versions | {"trained": trained})


def answer(step: Callable[[], float], facts: dict[str, Any]):
  """Warms up, tells `facts`, and takes a step for each line of the input."""
  facts["first_loss"] = round(step(), 4)
  for _ in range(WARM_UP_STEPS):
    step()
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    turn = Turn(time.perf_counter() - wall, time.process_time() - cpu, loss)
    print(json.dumps(turn._asdict()), flush=True)


def main():
  kind, task = sys.argv[1], json.loads(sys.stdin.readline())
  if kind.startswith("torch"):
    torch(task, compiled=kind == "torch.compile")
  else:
    {"paxlike": paxlike, "plain": plain}[kind](task)


if __name__ == "__main__":
  main()
