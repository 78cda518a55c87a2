# SPDX-License-Identifier: Apache-2.0
"""Weights that a run starts from: those of another run, or of a converted model."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from paxlike import mesh as mesh_lib
from paxlike import ranges, relayout, run_folder
from paxlike.checkpoint import Checkpoints, agreed, everywhere
from paxlike.checksums import Damaged
from paxlike.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers import quantization
from paxlike.layers.layout import Layout
from paxlike.layers.module import Definition, Params
from paxlike.layers.stack import layout_of

PROVENANCE = "restored_from.json"
_Read = TypeVar("_Read")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
  """Which weights are taken from where, before the first step.

  Patterns (`re.search`) are tried on names as in `stack.layers.3.attention.query.w`, whether layers
  are scanned or not.

  Attributes:
    path: The folder of a run, or its folder of checkpoints.
    step: Which checkpoint; None: the newest.
    include: Patterns of weights to take.
    ignore: Patterns of those that are drawn anew all the same.
  """

  path: ranges.Path
  step: ranges.NonNegative | None = None
  include: tuple[str, ...] = ("",)
  ignore: tuple[str, ...] = ()

  def check(self, definition: Definition):
    """Finds what is wrong before anything is read.

    Raises:
      UserError: There is no such checkpoint, a pattern is none, or nothing is to be taken.
    """
    try:
      step = self.saved.find(self.step)
    except UserError as error:
      raise UserError(f"CHECKPOINT_RESTORE_PATH={self.path}: {error}") from None
    for knob, patterns in (("INCLUDE", self.include), ("IGNORE", self.ignore)):
      for pattern in patterns:
        try:
          re.compile(pattern)
        except re.error as error:
          raise UserError(f"CHECKPOINT_{knob}_RULES: {pattern!r} is no pattern: {error}.") from None
    chosen = self._chosen(definition)
    if not chosen:
      raise UserError(
        f"CHECKPOINT_RESTORE_PATH={self.path}: CHECKPOINT_INCLUDE_RULES and CHECKPOINT_IGNORE_RULES"
        " leave no weight to restore."
      )
    with self._telling():
      weights = {
        f"params.{name}": jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for name, spec in definition.weights.items()
        if name in chosen
      }
      layout = layout_of(definition.module)
      self.saved.check(step, weights, layout=layout, unread=relayout.anything)

  def load(
    self,
    definition: Definition,
    mesh: jax.sharding.Mesh,
    *,
    among: Collection[str] | None = None,
    for_compute: bool = False,
    complete: bool = False,
  ) -> "Taken":
    """Returns the weights that are taken.

    Args:
      definition: Says what the weights are.
      mesh: Where they go.
      among: Of which weights; None: of all.
      for_compute: See `read_params`.
      complete: Whether the model must have every weight of the checkpoint that the rules take. One
        that is trained next may have fewer on purpose.

    Raises:
      UserError: The checkpoint lacks one, has it in another shape, holds more, or is damaged.
    """
    names = [name for name in self._chosen(definition) if among is None or name in among]
    saved = self.saved
    with self._telling():
      step, (params, lost) = read_found(
        saved,
        self.step,
        lambda step: read_params(
          saved,
          step,
          definition,
          mesh,
          names=names,
          for_compute=for_compute,
          unread=self._may_stay_unread if complete else relayout.anything,
        ),
      )
    others = [name for name in definition.weights if name not in names]
    return Taken(params, self.provenance(step, others, list(params)), lost)

  @contextlib.contextmanager
  def _telling(self) -> Iterator[None]:
    """Context whose errors name the knobs that the user may change."""
    try:
      yield
    except UserError as error:
      raise UserError(
        f"CHECKPOINT_RESTORE_PATH: {error} CHECKPOINT_IGNORE_RULES leaves weights out."
      ) from error

  def provenance(self, step: int, initialized: Sequence[str], restored: Sequence[str]) -> str:
    """Returns a JSON text that says which weights came from a checkpoint, and which did not."""
    origin = {
      "path": os.fspath(self.folder),
      "step": step,
      "include": self.include,
      "ignore": self.ignore,
      "restored": restored,
      "initialized": initialized,
    }
    return json.dumps(origin, indent=2) + "\n"

  @property
  def folder(self) -> epath.Path:
    """The folder of checkpoints."""
    folder = run_folder.absolute(self.path)
    inner = folder / "checkpoints"
    return inner if inner.exists() else folder

  @property
  def saved(self) -> Checkpoints:
    """The checkpoints there."""
    return Checkpoints(self.folder, keep=None)

  def _chosen(self, definition: Definition) -> list[str]:
    layout = layout_of(definition.module)
    weights = (name for name, spec in definition.weights.items() if not spec.statistic)
    return [name for name in weights if self._takes(name, layout)]

  def _takes(self, name: str, layout: Layout) -> bool:
    location = layout.locate(name)
    layers = [name]
    if location is not None:
      layers = [location.template.format(f"layers.{layer}") for layer in location.layers]
    taken = {self.matches(layer) for layer in layers}
    if len(taken) == 2:
      raise UserError(
        f"the rules of CHECKPOINT_RESTORE_PATH take some layers of {name} and not others: set"
        " USE_REPEATED_LAYER=False."
      )
    return True in taken

  def _may_stay_unread(self, name: str) -> bool:
    part, _, weight = name.partition(".")
    return part != "params" or not self.matches(weight)

  def matches(self, name: str) -> bool:
    """Returns whether the rules take a weight of this name."""

    def any_of(patterns: tuple[str, ...]) -> bool:
      return any(re.search(pattern, name) for pattern in patterns)

    return any_of(self.include) and not any_of(self.ignore)


class Taken(NamedTuple):
  """Weights from elsewhere.

  Attributes:
    params: By name.
    provenance: A JSON text that says which they are, and where they are from.
    lost: As of `read_params`.
  """

  params: Params
  provenance: str
  lost: float | None


def began_with(
  folder: epath.Path, *, given: Restore | None, flag: str = "--fdl.CHECKPOINT_RESTORE_PATH"
) -> Restore | None:
  """Returns where the weights of the run in `folder` are from; None if all were drawn.

  Args:
    folder: Of the run.
    given: Where that is now, if it is no longer where it was.
    flag: What the user says that by.

  Raises:
    UserError: It is gone, or the folder does not tell.
  """
  file = folder / PROVENANCE
  if not file.exists() and given is not None:
    raise UserError(
      f"{folder} does not tell what its run began with. If that was {given.path}, its file"
      f" {PROVENANCE} is missing; if not, leave {flag} out."
    )
  if not file.exists():
    return None
  try:
    told = json.loads(run_folder.read_bytes(file))
    restore = Restore(
      path=told["path"],
      step=told["step"],
      include=tuple(told["include"]),
      ignore=tuple(told["ignore"]),
    )
    if not isinstance(restore.path, str) or type(restore.step) is not int:
      raise ValueError("it names no checkpoint")
    for pattern in (*restore.include, *restore.ignore):
      re.compile(pattern)
  except (OSError, re.error, *run_folder.MALFORMED) as error:
    raise UserError(
      f"{file}, which tells what the run began with, is damaged: {error!r}."
    ) from error
  places = [restore] if given is None else [restore, dataclasses.replace(restore, path=given.path)]
  for place in places:
    if place.step in place.saved.steps():
      return place
  raise UserError(
    f"checkpoint {restore.step} of {restore.path} is gone, and with it the weights that the run in"
    f" {folder} began with: say by {flag} where it is."
  )


def read_found(
  saved: Checkpoints, step: int | None, read: Callable[[int], _Read]
) -> tuple[int, _Read]:
  """Returns a step and what `read` gives for it, the same step in all processes.

  Step None is the newest; if its run removes that one while it is read, the newest by then.

  Raises:
    UserError: There is no such checkpoint, it is damaged, or was removed while it was read.
  """
  while True:
    (found,) = agreed(lambda: [saved.find(step)])
    error, result = None, []
    try:
      result = [read(found)]
    except Damaged as raised:
      error = raised
    if everywhere(error is None):
      return found, result[0]
    if found in agreed(saved.steps):
      raise error or Damaged(f"{saved.path(found)}: another process cannot read its part.")
    if step is not None:
      raise UserError(f"{saved.path(found)} was removed while it was read.")


def read_params(
  saved: Checkpoints,
  step: int,
  definition: Definition,
  mesh: jax.sharding.Mesh,
  *,
  names: list[str] | None = None,
  for_compute: bool = False,
  unread: relayout.Unread,
) -> tuple[Params, float | None]:
  """Returns weights of a checkpoint, whatever the mesh, layout and float dtype it was written with.

  And of those that are quantized, how much of them is lost: the root of the mean square, relative
  to the weights; None if none is.

  Args:
    saved: Where it is.
    step: Which.
    definition: Says what the weights are.
    mesh: Where they go.
    names: Which weights; None: all.
    for_compute: Whether to read them in the dtypes that layers compute with, or in those of a
      training state.
    unread: Which arrays of the checkpoint may stay unread.

  Raises:
    UserError: One is missing, has another shape, or is damaged; or one stays unread that may not.
  """
  specs = {
    name: definition.weights[name] for name in (definition.weights if names is None else names)
  }
  layout = layout_of(definition.module)

  def wanted(names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    arrays = {}
    for name in names:
      spec = specs[name]
      where = mesh_lib.sharding(mesh, spec.dims, spec.shape)
      for_layers = for_compute and not spec.is_quantized
      dtype = spec.compute_dtype if for_layers else spec.stored_dtype
      part = "extra" if spec.statistic else "params"
      arrays[f"{part}.{name}"] = jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where)
    return arrays

  saved.check(step, wanted(specs), layout=layout, unread=unread)

  def read(names: Sequence[str]) -> Params:
    flat = saved.restore(step, wanted(names), layout=layout, unread=relayout.anything).state
    return {name.partition(".")[2]: value for name, value in flat.items()}

  stored_as = saved.layout(step)

  def array_of(name: str) -> str:
    location = layout.locate(name)
    return stored_as.place(location.template, location.layers[0])[0] if location else name

  params = read([name for name, spec in specs.items() if not spec.is_quantized])
  squares = []
  quantized = sorted((name for name, spec in specs.items() if spec.is_quantized), key=array_of)
  # Not all at once: there may be no room for them.
  for _, together in itertools.groupby(quantized, key=array_of):
    for name, whole in read(list(together)).items():
      params[name] = specs[name].stored(whole)
      squares.append(quantization.squares(whole, params[name]))
  lost, all_of_it = np.sum(jax.device_get(squares), axis=0) if squares else (0.0, 0.0)
  return params, math.sqrt(lost / all_of_it) if squares else None
