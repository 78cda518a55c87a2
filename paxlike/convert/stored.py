# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of a checkpoint of paxlike, one layer of one weight at a time."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import Derived
from paxlike.errors import UserError
from paxlike.layers.module import WeightSpec
from paxlike.layers.stack_layout import Layout


class Weights(Protocol):
  """Weights under the names of the unrolled layout."""

  def array_of(self, name: str) -> str:
    """Returns the name of the stored array that holds a weight."""
    ...

  def read(self, name: str) -> np.ndarray:
    """Returns a weight; UserError if it is missing."""
    ...


class Stored:
  """The weights of one checkpoint, stored in any layout."""

  def __init__(self, directory: pathlib.Path, step: int | None, unrolled: Layout):
    """Opens checkpoint `step` (None: the newest) in `directory`.

    `unrolled` is the layout of the unrolled model, whose names `read` takes.

    Raises:
      UserError: There is none.
    """
    saved = Checkpoints(directory, keep=None)
    self._checkpoint = saved.at(saved.find(step))
    self._layout = self._checkpoint.layout()
    self._unrolled = unrolled
    self._derived: Mapping[str, Derived] = {}
    self._read: dict[str, np.ndarray] = {}  # The arrays of the weight read last.

  def derive(self, weights: Mapping[str, Derived]):
    """Makes `read` compute these weights, if the checkpoint holds a training state.

    Raises:
      UserError: The state lacks an array that a weight is computed from.
    """
    if self._checkpoint.has_training_state():
      self._derived = weights
      inputs = {name: leaf for one in weights.values() for name, leaf in one.inputs.items()}
      self._checkpoint.check(inputs, layout=self._unrolled, unread=layout_conversion.anything)

  def check(self, shapes: Mapping[str, tuple[int, ...]]):
    """Compares the checkpoint's weights with `shapes`, name -> shape.

    Raises:
      UserError: A weight is missing, unexpected or of another shape.
    """
    target = {f"params.{n}": jax.ShapeDtypeStruct(s, np.float32) for n, s in shapes.items()}
    self._checkpoint.check(target, layout=self._unrolled, unread=layout_conversion.all_but_weights)

  def array_of(self, name: str) -> str:
    return self._place(name)[0]

  def read(self, name: str) -> np.ndarray:
    one = self._derived.get(name)
    names = [f"params.{name}"] if one is None else list(one.inputs)
    places = {name: self._place(name) for name in names}
    kept = {array for array, _ in places.values()}
    self._read = {array: value for array, value in self._read.items() if array in kept}
    arrays = {name: self._array(*place) for name, place in places.items()}
    return np.asarray(arrays[names[0]] if one is None else one.value(arrays))

  def _array(self, array: str, index: int | None) -> np.ndarray:
    if array not in self._read:
      self._read[array] = self._checkpoint.read(array)
    return self._read[array] if index is None else self._read[array][index]

  def _place(self, name: str) -> tuple[str, int | None]:
    location = self._unrolled.locate(name)
    if location is None:
      return name, None
    return self._layout.place(location.template, location.layers[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """The names of the weights of one adapter.

  Attributes:
    a, b: Its low-rank matrices.
    magnitude: DoRA's change of the magnitudes; None: it has none.
    is_per_expert: Whether each expert has its own matrices.
  """

  a: str
  b: str
  magnitude: str | None
  is_per_expert: bool

  @property
  def names(self) -> list[str]:
    """All of them."""
    return [name for name in (self.a, self.b, self.magnitude) if name is not None]


def adapter_of(name: str, weights: Mapping[str, WeightSpec]) -> Adapter | None:
  """Returns the adapter of the weight `name` among a model's weights; None: it has none."""
  prefix = f"{name.rpartition('.')[0]}.lora"
  a, b, magnitude = (f"{prefix}.{part}" for part in ("a", "b", "magnitude"))
  if a not in weights:
    return None
  return Adapter(
    a=a,
    b=b,
    magnitude=magnitude if magnitude in weights else None,
    is_per_expert="experts" in weights[a].dims,
  )


class Merged:
  """The weights of a base model, with a run's adapters merged into them."""

  def __init__(
    self, base: Weights, trained: Stored, adapters: Mapping[str, Adapter], *, scale: float
  ):
    """`adapters`: name of an adapted weight -> the adapter, whose weights `trained` holds."""
    self._base = base
    self._trained = trained
    self._adapters = adapters
    self._scale = scale

  def array_of(self, name: str) -> str:
    return self._base.array_of(name)

  def read(self, name: str) -> np.ndarray:
    weight = self._base.read(name)
    if (adapter := self._adapters.get(name)) is None:
      return weight
    a, b = (self._trained.read(part).astype(np.float32) for part in (adapter.a, adapter.b))
    if not adapter.is_per_expert:
      a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
    added = a @ b
    if added.size != weight.size:
      raise UserError(f"the adapter of {name} is for another base: {list(a.shape)} x {b.shape}.")
    w = weight.astype(np.float32).reshape(added.shape)
    merged = w + self._scale * added
    if adapter.magnitude is not None:
      change = self._trained.read(adapter.magnitude).astype(np.float32).reshape(-1)
      norm, new = magnitudes(w) + change, magnitudes(merged)
      merged *= np.divide(norm, new, out=np.ones_like(new), where=new > 0)
    return merged.reshape(weight.shape)


def magnitudes(w: np.ndarray) -> np.ndarray:
  """Returns the norm of each output (column) of a weight [inputs, outputs], in float32."""
  return np.linalg.norm(w.astype(np.float32), axis=0)
