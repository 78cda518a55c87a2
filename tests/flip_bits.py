# SPDX-License-Identifier: Apache-2.0
"""Flips single bits of a checkpoint, over all of its files, and tries to go on from it each time.

    python tests/flip_bits.py [--flips=1000] [--seed=0]

A run has two checkpoints; a bit of the newer is flipped, and whatever would resume from it must say
which file and array is damaged and take the older. Prints a table by kind of file. Ends with
status 1 if one does not.
"""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import random
import re
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from paxlike import checksums
from paxlike.checkpoint import Checkpoints
from paxlike.layers.layout import Layout

LAYOUT = Layout(scanned=False, repeats=0)
_NAME = re.compile(r"is damaged \(([^,: )]+)(?: has [^)]*| is missing)?(?:, array ([^)]+))?")


def state(seed: int) -> dict[str, jax.Array]:
  """Returns arrays of several sizes and dtypes, some of which OCDBT keeps in its index."""
  random = np.random.default_rng(seed)
  sizes = {"params.a": (300, 40), "params.b": (64, 64), "opt_state.mu": (40, 30)}
  arrays = {name: jnp.array(random.normal(size=s), jnp.float32) for name, s in sizes.items()}
  halves = jnp.array(random.normal(size=(50, 50)), jnp.bfloat16)
  return arrays | {"params.c": halves, "params.small": jnp.arange(8.0), "step": jnp.int32(seed)}


def kind(name: str) -> str:
  """Returns what a file of a checkpoint is, without what differs between checkpoints."""
  name = re.sub(r"[0-9a-f]{32}", "*", name)
  return re.sub(r"process_\d+", "process_N", name)


class Run:
  """A run with checkpoints 1 and 2, the newer of which is damaged again and again."""

  def __init__(self, folder: pathlib.Path):
    with Checkpoints(folder, keep=None) as saved:
      for step in (1, 2):
        saved.save(step, state(step), layout=LAYOUT, train_input={"position": step})
        saved.wait()
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self._target = {
      n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for n, x in state(1).items()
    }
    self._directory = folder
    self._newer = pathlib.Path(saved.path(2))
    self.files = sorted(path for path in self._newer.rglob("*") if path.is_file())
    sums = checksums.read(saved.path(2))
    assert sums is not None
    self._pieces = {name: file.pieces for name, file in sums.files.items()}

  @contextlib.contextmanager
  def flipped(self, path: pathlib.Path, bit: int) -> Iterator[None]:
    """Context in which a bit of a file is flipped."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(damaged))
    try:
      yield
    finally:
      path.write_bytes(whole)

  def array_at(self, path: pathlib.Path, bit: int) -> str | None:
    """Returns the array of which the byte of a bit is."""
    pieces = self._pieces.get(path.relative_to(self._newer).as_posix(), ())
    found = [p.array for p in pieces if p.offset <= bit // 8 < p.offset + p.length]
    return found[0] if found else None

  def outcome(self, path: pathlib.Path, bit: int) -> str:
    """Flips a bit and resumes; returns "fell back", or what else happened."""
    said = io.StringIO()
    with self.flipped(path, bit), contextlib.redirect_stderr(said):
      found = Checkpoints(self._directory, keep=None).restore_latest_valid(
        self._target, layout=LAYOUT
      )
    if found is None or found[0] != 1:
      return "loaded"
    if any((found[1].state[name] != array).any() for name, array in state(1).items()):
      return "loaded something else"
    # Orbax's coroutines may be collected meanwhile, and complain; the program drops that.
    lines = [line for line in said.getvalue().splitlines() if line.startswith("paxlike: ")]
    match = _NAME.search(lines[0]) if len(lines) == 1 else None
    name = path.relative_to(self._newer).as_posix()
    if match is None or match.groups() != (name, self.array_at(path, bit)):
      return f"not named: {lines}"
    return "fell back"


def flip(folder: pathlib.Path, *, flips: int, seed: int) -> dict[str, collections.Counter[str]]:
  """Returns what happened, by kind of file."""
  run, rng = Run(folder), random.Random(seed)
  table: dict[str, collections.Counter[str]] = {}
  for number in range(flips):
    path = run.files[number % len(run.files)]  # Each as often: most are small.
    bit = rng.randrange(8 * path.stat().st_size)
    name = kind(path.relative_to(run._newer).as_posix())
    table.setdefault(name, collections.Counter())[run.outcome(path, bit)] += 1
  return table


def main() -> int:
  """Runs the comparison in a temporary folder."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--flips", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    table = flip(pathlib.Path(folder), flips=options.flips, seed=options.seed)
  print("| file | flips | fell back, file and array named | other |\n|---|---:|---:|---|")
  other = 0
  for name, counts in sorted(table.items()):
    fell_back = counts.pop("fell back", 0)
    other += counts.total()
    print(f"| {name} | {fell_back + counts.total()} | {fell_back} | {dict(counts) or ''} |")
  print(f"\n{options.flips} flips, {options.flips - other} fell back, {other} did not")
  return bool(other)


if __name__ == "__main__":
  sys.exit(main())
