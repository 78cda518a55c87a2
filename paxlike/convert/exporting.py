# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of paxlike to a folder as Hugging Face has them."""

import functools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from paxlike import fiddlers, input_files, registry, run_folder, saved_experiment
from paxlike.checkpoints.hf_family import Family
from paxlike.checkpoints.warm_start import PROVENANCE, Restore, began_with
from paxlike.config import building
from paxlike.convert import matching, model_graph, tensors, tokens
from paxlike.convert.matching import Match
from paxlike.convert.stored import Merged, Stored, Weights, adapter_of
from paxlike.convert.tensors import TensorSpec
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of


class Run:
  """A checkpoint of a run (or of an import), to be written for Hugging Face.

  Attributes:
    path: The run's folder.
    experiment: What it was.
    matches: A match for every weight, adapters merged into theirs.
    adapted: Those among them that have an adapter.
    adapters: The run's own checkpoint, in which the adapters are.
    lora_scale: Of what adapters add.
    base: What the adapters are for: the folder that is given, or the one that the run names.
  """

  def __init__(
    self,
    path: pathlib.Path,
    *,
    step: int | None,
    base: pathlib.Path | None = None,
    merges: bool = True,
    allow_modules: Sequence[str] = (),
  ):
    """Reads what the run was; its experiment is paxlike's, or of an allowed module.

    Args:
      path: The run's folder.
      step: Of the checkpoint; None: the newest.
      base: Where what its adapters are for is now, if it is no longer where it was.
      merges: Whether adapters are merged into the base. If not, the base may be gone.
      allow_modules: Modules outside of paxlike that its files may use.

    Raises:
      UserError: There is no such checkpoint, Hugging Face has no such model, the run was another
        one than its knobs say, or a base is given that it does not need.
    """
    self.path = path
    self.experiment = experiment = registry.load(
      path / "experiment.json", allow_modules=allow_modules
    )
    model = experiment.model()
    fiddlers.stack(model, scan=False)
    definition = Definition(building.build(model))
    unrolled = layout_of(definition.module)
    self.matches = matching.match(definition, family_of(experiment))
    self.adapters = Stored(path / "checkpoints", step, unrolled)
    experiment.adapt(model)
    _check_config(experiment)
    _check_edits(path, model)
    definition = Definition(building.build(model))
    self.adapted = adapted(self.matches, definition)
    alpha = experiment.LORA_ALPHA
    self.lora_scale = 1.0 if alpha is None else alpha / experiment.LORA_RANK
    self.base = experiment.CHECKPOINT_RESTORE_PATH
    if base is not None:
      self.base = os.fspath(run_folder.absolute(base))
    self._weights: Weights = self.adapters
    shapes = {match.ours: match.shape for match in self.matches}
    if self.adapted:
      if merges or base is not None:
        restore = self._restore(base)
        scales = {match.ours: self.lora_scale for match in self.adapted}
        stored = Stored(pathlib.Path(restore.folder), restore.step, unrolled)
        stored.check(shapes)
        self._weights = Merged(stored, self.adapters, scales=scales)
      else:
        self._check_drawn(self._recorded())
      names = [name for match in self.adapted for name in adapter_of(match.ours)]
      shapes = {name: definition.weights[name].shape for name in names}
    elif base is not None:
      raise UserError(f"{path} has no adapters, and so needs no base: leave --base out.")
    self.adapters.check(shapes)

  def _restore(self, base: pathlib.Path | None) -> Restore:
    """Returns where the base of the adapters is; `base` is where the user says that it is."""
    given = None if base is None else Restore(path=str(base))
    restore = began_with(epath.Path(self.path), given=given, flag="--base")
    self._check_drawn(restore)
    assert restore is not None
    return restore

  def _recorded(self) -> Restore | None:
    """Returns where the base of the adapters was; None if its weights were drawn."""
    file = self.path / PROVENANCE
    if not input_files.is_there(file):
      return None
    told = input_files.read_json(file)
    try:
      restore = Restore(
        path=told["path"], include=tuple(told["include"]), ignore=tuple(told["ignore"])
      )
      restore.matches(self.matches[0].ours)
    except (KeyError, TypeError, re.error) as error:
      raise UserError(
        f"{file}, which tells what the run began with, is damaged: {error!r}."
      ) from None
    return restore

  def _check_drawn(self, restore: Restore | None):
    """Raises a UserError unless all that the adapters are for was restored."""
    drawn = [m.ours for m in self.matches if restore is None or not restore.matches(m.ours)]
    if drawn:
      raise UserError(
        f"{self.path} has adapters of weights that were drawn ({drawn[0]}): they are in no"
        " checkpoint, so that there is no base."
      )

  @functools.cached_property
  def tokenizer(self) -> tuple[pathlib.Path, str] | None:
    """As of `tokens.file_of`, which refuses one that is gone; adapters go without."""
    return tokens.file_of(self.experiment)

  def table(self) -> str:
    """Returns a line for each weight: its name and shape, and where it goes."""
    return matching.table(self.matches, "->")

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must not hold anything yet."""
    specs: dict[str, TensorSpec] = {}
    owners: dict[str, list[tuple[Match, int]]] = {}
    # What is stored in one array follows each other.
    for match in sorted(self.matches, key=lambda match: self._weights.array_of(match.ours)):
      shapes = match.rule.their_shapes(match.shape)
      for index, (name, shape) in enumerate(zip(match.theirs, shapes, strict=True)):
        specs[name] = TensorSpec(shape, np.dtype(dtype))
        owners.setdefault(name, []).append((match, index))

    def value(name: str) -> np.ndarray:
      if len(owners[name]) == 1:
        ((match, index),) = owners[name]
        return match.rule.save(self._weight(match))[index]
      tensor = np.empty(specs[name].shape, dtype)
      for match, index in owners[name]:
        part = match.rule.save(self._weight(match))[index]
        tensor[match.rule.part(match.shape)] = tensors.cast(name, part, specs[name].dtype)
      return tensor

    tokenizer = self.tokenizer
    with run_folder.built(to, flag="to") as folder:
      tensors.write(folder, specs, value)
      config = config_of(self.experiment, dtype=dtype)
      config |= tokens.take(self.experiment, tokenizer, self.path, folder)
      (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

  def _weight(self, match: Match) -> np.ndarray:
    value = self._weights.read(match.ours)
    if value.shape != match.shape:
      raise UserError(
        f"{match.ours} is {list(value.shape)} in the checkpoint, and {list(match.shape)} by"
        f" {self.path / 'experiment.json'}."
      )
    return value


def adapted(matches: Sequence[Match], definition: Definition) -> list[Match]:
  """Returns the matches of weights for which a model has an adapter."""
  return [match for match in matches if adapter_of(match.ours)[0] in definition.weights]


def family_of(experiment: Experiment) -> Family:
  """Returns what Hugging Face calls the family of an experiment.

  Raises:
    UserError: It has no such family.
  """
  family = type(experiment).hugging_face()
  if family is None:
    raise UserError(f"Hugging Face has no counterpart of {type(experiment).__name__}.")
  return family


def _check_edits(run: pathlib.Path, model: Any):
  """Raises a UserError if a run had another model than `model`, which its knobs make."""
  if line := model_graph.difference(model, saved_experiment.graph(run).arguments["model"]):
    raise UserError(
      f"{run / 'config.json'} has {line}, as the knobs of {saved_experiment.FILE} make it: a model"
      " with edits of its graph cannot be converted; set knobs instead."
    )


def _check_config(experiment: Experiment):
  """Raises a UserError if the `config.json` written for a model is that of another one."""
  family = family_of(experiment)
  base = next(cls for cls in type(experiment).__mro__ if "hugging_face" in vars(cls))
  model = experiment.model()

  def first_difference(**more: Any) -> str | None:
    return model_graph.difference(base(**knobs, **more).model(), model)

  try:
    knobs = family.read(config_of(experiment, dtype="float32"))
    line = first_difference()
  except UserError as error:
    raise UserError(f"{family.architecture} of Hugging Face has no such model: {error}") from None
  if line is None:
    return
  said = line
  for name, knob in base.knobs().items():
    value = experiment.values()[name].value
    if name in knobs or value == knob.default:
      continue
    try:
      is_cause = first_difference(**{name: value}) != line
    except UserError:
      continue  # It needs another knob, which is tried too.
    if is_cause:
      said = f"{name}={value} ({line})"
      break
  raise UserError(f"{family.architecture} of Hugging Face has no place for {said}.")


def config_of(experiment: Experiment, *, dtype: str) -> dict[str, Any]:
  """Returns the `config.json` of Hugging Face for an experiment's model, its weights in `dtype`."""
  values = {name: setting.value for name, setting in experiment.values().items()}
  head_dim = values["DIMS_PER_HEAD"] or values["MODEL_DIMS"] // values["NUM_HEADS"]
  derived = {
    "NUM_KV_HEADS": values["NUM_HEADS"],
    "DIMS_PER_HEAD": head_dim,
    "HIDDEN_DIMS": 4 * values["MODEL_DIMS"],
    "EXPERT_DIMS": values["HIDDEN_DIMS"] or 4 * values["MODEL_DIMS"],
    "QUERY_SCALE_DIMS": head_dim,
  }
  complete = {name: derived.get(name) if v is None else v for name, v in values.items()}
  return family_of(experiment).write(complete, dtype=dtype)
