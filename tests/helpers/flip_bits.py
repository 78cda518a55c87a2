# SPDX-License-Identifier: Apache-2.0
"""Flips single bits of a checkpoint, over all of its files, and tries to go on from it each time.

    PYTHONPATH=tests python -m helpers.flip_bits [--flips=1000] [--seed=0] [--converted]

A run has two checkpoints; a bit of the newer is flipped, and whatever would resume from it must say
which file and array is damaged and take the older. With --converted the checkpoint is one that the
converter writes: what reads its arrays, together or one by one, must say the same. Prints a table
by kind of file. Ends with status 1 if a flip has another outcome.
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

from helpers.tiny_model import place
from paxlike.checkpoints import checksums
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.convert import streaming
from paxlike.errors import UserError
from paxlike.layers.stack_layout import Layout

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
  name = re.sub(r"process_0?[0-9a-f]{32}", "process_N", name)
  name = re.sub(r"[0-9a-f]{32}", "*", name)
  return re.sub(r"process_\d+", "process_N", name)


def target(arrays: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns what to ask a checkpoint for, on one device."""
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for n, x in arrays.items()}


class Saved:
  """A checkpoint that is damaged again and again."""

  expected: str  # The outcome of a flip.

  def __init__(self, folder: pathlib.Path, step: int):
    self.directory = folder
    self.folder = pathlib.Path(Checkpoints(folder, keep=None).path(step))
    found = (path for path in self.folder.rglob("*") if path.is_file())
    self.files = sorted(path for path in found if path.stat().st_size)
    sums = checksums.read(Checkpoints(folder, keep=None).path(step))
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
    pieces = self._pieces.get(path.relative_to(self.folder).as_posix(), ())
    found = [p.array for p in pieces if p.offset <= bit // 8 < p.offset + p.length]
    return found[0] if found else None

  def names(self, message: str, path: pathlib.Path, bit: int) -> bool:
    """Returns whether a message names the damaged file and array."""
    match = _NAME.search(message)
    name = path.relative_to(self.folder).as_posix()
    return match is not None and match.groups() == (name, self.array_at(path, bit))

  def outcome(self, path: pathlib.Path, bit: int) -> str:
    """Flips a bit and reads; returns `expected`, or what else happened."""
    raise NotImplementedError


class Run(Saved):
  """A run with checkpoints 1 and 2, the newer of which is damaged."""

  expected = "fell back"

  def __init__(self, folder: pathlib.Path):
    with Checkpoints(folder, keep=None) as saved:
      for step in (1, 2):
        saved.save(step, state(step), layout=LAYOUT, train_input=place(step))
        saved.wait()
    super().__init__(folder, 2)

  def outcome(self, path: pathlib.Path, bit: int) -> str:
    """Flips a bit and resumes."""
    said = io.StringIO()
    with self.flipped(path, bit), contextlib.redirect_stderr(said):
      found = Checkpoints(self.directory, keep=None).restore_latest_valid(
        target(state(1)), layout=LAYOUT
      )
    if found is None or found[0] != 1:
      return "loaded"
    if any((found[1].state[name] != array).any() for name, array in state(1).items()):
      return "loaded something else"
    # Orbax's coroutines may be collected meanwhile, and complain; the program drops that.
    lines = [line for line in said.getvalue().splitlines() if line.startswith("paxlike: ")]
    if len(lines) != 1 or not self.names(lines[0], path, bit):
      return f"not named: {lines}"
    return self.expected


def weights() -> dict[str, jax.Array]:
  """Returns arrays as of a model."""
  return {
    name: array.astype(jnp.float32)
    for name, array in state(1).items()
    if name.startswith("params.")
  }


class Converted(Saved):
  """A checkpoint as of a model that was converted."""

  expected = "refused"

  def __init__(self, folder: pathlib.Path):
    arrays = ((name, np.asarray(array)) for name, array in weights().items())
    streaming.write(folder, arrays, dtype=np.float32, layout=LAYOUT)
    super().__init__(folder, 0)

  def outcome(self, path: pathlib.Path, bit: int) -> str:
    """Flips a bit, and reads the arrays together and one by one."""
    wanted = target(weights())

    def together():
      saved = Checkpoints(self.directory, keep=None)
      saved.at(0).restore(wanted, layout=LAYOUT, unread=lambda _: False)

    def one_by_one():
      saved = Checkpoints(self.directory, keep=None)
      for name in wanted:
        saved.at(0).read(name)

    with self.flipped(path, bit):
      for read in (together, one_by_one):
        try:
          read()
        except UserError as error:
          if not self.names(str(error), path, bit):
            return f"not named: {error}"
        else:
          return f"loaded {read.__name__}"
    return self.expected


def flip(saved: Saved, *, flips: int, seed: int) -> dict[str, collections.Counter[str]]:
  """Returns what happened, by kind of file."""
  rng = random.Random(seed)
  table: dict[str, collections.Counter[str]] = {}
  for number in range(flips):
    path = saved.files[number % len(saved.files)]  # Each as often: most are small.
    bit = rng.randrange(8 * path.stat().st_size)
    name = kind(path.relative_to(saved.folder).as_posix())
    table.setdefault(name, collections.Counter())[saved.outcome(path, bit)] += 1
  return table


def main() -> int:
  """Runs the comparison in a temporary folder."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--flips", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--converted", action="store_true")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "checkpoints"
    saved = Converted(path) if options.converted else Run(path)
    table = flip(saved, flips=options.flips, seed=options.seed)
  done = f"{saved.expected}, file and array named"
  print(f"| file | flips | {done} | other |\n|---|---:|---:|---|")
  other = 0
  for name, counts in sorted(table.items()):
    expected = counts.pop(saved.expected, 0)
    other += counts.total()
    print(f"| {name} | {expected + counts.total()} | {expected} | {dict(counts) or ''} |")
  print(f"\n{options.flips} flips, {options.flips - other} {saved.expected}, {other} not")
  return bool(other)


if __name__ == "__main__":
  sys.exit(main())
