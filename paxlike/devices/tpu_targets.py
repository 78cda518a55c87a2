# SPDX-License-Identifier: Apache-2.0
"""TPU topologies for ahead-of-time compilation without TPUs."""

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from paxlike.errors import UserError


class TpuKind(NamedTuple):
  """A TPU generation.

  Attributes:
    name: The compiler's name.
    units: What a topology's name counts per chip: v4, v5p and v7x count cores, two per chip. For
      JAX, a v4 or v5p chip is one device and a v7x chip two.
    dims: Dims of the torus.
    most: Chips in the largest slice.
    has_one: Whether one-chip slices exist; other slices have at least four chips.
    ring: Sides that are multiples of this may have wraparound links: 16 is the side of a v5e or v6e
      pod, 4 that of the cubes of v4, v5p and v7x.
    cores: The compiler's name for cores that make up one device, where it needs one.
  """

  name: str
  units: int
  dims: int
  most: int
  has_one: bool
  ring: int
  cores: str = ""


KINDS = {
  "v4": TpuKind("v4", 2, 3, 4096, False, 4, cores="megacore"),
  "v5e": TpuKind("v5e", 1, 2, 256, True, 16),
  "v5p": TpuKind("v5p", 2, 3, 6144, False, 4),
  "v6e": TpuKind("v6e", 1, 2, 256, True, 16),
  "v7x": TpuKind("tpu7x", 2, 3, 9216, True, 4),
}


# Lets several compile-only processes load libtpu, and keeps libtpu from querying a metadata server.
_COMPILE_ONLY = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def has_tpus() -> bool:
  """Returns whether this machine seems to have TPUs."""
  return any(pathlib.Path("/dev").glob("accel*")) or any(pathlib.Path("/dev").glob("vfio/[0-9]*"))


def names_tpus(topology: str) -> bool:
  """Returns whether a topology, such as v5e-256, consists of TPUs."""
  return topology.partition("-")[0] in KINDS


def settle():
  """Sets the environment variables that libtpu needs on machines without TPUs."""
  for name, value in _COMPILE_ONLY.items():
    os.environ.setdefault(name, value)


def check(kind: str, count: int):
  """Raises UserError unless a slice of `count` units of this kind exists."""
  shape(kind, count)


def shape(kind: str, count: int) -> tuple[int, ...]:
  """Returns the sides of a slice's torus in chips: the most compact shape that exists.

  Raises:
    UserError: There is no such slice.
  """
  one = KINDS[kind]
  chips, rest = divmod(count, one.units)
  exists = not rest and (4 <= chips <= one.most or (chips == 1 and one.has_one))
  found = list(_boxes(chips, one.dims)) if exists else []
  if not found:
    counted = f" (counted as {one.units} each)" if one.units > 1 else ""
    least = "1, or 4" if one.has_one else "4"
    raise UserError(
      f"--topology={kind}-{count}: there is no such slice. A {kind} slice has {least} to"
      f" {one.most:,} chips{counted}, in a box with sides of 2 or multiples of 4; add --slices=N"
      " for more."
    )
  # The compiler has 2x2x1, not 1x2x2.
  sides = min(found, key=lambda sides: sides[::-1])
  return sides[1:] + sides[:1] if sides[0] == 1 else sides


def wrap(kind: str, sides: tuple[int, ...]) -> tuple[bool, bool, bool]:
  """Returns which dims of a slice have wraparound links.

  v4, v5p and v7x slices of whole cubes of 4x4x4 chips are 3D tori; smaller slices have no
  wraparound links (cloud.google.com/tpu/docs/v5p-training). A v5e or v6e pod is a 2D torus of
  16x16 chips: only sides of 16 wrap around (jax-ml.github.io/scaling-book/tpus).
  """
  one = KINDS[kind]
  closed = [side % one.ring == 0 for side in sides]
  if one.dims == 3:
    closed = [all(closed)] * 3
  first, second, third = (*closed, False)[:3]
  return first, second, third


def _boxes(chips: int, dims: int, least: int = 1) -> Iterator[tuple[int, ...]]:
  """Yields boxes of `chips` chips, sides ascending; 1 occurs only with other sides of 1 or 2."""
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
  """Returns the devices of `slices` slices of shape `shape(kind, count)`, at most 4 chips a host.

  Raises:
    UserError: There is no such slice, or the TPU compiler is not installed.
  """
  settle()
  from jax.experimental import topologies

  sides = shape(kind, count)
  # Without `wrap`, the compiler assumes that there are no wraparound links.
  options: dict[str, Any] = {"wrap": wrap(kind, sides)}
  if KINDS[kind].cores:
    options["chip_config_name"] = KINDS[kind].cores
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
