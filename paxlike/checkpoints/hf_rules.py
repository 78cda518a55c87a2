# SPDX-License-Identifier: Apache-2.0
"""Rules that convert weights to and from Hugging Face tensors, one rule for both directions.

A family maps the names of its weights, `{}` for the layer, to rules with Hugging Face's tensor
names:

    {"stack.{}.attention.query.w": Matrix("model.layers.{}.self_attn.q_proj.weight"), ...}
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Same:
  """The same tensor, apart from its shape.

  Attributes:
    name: Hugging Face's tensor name, `{}` for the layer.
    ndim: Number of dims of the tensor, which merges the trailing dims of our weight. None: the
      shapes are equal.
  """

  name: str
  ndim: int | None = None

  @property
  def templates(self) -> tuple[str, ...]:
    """Hugging Face's names of all tensors that it may read, `{}` for the layer."""
    return (self.name,)

  def among(self, shapes: Mapping[str, Shape]) -> "Same":
    """Returns the rule for a layer whose weights have these shapes, by name with `{}`."""
    del shapes
    return self

  def part(self, shape: Shape) -> Any:
    """Returns the slice of the tensor that a weight of `shape` occupies."""
    del shape
    return ...

  def names(self, layer: int, shape: Shape) -> list[str]:
    """Returns the names of the tensors of one weight of `shape`."""
    del shape
    return [self.name.format(layer)]

  def their_shapes(self, shape: Shape) -> list[Shape]:
    """Returns the shape of each of these tensors."""
    if self.ndim is None:
      return [shape]
    return [(*shape[: self.ndim - 1], math.prod(shape[self.ndim - 1 :]))]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    """Returns the weight from its tensors."""
    return tensors[0].reshape(shape)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    """Returns the tensors of a weight, or its slice of them."""
    return [weight.reshape(self.their_shapes(weight.shape)[0])]


@dataclasses.dataclass(frozen=True)
class Shifted(Same):
  """Our weight is the tensor minus 1: our norm scales are around 0 instead of 1."""

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return tensors[0].astype(np.float32) - 1

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return [weight.astype(np.float32) + 1]


@dataclasses.dataclass(frozen=True)
class Matrix(Same):
  """A linear map.

  Attributes:
    inputs: Number of leading dims of our weight that are contracted.
    transposed: Whether the tensor is [outputs, inputs]; else [inputs, outputs].
  """

  inputs: int = 1
  transposed: bool = True

  def their_shapes(self, shape: Shape) -> list[Shape]:
    flat = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
    return [flat[::-1] if self.transposed else flat]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return (tensors[0].T if self.transposed else tensors[0]).reshape(shape)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    flat = weight.reshape(math.prod(weight.shape[: self.inputs]), -1)
    return [flat.T if self.transposed else flat]


@dataclasses.dataclass(frozen=True)
class Fused(Same):
  """Slice `index` of `of` equal contiguous slices of a tensor along its last dim."""

  index: int = 0
  of: int = 2

  def part(self, shape: Shape) -> Any:
    size = super().their_shapes(shape)[0][-1]
    return (..., slice(self.index * size, (self.index + 1) * size))

  def their_shapes(self, shape: Shape) -> list[Shape]:
    *outer, last = super().their_shapes(shape)[0]
    return [(*outer, self.of * last)]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return tensors[0][self.part(shape)].reshape(shape)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return [weight.reshape(super().their_shapes(weight.shape)[0])]


@dataclasses.dataclass(frozen=True)
class Interleaved(Fused):
  """Every `of`-th entry along the last dim, starting at `index`."""

  def part(self, shape: Shape) -> Any:
    return (..., slice(self.index, None, self.of))


@dataclasses.dataclass(frozen=True)
class PerExpert(Same):
  """Linear maps of experts, a tensor [outputs, inputs] each; `{expert}` in a name is its index."""

  def names(self, layer: int, shape: Shape) -> list[str]:
    return [self.name.format(layer, expert=expert) for expert in range(shape[0])]

  def their_shapes(self, shape: Shape) -> list[Shape]:
    return [(shape[2], shape[1])] * shape[0]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return np.stack([tensor.T for tensor in tensors])

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return [expert.T for expert in weight]


@dataclasses.dataclass(frozen=True)
class ExpertMatrices(Same):
  """Linear maps of experts in one tensor [experts, outputs, inputs]."""

  def their_shapes(self, shape: Shape) -> list[Shape]:
    return [(shape[0], shape[2], shape[1])]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return tensors[0].swapaxes(1, 2)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return [weight.swapaxes(1, 2)]


@dataclasses.dataclass(frozen=True)
class Taps(Same):
  """A depthwise convolution, whose tensor is [channels, 1, taps]."""

  def their_shapes(self, shape: Shape) -> list[Shape]:
    return [(math.prod(shape[:-1]), 1, shape[-1])]


@dataclasses.dataclass(frozen=True)
class Stacked(Same):
  """One of several weights whose tensors are concatenated.

  Attributes:
    rule: Converts the weight to its own part of the tensor.
    weights: The names of the weights of the same layer in the tensor, in order, `{}` for the layer.
    weight: Which of them this is.
    axis: The dim of the tensor along which the weights are concatenated.
    start, total: Where the part starts, and the size of that dim; `among` finds them.
  """

  rule: Same = Same("")
  weights: tuple[str, ...] = ()
  weight: str = ""
  axis: int = 0
  start: int = 0
  total: int = 0

  def among(self, shapes: Mapping[str, Shape]) -> Same:
    sizes = [self.rule.their_shapes(shapes[name])[0][self.axis] for name in self.weights]
    before = sizes[: self.weights.index(self.weight)]
    return dataclasses.replace(self, start=sum(before), total=sum(sizes))

  def part(self, shape: Shape) -> Any:
    size = self.rule.their_shapes(shape)[0][self.axis]
    return (*(slice(None),) * self.axis, slice(self.start, self.start + size))

  def their_shapes(self, shape: Shape) -> list[Shape]:
    ((*sizes,),) = self.rule.their_shapes(shape)
    sizes[self.axis] = self.total
    return [tuple(sizes)]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return self.rule.load([tensors[0][self.part(shape)]], shape)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return self.rule.save(weight)


def stacked(name: str, weights: Mapping[str, Same], *, axis: int = 0) -> dict[str, "Same"]:
  """Returns the rules of weights whose tensors are concatenated, in this order, to one."""
  names = tuple(weights)
  return {
    weight: Stacked(name, rule=rule, weights=names, weight=weight, axis=axis)
    for weight, rule in weights.items()
  }


@dataclasses.dataclass(frozen=True)
class Grouped(Same):
  """One of several linear maps whose outputs are in one tensor [outputs, inputs], group by group.

  Each group has an equal share of the outputs of every map, in the order of `weights`.

  Attributes:
    weights: The names of the maps of the same layer in the tensor, in order, `{}` for the layer.
    weight: Which of them this is.
    groups: The map whose first output dim is that of the groups.
    num_groups, sizes: The number of groups, and of each map's outputs in one; `among` finds them.
  """

  weights: tuple[str, ...] = ()
  weight: str = ""
  groups: str = ""
  num_groups: int = 1
  sizes: tuple[int, ...] = ()

  def among(self, shapes: Mapping[str, Shape]) -> Same:
    num_groups = shapes[self.groups][1]
    sizes = tuple(math.prod(shapes[name][1:]) // num_groups for name in self.weights)
    return dataclasses.replace(self, num_groups=num_groups, sizes=sizes)

  def part(self, shape: Shape) -> Any:
    del shape
    index, total = self.weights.index(self.weight), sum(self.sizes)
    of_group = sum(self.sizes[:index]) + np.arange(self.sizes[index])
    return ((total * np.arange(self.num_groups)[:, None] + of_group).reshape(-1),)

  def their_shapes(self, shape: Shape) -> list[Shape]:
    return [(self.num_groups * sum(self.sizes), shape[0])]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    return tensors[0][self.part(shape)].T.reshape(shape)

  def save(self, weight: np.ndarray) -> list[np.ndarray]:
    return [weight.reshape(len(weight), -1).T]


def grouped(name: str, *weights: str, groups: str) -> dict[str, "Same"]:
  """Returns the rules of linear maps whose outputs are in one tensor, group by group."""
  return {
    weight: Grouped(name, weights=weights, weight=weight, groups=groups) for weight in weights
  }


@dataclasses.dataclass(frozen=True)
class Either(Same):
  """The rule of a weight of models in which layers differ.

  Attributes:
    weight: The name of a weight, `{}` for the layer.
    there: The rule for layers that have it.
    absent: The rule for the others.
  """

  weight: str = ""
  there: Same = Same("")
  absent: Same = Same("")

  @property
  def templates(self) -> tuple[str, ...]:
    return (*self.there.templates, *self.absent.templates)

  def among(self, shapes: Mapping[str, Shape]) -> Same:
    return (self.there if self.weight in shapes else self.absent).among(shapes)


def either(weight: str, there: "Rules", absent: "Rules") -> dict[str, "Same"]:
  """Returns the rules of models in which only some layers have `weight`."""
  both = {
    name: Either(there[name].name, weight=weight, there=there[name], absent=absent[name])
    for name in there.keys() & absent.keys()
  }
  return {**absent, **there, **both}


Rule = Same
Rules = dict[str, Rule]
