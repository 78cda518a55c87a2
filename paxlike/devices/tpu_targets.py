# SPDX-License-Identifier: Apache-2.0
"""TPU topologies for ahead-of-time compilation without TPUs."""

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from paxlike.errors import UserError


class Kind(NamedTuple):
  """A TPU generation.

  Attributes:
    name: The compiler's name.
    units: Units per chip in topology names: v5p and v7x count cores, two per chip. For JAX a v5p
      chip is one device, a v7x chip two.
    dims: Dims of the torus.
    most: Chips of the largest slice.
    has_one: Whether slices of one chip exist; other slices have four or more.
    ring: Sides that are multiples of it may have wraparound links: 16 is the side of a v5e or v6e
      pod, 4 that of the cubes of v5p and v7x.
  """

  name: str
  units: int
  dims: int
  most: int
  has_one: bool
  ring: int


KINDS = {
  "v5e": Kind("v5e", 1, 2, 256, True, 16),
  "v5p": Kind("v5p", 2, 3, 6144, False, 4),
  "v6e": Kind("v6e", 1, 2, 256, True, 16),
  "v7x": Kind("tpu7x", 2, 3, 9216, True, 4),
}


# Lets several compile-only processes load libtpu, and keeps it from querying a metadata server.
_ALONE = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def are_here() -> bool:
  """Returns whether this machine seems to have TPUs."""
  return any(pathlib.Path("/dev").glob("accel*")) or any(pathlib.Path("/dev").glob("vfio/[0-9]*"))


def are_named(topology: str) -> bool:
  """Returns whether a topology, such as v5e-256, is of TPUs."""
  return topology.partition("-")[0] in KINDS


def settle():
  """Sets the environment variables that libtpu needs on machines without TPUs."""
  for name, value in _ALONE.items():
    os.environ.setdefault(name, value)


def check(kind: str, count: int):
  """Raises UserError unless there is a slice of this name."""
  shape(kind, count)


def shape(kind: str, count: int) -> tuple[int, ...]:
  """Returns the sides of a slice's torus in chips: the most compact shape that exists.

  Raises:
    UserError: There is no slice of this name.
  """
  one = KINDS[kind]
  chips, rest = divmod(count, one.units)
  is_sold = not rest and (4 <= chips <= one.most or (chips == 1 and one.has_one))
  found = list(_boxes(chips, one.dims)) if is_sold else []
  if not found:
    each = f", {one.units} for each chip" if one.units > 1 else ""
    least = "one chip, or four" if one.has_one else "four chips"
    raise UserError(
      f"--topology={kind}-{count}: there is no such slice. {kind} counts up to"
      f" {one.most * one.units:,}{each}: {least} and more in a box with sides of 2 or multiples of"
      " 4; for more add --slices=N."
    )
  # The most compact one. The compiler has 2x2x1, not 1x2x2.
  sides = min(found, key=lambda sides: sides[::-1])
  return sides[1:] + sides[:1] if sides[0] == 1 else sides


def wrap(kind: str, sides: tuple[int, ...]) -> tuple[bool, bool, bool]:
  """Returns which dims of a slice have wraparound links.

  Slices of whole cubes of 4x4x4 chips are 3D tori; smaller ones have no wraparound links
  (cloud.google.com/tpu/docs/v5p-training; v7x is the same). A v5e or v6e pod is a 2D torus of 16x16
  chips: only sides of 16 wrap around (jax-ml.github.io/scaling-book/tpus).
  """
  one = KINDS[kind]
  closed = [side % one.ring == 0 for side in sides]
  if one.dims == 3:
    closed = [all(closed)] * 3
  first, second, third = (*closed, False)[:3]
  return first, second, third


def _boxes(chips: int, dims: int, least: int = 1) -> Iterator[tuple[int, ...]]:
  """Yields boxes of this many chips, sides ascending; a side of 1 only occurs next to 1 and 2."""
  for side in range(least, chips + 1):
    if (side not in (1, 2) and side % 4) or chips % side:
      continue
    if dims == 1:
      if side == chips:
        yield (side,)
      continue
    for rest in _boxes(chips // side, dims - 1, side):
      if side > 1 or rest[-1] <= 2:
        yield (side, *rest)


def devices(kind: str, count: int, slices: int) -> list[Any]:
  """Returns the devices of slices of the sides `shape(kind, count)`, in hosts of up to four chips.

  Raises:
    UserError: There is no such slice, or the TPU compiler is not installed.
  """
  settle()
  from jax.experimental import topologies

  sides = shape(kind, count)
  # Without it the compiler assumes no wraparound links.
  options: dict[str, Any] = {"wrap": wrap(kind, sides)}
  if slices > 1:
    options["num_slices"] = slices
  if sides[-1] == 1 and sides[0] == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  name = "x".join(map(str, sides))
  try:
    found = topologies.get_topology_desc(
      platform="tpu", topology_name=f"{KINDS[kind].name}:{name}", **options
    )
  except (RuntimeError, ValueError, NotImplementedError) as error:
    first = str(error).splitlines()[0]
    if importlib.util.find_spec("libtpu") is None:
      raise UserError(
        f"compiling for TPUs needs Google's compiler: pip install 'paxlike[tpu-aot]' ({first})."
      ) from None
    raise UserError(f"--topology={kind}-{count}: the TPU compiler failed: {first}") from None
  return list(found.devices)
