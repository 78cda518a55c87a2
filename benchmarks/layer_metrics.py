# SPDX-License-Identifier: Apache-2.0
"""Measures what the metrics of layers (LOG_LAYERS_EVERY) add to a step that is due.

    python benchmarks/layer_metrics.py EXPERIMENT [--fdl.KNOB=VALUE ...] [--steps=N]

Copies of a run take the same batches in turn: by the plain step, by the step that logs layers, and
by the plain step again, whose ratio to the first is the noise. Prints one JSON line: CPU-seconds of
all threads, the median ratios to the plain step of the same batch, the seconds of the main thread
for the table and the record of a step, and whether all runs have the same weights at the end, bit
by bit. Steps that are not due are the plain step itself.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import experiments

from paxlike.errors import UserError

WARM_UP_STEPS = 2
SIDES = ("plain", "logging", "again")


def measure(name: str, arguments: list[str], *, num_steps: int) -> dict[str, Any]:
  """Returns the report."""
  import jax
  import numpy as np

  from paxlike.training import train_state

  _, trainer = experiments.build(name, arguments)
  data = trainer.data.batches(trainer.batch_size, rows=trainer.placer.rows, state=None)
  times: dict[str, list[float]] = {side: [] for side in SIDES}
  compile_seconds, programs, states = [], {}, {}
  reported: Any = None
  with jax.set_mesh(trainer.devices), data as batches:
    for side in SIDES:
      states[side] = train_state.create(
        trainer.definition, trainer.optimizer, trainer.devices, seed=trainer.seed
      )
    for side in SIDES[:2]:
      began = time.perf_counter()
      programs[side] = trainer.compile(*trainer.abstract(), log_layers=side == "logging")
      compile_seconds.append(round(time.perf_counter() - began, 1))
    programs["again"] = programs["plain"]
    for number in range(num_steps + WARM_UP_STEPS):
      batch = trainer.placer.put(next(batches).arrays)
      for side in (*SIDES[number % 3 :], *SIDES[: number % 3]):
        began = time.process_time()
        states[side], *results = programs[side](states[side], batch)
        jax.block_until_ready((states[side], results))
        times[side].append(time.process_time() - began)
        reported = results[1] if side == "logging" else reported
  every = zip(*(jax.tree.leaves(state.weights) for state in states.values()), strict=True)
  plain, logging, again = (times[side][WARM_UP_STEPS:] for side in SIDES)
  return {
    "benchmark": "layer_metrics",
    "experiment": name,
    "jax": jax.__version__,
    "parameters": trainer.definition.num_params,
    "steps": num_steps,
    "compile_seconds": compile_seconds,
    "plain_cpu_seconds": round(statistics.median(plain), 4),
    "logging_cpu_seconds": round(statistics.median(logging), 4),
    "ratio": ratio(logging, plain),
    "noise_ratio": ratio(again, plain),
    "ratio_of_least": round(min(logging) / min(*plain, *again), 4),
    **host_seconds(trainer, jax.device_get(reported)),
    "same_weights": all(np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in every),
  }


def ratio(above: list[float], below: list[float]) -> float:
  """Returns the median ratio of steps on the same batch."""
  return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 4)


def host_seconds(trainer: Any, metrics: Any) -> dict[str, Any]:
  """Returns the seconds of the main thread for a table and its record, and the record's size."""
  from etils import epath

  from paxlike.telemetry import metric_files
  from paxlike.telemetry.trackers.tensorboard import TensorBoardWriter
  from paxlike.telemetry.trackers.tracker import Record
  from paxlike.training import layer_metrics

  with tempfile.TemporaryDirectory() as folder:
    lines = metric_files.open_writer(epath.Path(folder), step=0)
    board = TensorBoardWriter(epath.Path(folder) / "layers")
    board.write(0, {"loss": 1.0})  # Imports and opens.
    began = time.perf_counter()
    table = layer_metrics.table(trainer.definition, metrics)
    record = {"kind": "layers", "updates": 1, "layers": table}
    lines.write(record)
    scalars = Record.of(record).scalars
    board.write(1, scalars)
    seconds = time.perf_counter() - began
    lines.close()
    board.close()
  return {"scalars": len(scalars), "host_seconds": round(seconds, 4)}


def main() -> int:
  parser = argparse.ArgumentParser(
    description="Measures what the metrics of layers add to a step.", allow_abbrev=False
  )
  parser.add_argument("experiment", help="as after --fdl_config")
  parser.add_argument("--steps", type=int, default=20, help="measured steps (default 20)")
  options, arguments = parser.parse_known_args()
  os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
  try:
    report = measure(options.experiment, arguments, num_steps=options.steps)
  except UserError as error:
    print(f"layer_metrics.py: {error}", file=sys.stderr)
    return 2
  print(json.dumps(report))
  return 0


if __name__ == "__main__":
  sys.exit(main())
