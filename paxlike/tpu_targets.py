# SPDX-License-Identifier: Apache-2.0
"""Google's TPUs for XLA to compile for where there are none."""

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from paxlike.errors import UserError


class Kind(NamedTuple):
  """What is sold under one name.

  Attributes:
    name: What the compiler calls it.
    units: Units of the number in a name for each chip: v5p and v7x count cores, of which a chip has
      two. For JAX a v5p chip is one device, and a v7x chip two.
    dims: Of the torus that chips are joined in.
    most: Chips of the largest slice.
    has_one: Whether there is a slice of one chip; others are of four or more.
    ring: Sides that are multiples of it may be closed to rings: 16 is a side of a pod of v5e or
      v6e, 4 that of the cubes that v5p and v7x are built of.
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


# A process that only compiles needs not be the only one, as one that has a TPU must. It asks no
# metadata server what machine it is on, and need not warn that there is none.
_ALONE = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def are_here() -> bool:
  """Returns whether this machine may have TPUs."""
  return any(pathlib.Path("/dev").glob("accel*")) or any(pathlib.Path("/dev").glob("vfio/[0-9]*"))


def are_named(topology: str) -> bool:
  """Returns whether a topology, such as v5e-256, is one of TPUs."""
  return topology.partition("-")[0] in KINDS


def settle():
  """Answers what the compiler asks where there are no TPUs: it would complain of what it lacks."""
  for name, value in _ALONE.items():
    os.environ.setdefault(name, value)


def check(kind: str, count: int):
  """Raises UserError unless there is a slice of this name."""
  shape(kind, count)


def shape(kind: str, count: int) -> tuple[int, ...]:
  """Returns the chips along each dim of the torus of a slice: the most compact that is sold.

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
      f" {one.most * one.units:,}{each}: {least} and more in a box whose sides are 2 or multiples"
      " of 4; for more add --slices=N."
    )
  # The most compact one. The compiler has 2x2x1, not 1x2x2.
  sides = min(found, key=lambda sides: sides[::-1])
  return sides[1:] + sides[:1] if sides[0] == 1 else sides


def wrap(kind: str, sides: tuple[int, ...]) -> tuple[bool, bool, bool]:
  """Returns along which dims of a slice its last chip is linked to its first.

  Slices of whole cubes of 4x4x4 chips are 3D tori, smaller ones have no such links
  (cloud.google.com/tpu/docs/v5p-training; v7x is built alike). A pod of v5e or v6e is a 2D torus of
  16x16 chips: only sides as long as the pod's are closed (jax-ml.github.io/scaling-book/tpus).
  """
  one = KINDS[kind]
  closed = [side % one.ring == 0 for side in sides]
  if one.dims == 3:
    closed = [all(closed)] * 3
  first, second, third = (*closed, False)[:3]
  return first, second, third


def _boxes(chips: int, dims: int, least: int = 1) -> Iterator[tuple[int, ...]]:
  """Yields the boxes of so many chips, their sides growing; a side is 1 only beside 1 and 2."""
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
  """Returns the chips of slices that are each as `shape` tells, in hosts of up to four.

  Raises:
    UserError: There is no such slice, or JAX lacks what compiles for it.
  """
  settle()
  from jax.experimental import topologies

  sides = shape(kind, count)
  # Without it the compiler takes no dim to be a ring, and routes around the missing links.
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
    raise UserError(f"--topology={kind}-{count}: Google's compiler refuses: {first}") from None
  return list(found.devices)
