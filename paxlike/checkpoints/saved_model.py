# SPDX-License-Identifier: Apache-2.0
"""Trained models in other folders that a run uses beside its own, and how weights are read."""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
from etils import epath
from flax import nnx

from paxlike import file_io
from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import Derived, read_found, read_params
from paxlike.config import building, graph_file, ranges
from paxlike.errors import UserError
from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.auto import auto
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.decoder import Decoder
from paxlike.layers.module import Definition, Params
from paxlike.layers.moe.dispatch import dropless
from paxlike.layers.moe.moe import Moe


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModel:
  """A model of another folder. Building it reads nothing.

  Attributes:
    path: The folder of a run, or of a model that paxlike-convert made.
    step: The checkpoint's step; None: the newest.
    knob: The knob that `path` is of.
    what: What the model is to the run.
    places: What `path` is the folder of.
    file: The record, in the run's folder, of the checkpoint that the run uses.
  """

  path: ranges.Path
  step: ranges.NonNegative | None = None
  knob: ClassVar[str]
  what: ClassVar[str]
  places: ClassVar[str] = "a run, or of a model that paxlike-convert made"
  file: ClassVar[str]

  @functools.cached_property
  def model(self) -> Any:
    """The decoder that config.json of the folder defines, with abstract weights.

    Pipeline stages and layers for multi-token prediction are left out, experts drop no tokens, and
    attention kernels depend on the devices.

    Raises:
      UserError: The file cannot be read, or is of no decoder.
    """
    file = self.folder / "config.json"
    if not file.exists():
      raise UserError(
        f"{self.knob}={self.path} has no config.json: give the folder of {self.places}."
      )
    with self.naming():
      graph = graph_file.read_parts(file)["model"]
      if getattr(graph, "mtp", None) is not None:
        graph.mtp = None
      if getattr(getattr(graph, "stack", None), "pipeline", None) is not None:
        graph.stack.pipeline = None
      model = building.build(graph, source="its model")
      if not isinstance(model, Decoder):
        raise UserError(f"it is a {type(model).__name__}, not a decoder.")
      for _, module in nnx.iter_modules(model):
        part: Any = module
        if isinstance(module, Moe):
          part.dispatch = dropless
        if isinstance(module, Attention | LatentAttention):
          part.kernel = auto
      return model

  @property
  def folder(self) -> epath.Path:
    """The folder of the model."""
    return file_io.absolute(self.path)

  @property
  def saved(self) -> Checkpoints:
    """Its checkpoints."""
    return Checkpoints(self.folder / "checkpoints", keep=None)

  @contextlib.contextmanager
  def naming(self) -> Iterator[None]:
    """Context whose errors name the knob."""
    try:
      yield
    except UserError as error:
      raise UserError(f"{self.knob}={self.path}: {error}") from error

  def step_of(self, run: epath.Path | None) -> int | None:
    """Returns the step that the run in `run` has used so far, if it recorded one; else `step`.

    Raises:
      UserError: It is not a checkpoint of this folder, or the record is damaged.
    """
    before = None if run is None else self._recorded(run / self.file)
    if before is None:
      return self.step
    step = before["step"]
    if self.step not in (None, step) or not _is_at(self.saved, step, before.get("identity")):
      raise UserError(
        f"it is not the {self.what} of the steps so far, checkpoint {step} of {before['path']}."
        f" To go on with another one, remove {self.file} of the run's folder."
      )
    return step

  def record(self, step: int) -> str:
    """Returns the record of a checkpoint: JSON of its folder, step and checksum."""
    identity = self.saved.at(step).identity()
    record = {"path": os.fspath(self.folder), "step": step, "identity": identity}
    return json.dumps(record, indent=2) + "\n"

  def _recorded(self, file: epath.Path) -> dict[str, Any] | None:
    """Returns the record in a file; None if it is missing.

    Raises:
      UserError: It is damaged.
    """
    if not file.exists():
      return None
    try:
      record = json.loads(file_io.read_bytes(file))
      if type(record["step"]) is not int or "path" not in record:
        raise ValueError("it names no checkpoint")
      return record
    except (OSError, *file_io.MALFORMED) as error:
      raise UserError(
        f"{file}, the record of the run's {self.what}, is damaged: {error!r}."
      ) from error


def _is_at(saved: Checkpoints, step: int, identity: str | None) -> bool:
  """Whether there is a checkpoint of this step and checksum."""
  if step not in saved.steps():
    return False
  return identity in (None, saved.at(step).identity())


def read_for_compute(
  saved: Checkpoints,
  step: int | None,
  definition: Definition,
  mesh: jax.sharding.Mesh,
  *,
  names: list[str] | None = None,
  derived: Mapping[str, Derived] | None = None,
) -> tuple[int, Params]:
  """Returns (step, weights of its checkpoint for evaluation, in their compute dtypes).

  Args:
    saved: The checkpoints.
    step: The checkpoint's step; None: the newest.
    definition: Defines the weights.
    mesh: The mesh to restore onto.
    names: Which weights; None: all.
    derived: Weights that are computed from other arrays of a training state, if there is one.

  Raises:
    UserError: There is no such checkpoint, it is damaged, or of another model.
  """

  def read(step: int) -> Params:
    return read_params(
      saved,
      step,
      definition,
      mesh,
      names=names,
      for_compute=True,
      unread=layout_conversion.all_but_weights,
      derived=derived if derived and saved.at(step).has_training_state() else None,
    )[0]

  return read_found(saved, step, read)
