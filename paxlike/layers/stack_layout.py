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
    indexes: The index of each in the weight's leading dim, if it has one; others are padding.
    section: The section of the stack: "layers", or "prologue", "pattern" or "epilogue" if scanned.
  """

  template: str
  layers: tuple[int, ...]
  section: str
  indexes: tuple[int, ...] = (0,)

  @property
  def stacked(self) -> bool:
    """Whether the weight has a leading dim of layers."""
    return self.section == "pattern"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The layout of a stack of `prologue + pattern * repeats + epilogue` layers.

  In a pipeline, chunk c of stage s is virtual stage c * stages + s; the chunks of a stage are
  adjacent in the leading dim. If the virtual stages do not divide the repeats, the first ones have
  one repeat more, and the leading dim is padded for the others.
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
      UserError: There are fewer repeats than virtual stages.
    """
    assert self.scanned
    if self.repeats < stages * chunks:
      raise ArgumentError(
        f"stages={stages} x chunks={chunks} are more than repeats={self.repeats} of"
        f" {self.pattern} layers: change the layers or the stages (mesh axis pipeline)."
      )
    if chunks == 1 and self.repeats % stages == 0:
      return self  # The leading dim is in layer order, as without a pipeline.
    return dataclasses.replace(self, stages=stages, chunks=chunks)

  @property
  def chunk_size(self) -> int:
    """The most repeats of a virtual stage."""
    return -(-self.repeats // (self.stages * self.chunks))

  @property
  def stacked_size(self) -> int:
    """The size of the leading dim: the repeats, and padding."""
    return self.chunk_size * self.stages * self.chunks

  @property
  def order(self) -> tuple[int | None, ...]:
    """The repeat at each index of the leading dim; None: padding."""
    places = self.stages * self.chunks
    least, more = divmod(self.repeats, places)
    order: list[int | None] = []
    for stage in range(self.stages):
      for chunk in range(self.chunks):
        place = chunk * self.stages + stage
        first, count = place * least + min(place, more), least + (place < more)
        order += range(first, first + count)
        order += [None] * (self.chunk_size - count)
    return tuple(order)

  def locate(self, name: str) -> Location | None:
    """Returns the location of `name`, or None if it is not a weight of a stack."""
    match = _NAME.match(name)
    if match is None:
      return None
    template = f"{match['head']}.{{}}.{name[match.end() :]}"
    index, section = int(match["index"]), match["section"]
    if section == "pattern":
      first = self.prologue + index
      held = [(i, repeat) for i, repeat in enumerate(self.order) if repeat is not None]
      layers = tuple(first + repeat * self.pattern for _, repeat in held)
      return Location(template, layers, section, tuple(i for i, _ in held))
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
