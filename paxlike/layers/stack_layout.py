# SPDX-License-Identifier: Apache-2.0
"""The mapping between layer indexes and the names of weights.

The same parameters have two layouts. Unrolled, layer 3 owns `stack.layers.3.*`. Scanned, a stack is
a prologue, a repeated pattern of blocks and an epilogue; `stack.pattern.0.*` then holds the first
block of every repeat, stacked along a leading dim.
"""

import dataclasses
import re
from typing import NamedTuple

from paxlike.errors import ArgumentError

_NAME = re.compile(
  r"^(?P<head>.*?(?:^|\.)stack)\.(?P<section>layers|prologue|pattern|epilogue)\.(?P<index>\d+)\."
)


class Location(NamedTuple):
  """A parsed weight name.

  Attributes:
    template: The name with a placeholder for the layer, such as "stack.{}.attention.query.w".
    layers: The indexes of the layers that the weight holds.
    section: The section of the stack: "layers", or "prologue", "pattern" or "epilogue" if scanned.
  """

  template: str
  layers: tuple[int, ...]
  section: str

  @property
  def stacked(self) -> bool:
    """Whether the weight has a leading dim of layers."""
    return self.section == "pattern"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The layout of a stack of `prologue + pattern * repeats + epilogue` layers.

  In an interleaved pipeline, chunk c of stage s is virtual stage c * stages + s; the chunks of a
  stage are adjacent in the leading dim.
  """

  scanned: bool
  prologue: int = 0
  pattern: int = 1
  repeats: int
  epilogue: int = 0
  stages: int = 1
  chunks: int = 1

  @property
  def num_layers(self) -> int:
    """L, the number of layers."""
    return self.prologue + self.pattern * self.repeats + self.epilogue

  def in_pipeline(self, *, stages: int, chunks: int) -> "Layout":
    """Returns the layout of the same stack, its repeats split into `chunks` chunks per stage.

    Raises:
      UserError: The stages do not divide the repeats.
    """
    assert self.scanned
    if self.repeats % (stages * chunks):
      raise ArgumentError(
        f"stages={stages} x chunks={chunks} does not divide repeats={self.repeats} of"
        f" {self.pattern} layers: change the layers or the stages."
      )
    if chunks == 1:  # The leading dim is in layer order, as without a pipeline.
      return self
    return dataclasses.replace(self, stages=stages, chunks=chunks)

  @property
  def order(self) -> tuple[int, ...]:
    """The repeat at each index of the leading dim."""
    size = self.repeats // (self.stages * self.chunks)
    return tuple(
      (chunk * self.stages + stage) * size + repeat
      for stage in range(self.stages)
      for chunk in range(self.chunks)
      for repeat in range(size)
    )

  def locate(self, name: str) -> Location | None:
    """Returns the location of `name`, or None if it is not a weight of a stack."""
    match = _NAME.match(name)
    if match is None:
      return None
    template = f"{match['head']}.{{}}.{name[match.end() :]}"
    index, section = int(match["index"]), match["section"]
    if section == "pattern":
      first = self.prologue + index
      layers = tuple(first + repeat * self.pattern for repeat in self.order)
      return Location(template, layers, section)
    if section == "epilogue":
      index += self.prologue + self.pattern * self.repeats
    return Location(template, (index,), section)

  def place(self, template: str, layer: int) -> tuple[str, int | None]:
    """Returns (weight name, index in its leading dim or None) of `template` for `layer`."""
    if not self.scanned:
      return template.format(f"layers.{layer}"), None
    if layer < self.prologue:
      return template.format(f"prologue.{layer}"), None
    repeat, position = divmod(layer - self.prologue, self.pattern)
    if repeat < self.repeats:
      return template.format(f"pattern.{position}"), self.order.index(repeat)
    last = layer - self.prologue - self.pattern * self.repeats
    return template.format(f"epilogue.{last}"), None
