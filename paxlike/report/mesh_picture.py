# SPDX-License-Identifier: Apache-2.0
"""The picture of a mesh: nested boxes, an axis a level, from the slowest to the fastest."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from paxlike.devices import mesh
from paxlike.report.html_text import Html, element, joined, table

_MOST = 8  # Boxes of a level; of a larger axis, some are left out.
_MOST_DEVICES = 256


class Level(NamedTuple):
  """An axis of the mesh within or across slices."""

  axis: str
  size: int
  within: bool


def levels(sizes: Mapping[str, tuple[int, int]]) -> list[Level]:
  """Returns the levels of a mesh, axis -> (ICI, DCN) size: those across slices come first."""
  across = [Level(axis, dcn, False) for axis, (_, dcn) in sizes.items() if dcn > 1]
  return across + [Level(axis, ici, True) for axis, (ici, _) in sizes.items() if ici > 1]


def picture(sizes: Mapping[str, tuple[int, int]]) -> Html:
  """Returns the boxes of a mesh, and a table of what its axes shard."""
  found = levels(sizes)
  num_devices = math.prod(level.size for level in found)
  named = ", ".join(
    f"{level.axis} {level.size}{'' if level.within else ' across slices or nodes'}"
    for level in found
  )
  spoken = f"{num_devices:,} devices: {named}" if found else "one device"
  shown = [min(level.size, _MOST) for level in found]
  while math.prod(shown) > _MOST_DEVICES:
    shown[shown.index(max(shown))] //= 2
  boxes = element("div", _boxes(found, shown), class_="mesh", role="img", aria_label=spoken)
  rows = [
    (level.axis, f"{level.size:,}", "ICI" if level.within else "DCN", _sharded(level.axis))
    for level in found
  ]
  header = ("axis", "size", "network", "dims that it shards")
  axes = table(header, rows, label="Axes of the mesh", numbers=False) if rows else ""
  return joined([element("p", spoken), boxes, axes])


def _boxes(found: list[Level], shown: list[int]) -> Html:
  if not found:
    return element("span", class_="device")
  level, count = found[0], shown[0]
  inner = _boxes(found[1:], shown[1:])
  is_last = not found[1:]
  boxes = [
    inner
    if is_last
    else element("div", element("small", f"{level.axis} {place}"), inner, class_="box")
    for place in range(count)
  ]
  if count < level.size:
    boxes.append(element("span", f"… {level.size:,}", class_="more"))
  label = element("small", f"{level.axis} {level.size}") if is_last else ""
  color = mesh.AXES.index(level.axis)
  kind = "within" if level.within else "across"
  return element("div", label, *boxes, class_=f"level {kind} a{color}")


def _sharded(axis: str) -> str:
  return ", ".join(dim for dim, axes in mesh.RULES.items() if axis in axes)
