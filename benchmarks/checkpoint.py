# SPDX-License-Identifier: Apache-2.0
"""Measures checkpoints: how fast they are saved and restored, and what a save does to the steps.

    python benchmarks/checkpoint.py [--repeats=4] [--folder=DIR] [EXPERIMENT [--fdl.KNOB=VALUE ...]]

prints JSON lines and a table. Beside each save and restore a file of as many bytes is written and
synced, and read: the speed of the disk below. Saves and files replace older ones. What is read has
been dropped from the page cache as far as posix_fadvise does that; a disk may have a cache of its
own. GB are 10^9 bytes of arrays.

The checksums are also made anew and verified alone, of what is in the page cache: their share is in
CPU-seconds of the same run, that of making them of a save, and that of verifying of a restore.

Then steps are taken alone, and beside a save until it is complete. Seconds are of the clock and
CPU-seconds of all threads; on a machine that others use too the former mean little.

Without an EXPERIMENT: four layers of the 126M, 804 MB with AdamW's moments, on 32 tokens a step.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import experiments
import jax
import numpy as np
import step as step_lib
from etils import epath

from paxlike.checkpoints import checksums, manifest
from paxlike.checkpoints.array_names import Flat, flatten
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.layers.stack import layout_of
from paxlike.training import train_state
from paxlike.training.trainer import Trainer

DEFAULT = (
  "Synthetic126M",
  "--fdl.NUM_LAYERS=4",
  "--fdl.MAX_SEQ_LEN=32",
  "--fdl.PERCORE_BATCH_SIZE=1",
  "--fdl.FPROP_DTYPE=float32",
)
MOST_STEPS = 60


class Took(NamedTuple):
  """Seconds of the clock, and of all threads."""

  seconds: float
  cpu_seconds: float


class Times:
  """What was measured, by case."""

  def __init__(self):
    self.cases: dict[str, list[Took]] = {}

  def time(self, case: str, function: Callable[[], Any]) -> Any:
    """Adds what a call takes, and returns its result."""
    with self.measure(case):
      return function()

  @contextlib.contextmanager
  def measure(self, case: str) -> Iterator[None]:
    """Adds what the context takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    took = Took(time.perf_counter() - wall, time.process_time() - cpu)
    self.cases.setdefault(case, []).append(took)

  def median(self, case: str) -> Took:
    return Took(*map(statistics.median, zip(*self.cases[case], strict=True)))


class Run:
  """A training run with its checkpoints."""

  def __init__(self, trainer: Trainer, batches: Iterator[Any], folder: pathlib.Path):
    self._trainer = trainer
    self._step = step_lib.Step(trainer, batches)
    self._layout = layout_of(trainer.model)
    self.saved = Checkpoints(folder / "checkpoints", keep=2)
    self.num_saves = 0
    # Moments of zeros would be compressed away.
    for _ in range(3):
      self.step()

  def step(self):
    """Takes one step and waits for it."""
    self._step()

  @property
  def state(self) -> Flat:
    """What a checkpoint holds of the training state."""
    state = dataclasses.replace(self._step.state, frozen={}, reference={})
    return flatten(state)

  @property
  def num_bytes(self) -> int:
    return sum(array.nbytes for array in self.state.values())

  def save(self):
    """Begins a save."""
    self.num_saves += 1
    self.saved.save(self.num_saves, self.state, layout=self._layout, train_input={})

  @property
  def path(self) -> pathlib.Path:
    """The newest checkpoint's folder."""
    return pathlib.Path(self.saved.path(self.num_saves))

  def is_complete(self) -> bool:
    """Whether the newest checkpoint has been written."""
    return self.num_saves in self.saved.steps()

  def restore(self) -> Flat:
    """Returns the arrays of the newest checkpoint."""
    trainer = self._trainer
    target = train_state.abstract(trainer.definition, trainer.optimizer, trainer.devices)
    target = flatten(dataclasses.replace(target, frozen={}))
    restored = self.saved.at(self.num_saves).restore(target, layout=self._layout)
    return jax.block_until_ready(restored.state)


def write(path: pathlib.Path, block: bytes, num_bytes: int):
  """Writes a file, waits until it is on the disk, and then removes older ones beside it."""
  with path.open("wb", buffering=0) as file:
    for start in range(0, num_bytes, len(block)):
      file.write(block[: num_bytes - start])
    os.fsync(file.fileno())
  for older in path.parent.iterdir():
    if older != path:
      older.unlink()


def read(path: pathlib.Path, num_bytes: int):
  """Reads a file into new memory, as a restore does."""
  with path.open("rb", buffering=0) as file:
    memory = np.empty(num_bytes, np.uint8).data
    while memory:
      memory = memory[file.readinto(memory) :]


def forget(folder: pathlib.Path):
  """Drops files from the page cache, as far as the system follows the advice."""
  for path in folder.rglob("*"):
    if path.is_file():
      with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def speeds(run: Run, times: Times, folder: pathlib.Path, *, repeats: int):
  """Times saves and restores with nothing beside them, and the disk."""
  plain, num_bytes = folder / "plain", run.num_bytes
  plain.mkdir()
  block = np.random.default_rng(0).bytes(2**26)
  times.time("first save() returns", run.save)
  run.saved.wait()
  for turn in range(repeats):
    with times.measure("save, complete"):
      times.time("save() returns", run.save)
      run.saved.wait()
    file = plain / f"{turn}"
    times.time("plain write and fsync", functools.partial(write, file, block, num_bytes))
    forget(run.path)
    restored = times.time("restore", run.restore)
    assert all((restored[name] == array).all() for name, array in run.state.items())
    del restored
    forget(plain)
    times.time("plain read", functools.partial(read, file, num_bytes))
    times.time("checksums made", lambda: make_checksums(run.path))
    times.time("checksums verified", lambda: verify_checksums(run.path))
  shutil.rmtree(plain)


def make_checksums(path: pathlib.Path):
  """Makes all checksums of a checkpoint again."""
  folder = epath.Path(path)
  manifest.write_of_process(folder / "state", 0)
  manifest.write(folder)


def verify_checksums(path: pathlib.Path):
  """Verifies all files of a checkpoint."""
  sums = checksums.read(epath.Path(path))
  assert sums is not None
  sums.verify(arrays=None)


def delays(run: Run, times: Times, *, repeats: int):
  """Times steps alone and beside saves, in turn."""
  for _ in range(repeats):
    for _ in range(4):
      times.time("step alone", run.step)
    times.time("save() between steps returns", run.save)
    for _ in range(MOST_STEPS):
      if run.is_complete():
        break
      times.time("step beside a save", run.step)
    run.saved.wait()


def report(times: Times, num_bytes: int, facts: dict[str, Any]):
  """Prints the lines and the table."""
  rows = ["| | times | seconds (median) | CPU-seconds | GB/s |", "|---|---:|---:|---:|---:|"]
  for case in times.cases:
    took, count = times.median(case), len(times.cases[case])
    values = {"benchmark": "checkpoint", "case": case, "times": count, **facts}
    values |= {name: round(value, 4) for name, value in took._asdict().items()}
    speed = ""
    if case in ("save, complete", "plain write and fsync", "restore", "plain read"):
      values["gb_per_second"] = round(num_bytes / took.seconds / 1e9, 3)
      speed = f"{values['gb_per_second']:.3f}"
    print(json.dumps(values))
    rows.append(f"| {case} | {count} | {took.seconds:.3f} | {took.cpu_seconds:.3f} | {speed} |")
  print("\n".join(["", *rows]))
  for part, whole in (
    ("checksums made", "save, complete"),
    ("checksums verified", "restore"),
  ):
    share = times.median(part).cpu_seconds / times.median(whole).cpu_seconds
    print(f"{part}: {share:.1%} of the CPU-seconds of '{whole}'")


def main():
  parser = argparse.ArgumentParser(description="Measures checkpoints.", allow_abbrev=False)
  parser.add_argument("experiment", nargs="?", help="as after --fdl_config")
  parser.add_argument("--repeats", type=int, default=4)
  parser.add_argument("--folder", help="on the disk to measure (default: that of tempfile)")
  options, arguments = parser.parse_known_args()
  name, *defaults = [options.experiment] if options.experiment else DEFAULT
  _, trainer = experiments.build(name, [*defaults, *arguments])
  folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
  times = Times()
  try:
    with (
      jax.set_mesh(trainer.devices),
      trainer.data.batches(trainer.batch_size) as batches,
    ):
      run = Run(trainer, batches, folder)
      with run.saved:
        speeds(run, times, folder, repeats=options.repeats)
        on_disk = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
        delays(run, times, repeats=options.repeats)
      facts = {"experiment": name, "bytes": run.num_bytes, "bytes_on_disk": on_disk}
      report(times, run.num_bytes, facts | {"arrays": len(run.state)})
  finally:
    shutil.rmtree(folder)


if __name__ == "__main__":
  main()
