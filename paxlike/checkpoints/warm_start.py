# SPDX-License-Identifier: Apache-2.0
"""Initial weights of a run, from a checkpoint of another run or of a converted model."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath

from paxlike import file_io
from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.checksums import Damaged
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.config import patterns, ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh as mesh_lib
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params
from paxlike.layers.precision import weight_only
from paxlike.layers.stack import layout_of
from paxlike.layers.stack_layout import Layout
from paxlike.processes.host_collectives import all_processes, broadcast

PROVENANCE = "restored_from.json"
_Read = TypeVar("_Read")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
  """Which weights are restored from which checkpoint before the first step.

  Patterns (`re.search`) are matched with names such as `stack.layers.3.attention.query.w`, whether
  layers are scanned or not.

  Attributes:
    path: The folder of a run, or its folder of checkpoints.
    step: The checkpoint's step; None: the newest.
    include: Patterns of weights to restore.
    ignore: Patterns of weights that are initialized instead; takes precedence.
  """

  path: ranges.Path
  step: ranges.NonNegative | None = None
  include: tuple[str, ...] = ("",)
  ignore: tuple[str, ...] = ()

  def check(self, definition: Definition):
    """Checks the checkpoint and the patterns; reads no array.

    Raises:
      UserError: There is no such checkpoint, a pattern is invalid, or no weight matches.
    """
    try:
      step = self.saved.find(self.step)
    except UserError as error:
      raise UserError(f"CHECKPOINT_RESTORE_PATH={self.path}: {error}") from None
    for knob, given in (("INCLUDE", self.include), ("IGNORE", self.ignore)):
      for pattern in given:
        patterns.check(pattern, f"CHECKPOINT_{knob}_RULES")
    chosen = self._chosen(definition)
    if not chosen:
      raise UserError(
        f"CHECKPOINT_RESTORE_PATH={self.path}: CHECKPOINT_INCLUDE_RULES and CHECKPOINT_IGNORE_RULES"
        " leave no weight to restore."
      )
    with self._naming_knobs():
      weights = {
        f"params.{name}": jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for name, spec in definition.weights.items()
        if name in chosen
      }
      layout = layout_of(definition.module)
      self.saved.at(step).check(weights, layout=layout, unread=layout_conversion.anything)

  def load(
    self,
    definition: Definition,
    mesh: jax.sharding.Mesh,
    *,
    among: Collection[str] | None = None,
    for_compute: bool = False,
    complete: bool = False,
  ) -> "Loaded":
    """Returns the restored weights.

    Args:
      definition: Defines the weights.
      mesh: The mesh to restore onto.
      among: Restrict to these weights; None: all.
      for_compute: See `read_params`.
      complete: Whether the model must have every weight of the checkpoint that the patterns match.
        A model to be trained may lack some on purpose.

    Raises:
      UserError: The checkpoint lacks a weight, has it in another shape, has more weights, or is
        damaged.
    """
    names = [name for name in self._chosen(definition) if among is None or name in among]
    saved = self.saved
    with self._naming_knobs():
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
          unread=self._may_stay_unread if complete else layout_conversion.anything,
        ),
      )
    others = [name for name in definition.weights if name not in names]
    return Loaded(params, self.provenance(step, others, list(params)), lost)

  @contextlib.contextmanager
  def _naming_knobs(self) -> Iterator[None]:
    """Context whose errors name the knobs to change."""
    try:
      yield
    except UserError as error:
      raise UserError(
        f"CHECKPOINT_RESTORE_PATH: {error} Exclude weights by CHECKPOINT_IGNORE_RULES."
      ) from error

  def provenance(self, step: int, initialized: Sequence[str], restored: Sequence[str]) -> str:
    """Returns JSON that records the checkpoint and which weights were restored or initialized."""
    origin = {
      "path": os.fspath(self.folder),
      "step": step,
      "identity": self.saved.at(step).identity(),
      "include": self.include,
      "ignore": self.ignore,
      "restored": restored,
      "initialized": initialized,
    }
    return json.dumps(origin, indent=2) + "\n"

  @property
  def folder(self) -> epath.Path:
    """The folder of checkpoints."""
    folder = file_io.absolute(self.path)
    inner = folder / "checkpoints"
    return inner if inner.exists() else folder

  @property
  def saved(self) -> Checkpoints:
    """The checkpoints in `folder`."""
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
        f"CHECKPOINT_INCLUDE_RULES and CHECKPOINT_IGNORE_RULES restore only some layers of {name}:"
        " set USE_REPEATED_LAYER=False."
      )
    return True in taken

  def _may_stay_unread(self, name: str) -> bool:
    part, _, weight = name.partition(".")
    return (
      part != "params"
      or not self.matches(weight)
      or weight.startswith(layout_conversion.OF_TRAINING)
    )

  def matches(self, name: str) -> bool:
    """Returns whether the patterns select a weight for restoring."""

    def any_of(given: tuple[str, ...]) -> bool:
      return any(re.search(pattern, name) for pattern in given)

    return any_of(self.include) and not any_of(self.ignore)


class Derived(NamedTuple):
  """A weight that is computed from other arrays of a training state.

  Attributes:
    inputs: Their shapes and dtypes, by their names in a checkpoint.
    value: Returns the weight; takes the arrays in the order of `inputs`.
  """

  inputs: Mapping[str, jax.ShapeDtypeStruct]
  value: Callable[[Mapping[str, Any]], Any]


class Loaded(NamedTuple):
  """Restored weights.

  Attributes:
    params: Name -> weight.
    provenance: JSON, see `Restore.provenance`.
    lost: The quantization error, see `read_params`.
  """

  params: Params
  provenance: str
  lost: float | None


def began_with(
  folder: epath.Path, *, given: Restore | None, flag: str = "--fdl.CHECKPOINT_RESTORE_PATH"
) -> Restore | None:
  """Returns the source of the initial weights of the run in `folder`; None if all were initialized.

  Args:
    folder: The run's folder.
    given: Where the source may be now. `--base` overrides the recorded path; the knob is used only
      if the recorded path no longer has the checkpoint.
    flag: The flag that set `given`, for errors.

  Raises:
    UserError: The source is missing, is another checkpoint, or its record is missing or damaged.
  """
  file = folder / PROVENANCE
  if not file.exists() and given is not None:
    raise UserError(
      f"{folder} has no {PROVENANCE}, the record of its initial weights. If they were from"
      f" {given.path}, put the file back; if not, omit {flag}."
    )
  if not file.exists():
    return None
  try:
    record = json.loads(file_io.read_bytes(file))
    restore = Restore(
      path=record["path"],
      step=record["step"],
      include=tuple(record["include"]),
      ignore=tuple(record["ignore"]),
    )
    if not isinstance(restore.path, str) or type(restore.step) is not int:
      raise ValueError("it names no checkpoint")
    for pattern in (*restore.include, *restore.ignore):
      re.compile(pattern)
  except (OSError, re.error, *file_io.MALFORMED) as error:
    raise UserError(
      f"{file}, the record of the run's initial weights, is damaged: {error!r}."
    ) from error
  places = [restore]
  if given is not None:
    moved = dataclasses.replace(restore, path=given.path)
    places = [moved] if flag == "--base" else [restore, moved]
  for place in places:
    if restore.step in place.saved.steps():
      if record.get("identity") not in (None, place.saved.at(restore.step).identity()):
        raise UserError(
          f"checkpoint {restore.step} of {place.path} is not the one that the run in {folder}"
          f" started from: set {flag} to its path."
        )
      return place
  if len(places) == 1 and given is not None:
    raise UserError(
      f"{flag}={given.path} has no checkpoint {restore.step}, from which the run in {folder}"
      f" started (recorded path: {restore.path})."
    )
  raise UserError(
    f"checkpoint {restore.step} of {restore.path}, from which the run in {folder} started, is"
    f" missing: set {flag} to its path."
  )


def read_found(
  saved: Checkpoints, step: int | None, read: Callable[[int], _Read]
) -> tuple[int, _Read]:
  """Returns a step and `read(step)`, the same step in all processes.

  If `step` is None, the newest checkpoint is read; if its run removes that while it is being read,
  the one that is then the newest is read instead.

  Raises:
    UserError: There is no such checkpoint, it is damaged, or it was removed while being read.
  """
  while True:
    (found,) = broadcast(lambda: [saved.find(step)])
    error, result = None, []
    try:
      result = [read(found)]
    except Damaged as raised:
      error = raised
    if all_processes(error is None):
      return found, result[0]
    if found in broadcast(saved.steps):
      raise error or Damaged(f"{saved.path(found)}: another process cannot read its shards.")
    if step is not None:
      raise UserError(f"{saved.path(found)} was removed while it was being read.")


def read_params(
  saved: Checkpoints,
  step: int,
  definition: Definition,
  mesh: jax.sharding.Mesh,
  *,
  names: list[str] | None = None,
  for_compute: bool = False,
  unread: layout_conversion.Unread,
  derived: Mapping[str, Derived] | None = None,
) -> tuple[Params, float | None]:
  """Returns weights of a checkpoint, converted from its mesh, layout and float dtypes.

  The second value is the quantization error of weight-only quantized weights, the root mean square
  relative to that of the weights; None if none is quantized.

  Args:
    saved: The checkpoints.
    step: The checkpoint's step.
    definition: Defines the weights.
    mesh: The mesh to restore onto.
    names: Which weights; None: all.
    for_compute: Whether to return compute dtypes; else those of a training state.
    unread: Which arrays of the checkpoint may stay unread.
    derived: Weights that are computed from other arrays, which are read instead of them.

  Raises:
    UserError: A weight is missing, damaged or has another shape, or one stays unread that may not.
  """
  specs = {
    name: definition.weights[name] for name in (definition.weights if names is None else names)
  }
  layout = layout_of(definition.module)
  derived = derived or {}

  def stored(name: str) -> tuple[str, jax.ShapeDtypeStruct]:
    spec = specs[name]
    where = mesh_lib.sharding(mesh, spec.dims, spec.shape)
    for_layers = for_compute and not spec.is_quantized
    dtype = spec.compute_dtype if for_layers else spec.stored_dtype
    part = "extra" if spec.statistic else "params"
    return f"{part}.{name}", jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where)

  def wanted(names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    arrays = {}
    for name in names:
      arrays |= derived[name].inputs if name in derived else [stored(name)]
    return arrays

  checkpoint = saved.at(step)
  checkpoint.check(dict(map(stored, specs)) | wanted(derived), layout=layout, unread=unread)

  def read(names: Sequence[str]) -> Params:
    flat = checkpoint.restore(wanted(names), layout=layout, unread=layout_conversion.anything).state
    params = {}
    for name in names:
      key, leaf = stored(name)
      params[name] = _computed(derived[name], flat, leaf) if name in derived else flat[key]
    return params

  stored_as = checkpoint.layout()

  def array_of(name: str) -> str:
    location = layout.locate(name)
    return stored_as.place(location.template, location.layers[0])[0] if location else name

  params = read([name for name, spec in specs.items() if not spec.is_quantized])
  squares = []
  quantized = sorted((name for name, spec in specs.items() if spec.is_quantized), key=array_of)
  # One stored array at a time: memory may not suffice for all unquantized weights.
  for _, group in itertools.groupby(quantized, key=array_of):
    for name, weight in read(list(group)).items():
      params[name] = specs[name].stored(weight)
      squares.append(weight_only.squares(weight, params[name]))
  lost, total = np.sum(jax.device_get(squares), axis=0) if squares else (0.0, 0.0)
  return params, math.sqrt(lost / total) if squares else None


def _computed(
  one: Derived, arrays: Mapping[str, jax.Array], leaf: jax.ShapeDtypeStruct
) -> jax.Array:
  value = one.value({name: arrays[name] for name in one.inputs})
  return jax.device_put(value.astype(leaf.dtype), leaf.sharding)
