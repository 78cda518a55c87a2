# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of paxlike to a folder as Hugging Face has them."""

import json
import pathlib
from typing import Any

import fiddle as fdl
import numpy as np

from paxlike import fiddlers, registry, run_folder
from paxlike.checkpoint import Checkpoints
from paxlike.convert import matching, tensors
from paxlike.convert.importing import copy_tokenizer
from paxlike.convert.matching import Match
from paxlike.convert.tensors import TensorSpec
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.hugging_face import Family
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of


class Run:
  """A checkpoint of a run (or of an import), to be written for Hugging Face."""

  def __init__(self, path: pathlib.Path, *, step: int | None):
    """Reads what the run was.

    Raises:
      UserError: There is no such checkpoint, or Hugging Face has no such model.
    """
    self._path = path
    self._experiment = experiment = registry.load(path / "experiment.json")
    model = experiment.model()
    fiddlers.stack(model, scan=False)
    definition = Definition(fdl.build(model))
    self.matches = matching.match(definition, family_of(experiment))
    self._unrolled = layout_of(definition.module)
    self._saved = Checkpoints(path / "checkpoints", keep=None)
    self._step = self._saved.find(step)
    self._layout = self._saved.layout(self._step)
    self._held = ("", np.zeros(0))  # The array read last.

  def table(self) -> str:
    """Returns a line for each weight: its name and shape, and where it goes."""
    return matching.table(self.matches, "->")

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must not hold anything yet."""
    specs: dict[str, TensorSpec] = {}
    owners: dict[str, list[tuple[Match, int]]] = {}
    # What is stored in one array follows each other.
    for match in sorted(self.matches, key=lambda match: self._place(match)[0]):
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
      config = config_of(self._experiment, dtype=dtype)
      (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
      copy_tokenizer(self._path, folder)

  def _place(self, match: Match) -> tuple[str, int | None]:
    """Returns the array of the checkpoint that holds a weight, and the weight's index in it."""
    location = self._unrolled.locate(match.ours)
    if location is None:
      return match.ours, None
    return self._layout.place(location.template, location.layers[0])

  def _weight(self, match: Match) -> np.ndarray:
    name, index = self._place(match)
    if name != self._held[0]:
      self._held = ("", np.zeros(0))
      self._held = (name, self._saved.read(self._step, f"params.{name}"))
    value = self._held[1]
    value = value if index is None else value[index]
    if value.shape != match.shape:
      raise UserError(
        f"{match.ours} is {list(value.shape)} in the checkpoint, and {list(match.shape)} by"
        f" {self._path / 'experiment.json'}."
      )
    return value


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
