# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of paxlike to a folder as Hugging Face has them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from paxlike import building, fiddlers, registry, run_folder
from paxlike.convert import matching, tensors, tokens
from paxlike.convert.matching import Match
from paxlike.convert.stored import Merged, Stored, Weights, adapter_of
from paxlike.convert.tensors import TensorSpec
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.hugging_face import Family
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of
from paxlike.restoring import Restore, began_with


class Run:
  """A checkpoint of a run (or of an import), to be written for Hugging Face.

  Attributes:
    path: The run's folder.
    experiment: What it was.
    matches: A match for every weight, adapters merged into theirs.
    adapted: Those among them that have an adapter.
    adapters: The run's own checkpoint, in which the adapters are.
    lora_scale: Of what adapters add.
  """

  def __init__(self, path: pathlib.Path, *, step: int | None, allow_modules: Sequence[str] = ()):
    """Reads what the run was; its experiment is paxlike's, or of an allowed module.

    Raises:
      UserError: There is no such checkpoint, or Hugging Face has no such model.
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
    self.adapted = adapted(self.matches, Definition(building.build(model)))
    alpha = experiment.LORA_ALPHA
    self.lora_scale = 1.0 if alpha is None else alpha / experiment.LORA_RANK
    self._weights: Weights = self.adapters
    if self.adapted:
      base = self._restore()
      scales = {match.ours: self.lora_scale for match in self.adapted}
      stored = Stored(pathlib.Path(base.folder), base.step, unrolled)
      self._weights = Merged(stored, self.adapters, scales=scales)

  def _restore(self) -> Restore:
    """Returns where the base of the adapters is."""
    restore = began_with(epath.Path(self.path), given=None)
    if restore is None:
      raise UserError(f"{self.path} has adapters of weights that were drawn: nothing to merge.")
    return restore

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
        tensor[match.rule.part(match.shape)] = match.rule.save(self._weight(match))[index]
      return tensor

    with run_folder.built(to, flag="to") as folder:
      tensors.write(folder, specs, value)
      config = config_of(self.experiment, dtype=dtype)
      config |= tokens.take(self.experiment, self.path, folder)
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


def config_of(experiment: Experiment, *, dtype: str) -> dict[str, Any]:
  """Returns the `config.json` of Hugging Face for an experiment's model, its weights in `dtype`."""
  values = {name: setting.value for name, setting in experiment.values().items()}
  derived = {
    "NUM_KV_HEADS": values["NUM_HEADS"],
    "DIMS_PER_HEAD": values["MODEL_DIMS"] // values["NUM_HEADS"],
    "HIDDEN_DIMS": 4 * values["MODEL_DIMS"],
    "EXPERT_DIMS": values["HIDDEN_DIMS"],
    "QUERY_SCALE_DIMS": values["DIMS_PER_HEAD"],
  }
  complete = {name: derived.get(name) if v is None else v for name, v in values.items()}
  return family_of(experiment).write(complete, dtype=dtype)
