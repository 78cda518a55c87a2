# SPDX-License-Identifier: Apache-2.0
"""Measures the train step of an experiment.

    python benchmarks/step.py EXPERIMENT [--fdl.KNOB=VALUE ...] [--steps=N] [--against=plain]

prints one JSON line. Seconds to the first step count from the start of this file, imports included,
so without the 0.02 s that Python itself takes; CPU-seconds count from the start of the process,
over all threads. A step includes its batch: made, placed on the devices, and waited for.

With --against=plain every step is followed by one of plain_gpt.py, of the same sizes, in the same
process: on a machine that others use too, only the ratio of the two means something.
"""

import time

_STARTED = time.perf_counter()

# ruff: noqa: E402
import argparse
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import experiments

from paxlike.errors import UserError

if TYPE_CHECKING:
  from plain_gpt import PlainGpt

  from paxlike.experiment import Experiment
  from paxlike.layers.decoder import Batch
  from paxlike.training.trainer import Trainer

WARM_UP_STEPS = 3


class Clock:
  """Wall and CPU time of steps of one kind."""

  def __init__(self):
    self.walls: list[float] = []
    self.cpus: list[float] = []

  def time(self, step: Callable[[], float]):
    """Runs `step`, which waits for its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    self.walls.append(time.perf_counter() - wall)
    self.cpus.append(time.process_time() - cpu)

  @property
  def wall(self) -> float:
    """Median, in seconds."""
    return statistics.median(self.walls)

  @property
  def cpu(self) -> float:
    """Median, in CPU-seconds of all threads."""
    return statistics.median(self.cpus)


class Step:
  """The compiled train step of an experiment with its state and data.

  Attributes:
    compile_seconds: Wall time of tracing and compiling.
    num_tokens: Of one step.
    state: The TrainState after the last step.
  """

  def __init__(self, trainer: "Trainer", batches: Iterator[Any]):
    from paxlike.devices import malloc
    from paxlike.training import train_state

    self._placer, self._batches = trainer.placer, batches
    self.state = train_state.create(
      trainer.definition, trainer.optimizer, trainer.devices, seed=trainer.seed
    )
    batch = self._next_batch()
    self.num_tokens = batch["inputs"].size
    started = time.perf_counter()
    self._program = trainer.compile(self.state, batch)
    self.compile_seconds = time.perf_counter() - started
    malloc.return_freed_heap()  # As the trainer does.

  def __call__(self) -> float:
    """Takes one step on a fresh batch, waits for it, and returns the loss."""
    self.state, metrics = self._program(self.state, self._next_batch())
    total, weight = metrics["loss"]
    return float(total) / float(weight)

  def _next_batch(self) -> "Batch":
    return self._placer.put(next(self._batches).arrays)


def plain_like(experiment: "Experiment", trainer: "Trainer") -> "PlainGpt":
  """Returns the plain model of the experiment's sizes.

  Raises:
    UserError: The plain model cannot stand for it.
  """
  import plain_gpt

  if experiment.FPROP_DTYPE != "float32" or trainer.devices.size != 1:
    raise UserError("--against=plain needs FPROP_DTYPE=float32 and one device.")
  hidden = experiment.HIDDEN_DIMS
  sizes = plain_gpt.Sizes(
    layers=experiment.NUM_LAYERS,
    model=experiment.MODEL_DIMS,
    heads=experiment.NUM_HEADS,
    head=experiment.head_dim(),
    ffn=4 * experiment.MODEL_DIMS if hidden is None else hidden,
    vocab=experiment.VOCAB_SIZE,
    time=experiment.MAX_SEQ_LEN,
    batch=trainer.batch_size,
  )
  plain = plain_gpt.PlainGpt(sizes)
  if plain.num_parameters != trainer.definition.num_params:
    raise UserError(
      f"--against=plain: the plain model has {plain.num_parameters} parameters and this experiment"
      f" {trainer.definition.num_params}: it is no GPT-2 with tied embeddings."
    )
  return plain


def measure(name: str, arguments: list[str], *, num_steps: int, against_plain: bool) -> dict:
  """Returns the report."""
  import jax

  experiment, trainer = experiments.build(name, arguments)
  data = trainer.data.batches(trainer.batch_size, rows=trainer.placer.rows, state=None)
  with jax.set_mesh(trainer.devices), data as batches:
    step = Step(trainer, batches)
    first_loss = step()
    first_step = {
      "first_step_seconds": round(time.perf_counter() - _STARTED, 2),
      "first_step_cpu_seconds": round(time.process_time(), 2),
      "compile_seconds": round(step.compile_seconds, 2),
    }
    for _ in range(WARM_UP_STEPS):
      step()
    # What the plain model adds later is not ours.
    peak = peak_bytes()
    plain = plain_like(experiment, trainer) if against_plain else None
    if plain is not None:
      for _ in range(WARM_UP_STEPS):
        plain.step()
    ours, theirs = Clock(), Clock()
    for _ in range(num_steps):
      ours.time(step)
      if plain is not None:
        theirs.time(plain.step)
    if plain is None:
      peak = peak_bytes()
  report = {
    "experiment": name,
    "flags": arguments,
    "python": sys.version.split()[0],
    "jax": jax.__version__,
    "device": trainer.devices.devices.flat[0].device_kind,
    "num_devices": trainer.devices.size,
    "parameters": trainer.definition.num_params,
    **first_step,
    "steps": num_steps,
    "step_seconds": round(ours.wall, 5),
    "step_cpu_seconds": round(ours.cpu, 5),
    "tokens_per_second": round(step.num_tokens / ours.wall, 1),
    "peak_bytes": peak,
    "first_loss": round(first_loss, 5),
  }
  if plain is not None:
    report |= {
      "plain_step_seconds": round(theirs.wall, 5),
      "plain_step_cpu_seconds": round(theirs.cpu, 5),
      # Neighbours in time, so that a change of the machine's speed meets both alike.
      "cpu_ratio_to_plain": round(
        statistics.median(a / b for a, b in zip(ours.cpus, theirs.cpus, strict=True)), 4
      ),
    }
  return report


def peak_bytes() -> int:
  """The largest resident memory of this process so far."""
  # macOS counts in bytes, Linux in KiB.
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
    1 if sys.platform == "darwin" else 1024
  )


def main() -> int:
  parser = argparse.ArgumentParser(
    description="Measures the train step of an experiment.", allow_abbrev=False
  )
  parser.add_argument("experiment", help="as after --fdl_config")
  parser.add_argument("--steps", type=int, default=20, help="measured steps (default 20)")
  parser.add_argument("--against", choices=["plain"], help="alternate with the plain step")
  options, arguments = parser.parse_known_args()
  if options.steps < 1:
    parser.error("--steps must be at least 1")
  # It would hide what compiling takes.
  os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
  try:
    report = measure(
      options.experiment,
      arguments,
      num_steps=options.steps,
      against_plain=options.against == "plain",
    )
  except UserError as error:
    print(f"step.py: {error}", file=sys.stderr)
    return 2
  print(json.dumps(report))
  return 0


if __name__ == "__main__":
  sys.exit(main())
