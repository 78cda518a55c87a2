# SPDX-License-Identifier: Apache-2.0
"""Exports checkpoints of paxlike in the format of Hugging Face."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fiddle as fdl
import numpy as np
from etils import epath

from paxlike import fiddlers, file_io, layers, registry, saved_experiment, untrusted_files
from paxlike.checkpoints.hf_family import Family
from paxlike.checkpoints.warm_start import PROVENANCE, Derived, Restore, began_with
from paxlike.config import building, graph_file
from paxlike.convert import matching, model_graph, new_folder, safetensors_files, tokenizer_files
from paxlike.convert.exported_form import Form, Plain
from paxlike.convert.matching import Match
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.convert.stored import Adapter, Merged, Stored, Weights, adapter_of
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.layers import flops
from paxlike.layers.module import Definition
from paxlike.layers.reward_model import RewardModel
from paxlike.layers.stack import layout_of
from paxlike.training import evaluated_weights


class ExportedRun:
  """A checkpoint of a run or of an imported model, which `convert` writes for Hugging Face.

  Attributes:
    path: The run's folder.
    experiment: The run's experiment.
    matches: A match for every weight, without those of adapters.
    lacks_mtp: Whether layers for multi-token prediction are left out, which Hugging Face lacks.
    has_values: Whether the run's model has a value head, which is left out.
    adapted: The matches of weights that have an adapter.
    adapter_of: Name of an adapted weight -> its adapter.
    adapters: The run's own checkpoint, which holds the adapters.
    lora_scale: The scale of an adapter's output.
    base: The folder of the adapters' base model: the given one, else the one that the run names.
    base_weights: Its weights; None if they were not opened.
  """

  def __init__(
    self,
    path: pathlib.Path,
    *,
    step: int | None,
    base: pathlib.Path | None = None,
    merges: bool = True,
    allow_modules: Sequence[str] = (),
    form: Form | None = None,
  ):
    """Reads and checks the run's experiment, graph and checkpoint metadata; reads no weights.

    Args:
      path: The run's folder.
      step: The checkpoint's step; None: the newest.
      base: The present folder of the adapters' base model, if it was moved.
      merges: Whether to merge adapters into the base. If not, the base may be missing, unless the
        adapters have magnitudes (LORA_DORA).
      allow_modules: Modules outside paxlike that the run's files may use.
      form: The format of the files; None: safetensors of the plain weights.

    Raises:
      UserError: There is no such checkpoint, Hugging Face has no such model, the run's graph is not
        the one that its knobs make, `form` cannot hold the model, or `base` is given for a run
        without adapters.
    """
    self.path = path
    self.experiment = experiment = registry.load(
      path / "experiment.json", allow_modules=allow_modules
    )
    self.has_values = getattr(experiment.model(), "value_head", None) is not None
    family = family_of(experiment)
    model, self.lacks_mtp = _exported(experiment, family)
    fiddlers.stack(model, scan=False)
    definition = Definition(building.build(model))
    if isinstance(definition.module, RewardModel):
      raise UserError(f"{path} has a reward model, for which there is no export to Hugging Face.")
    unrolled = layout_of(definition.module)
    self.matches = matching.match(definition, family.rules_of, program=family.title)
    self._copies = _copies(definition, family)
    self.adapters = Stored(path / "checkpoints", step, unrolled)
    experiment.adapt(model)
    _check_config(experiment)
    _check_edits(path, model)
    definition = Definition(building.build(model))
    self.adapters.derive(_derived(path, experiment, definition.module, allow_modules))
    self.adapter_of = adapters(self.matches, definition)
    self.adapted = [match for match in self.matches if match.ours in self.adapter_of]
    self.lora_scale = experiment.lora_scale()
    self.base = experiment.CHECKPOINT_RESTORE_PATH
    if base is not None:
      self.base = os.fspath(file_io.absolute(base))
    self.base_weights: Stored | None = None
    self._weights: Weights = self.adapters
    shapes = {match.ours: match.shape for match in self.matches}
    if self.adapted:
      needs_base = any(adapter.magnitude for adapter in self.adapter_of.values())
      if merges or needs_base or base is not None:
        restore = self._restore(base)
        stored = Stored(pathlib.Path(restore.folder), restore.step, unrolled)
        stored.check(shapes)
        self.base_weights = stored
        self._weights = Merged(stored, self.adapters, self.adapter_of, scale=self.lora_scale)
      else:
        self._check_restored(self._recorded_base())
      names = [name for adapter in self.adapter_of.values() for name in adapter.names]
      shapes = {name: definition.weights[name].shape for name in names}
    elif base is not None:
      raise UserError(f"{path} has no adapters, and so needs no base: leave --base out.")
    self.adapters.check(shapes)
    self._form = Plain() if form is None else form
    config = config_of(experiment, dtype="float32", without_mtp=self.lacks_mtp)
    self._form.check(self._tensors("float32").specs, config)

  def _restore(self, base: pathlib.Path | None) -> Restore:
    """Returns the source of the base weights; `base` overrides the recorded folder."""
    given = None if base is None else Restore(path=str(base))
    restore = began_with(epath.Path(self.path), given=given, flag="--base")
    self._check_restored(restore)
    assert restore is not None
    return restore

  def _recorded_base(self) -> Restore | None:
    """Returns the recorded source of the base weights; None if they were initialized randomly."""
    file = self.path / PROVENANCE
    if not untrusted_files.is_there(file):
      return None
    recorded = untrusted_files.read_json(file)
    try:
      restore = Restore(
        path=recorded["path"],
        include=tuple(recorded["include"]),
        ignore=tuple(recorded["ignore"]),
      )
      restore.matches(self.matches[0].ours)
    except (KeyError, TypeError, re.error) as error:
      raise UserError(
        f"{file}, which names the source of the run's initial weights, is damaged: {error!r}."
      ) from None
    return restore

  def _check_restored(self, restore: Restore | None):
    """Raises a UserError unless all base weights were restored from a checkpoint."""
    random = [m.ours for m in self.matches if restore is None or not restore.matches(m.ours)]
    if random:
      raise UserError(
        f"{self.path} has adapters of randomly initialized weights ({random[0]}), which are in no"
        " checkpoint, so there is no base model."
      )

  @functools.cached_property
  def tokenizer(self) -> tuple[pathlib.Path, str] | None:
    """`tokenizer_files.file_of`, read late: an exported adapter may have no tokenizer."""
    return tokenizer_files.file_of(self.experiment)

  def table(self) -> str:
    """Returns a line for each weight: its name, its shape and its tensors."""
    return matching.table(self.matches, "->")

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must be missing or empty."""
    tokenizer, tensors = self.tokenizer, self._tensors(dtype)
    with new_folder.filling(to, flag="to") as folder:
      config = config_of(self.experiment, dtype=dtype, without_mtp=self.lacks_mtp)
      config |= tokenizer_files.export_tokenizer(self.experiment, tokenizer, self.path, folder)
      self._form.write(folder, tensors, config)

  def _tensors(self, dtype: str) -> "_ExportedTensors":
    """Returns Hugging Face's tensors, with the weights of one array beside each other."""
    matches = [*self.matches, *self._copies]
    matches.sort(key=lambda match: self._weights.array_of(match.ours))  # Each array is read once.
    return _ExportedTensors(matches, self._weight, np.dtype(dtype))

  def _weight(self, match: Match) -> np.ndarray:
    value = self._weights.read(match.ours)
    if value.shape != match.shape:
      raise UserError(
        f"{match.ours} is {list(value.shape)} in the checkpoint, but {list(match.shape)} by"
        f" {self.path / 'experiment.json'}."
      )
    return value.astype(self.experiment.FPROP_DTYPE) if self._form.reads_compute_dtype else value


class _ExportedTensors:
  """The tensors of a model of Hugging Face, made of a run's weights on demand.

  Attributes:
    specs: Name -> shape, and the dtype in which a tensor is to be written.
  """

  def __init__(
    self, matches: Sequence[Match], weight: Callable[[Match], np.ndarray], dtype: np.dtype
  ):
    self.specs: dict[str, TensorSpec] = {}
    self._owners: dict[str, list[tuple[Match, int]]] = {}
    self._weight = weight
    for match in matches:
      shapes = match.rule.their_shapes(match.shape)
      for index, (name, shape) in enumerate(zip(match.theirs, shapes, strict=True)):
        self.specs[name] = TensorSpec(shape, dtype)
        self._owners.setdefault(name, []).append((match, index))

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, in the dtype of `specs` or that of the stored weight."""
    owners, (shape, dtype) = self._owners[name], self.specs[name]
    if len(owners) == 1:
      ((match, index),) = owners
      return match.rule.save(self._weight(match))[index]
    tensor = np.empty(shape, dtype)
    for match, index in owners:
      part = match.rule.save(self._weight(match))[index]
      tensor[match.rule.part(match.shape)] = safetensors_files.cast(name, part, dtype)
    return tensor


def _exported(experiment: Experiment, family: Family) -> tuple[Any, bool]:
  """Returns the graph of an experiment's model, and whether its layers for MTP were removed.

  They are, unless the family has a place for such layers. A value head is always removed.
  """
  model: Any = experiment.model()
  if getattr(model, "value_head", None) is not None:
    model.value_head = None
  experiment.adjust(model)
  mtp = getattr(model, "mtp", None)
  if mtp is None or (family.mtp and fdl.get_callable(mtp) is layers.SequentialMtp):
    return model, False
  fiddlers.next_token_only(model)
  return model, True


def _copies(definition: Definition, family: Family) -> list[Match]:
  """Returns a match for every copy of a weight in a layer for multi-token prediction."""
  first, found = layout_of(definition.module).num_layers, []
  for layer in range(first, first + flops.num_further(definition)):
    for ours, rule in family.mtp_copies.items():
      if (spec := definition.weights.get(ours)) is not None:
        found.append(Match(ours, spec.shape, rule, rule.names(layer, spec.shape)))
  return found


def adapters(matches: Sequence[Match], definition: Definition) -> dict[str, Adapter]:
  """Returns the adapters of the weights of `matches`, by the names of these."""
  found = {match.ours: adapter_of(match.ours, definition.weights) for match in matches}
  return {name: adapter for name, adapter in found.items() if adapter is not None}


def family_of(experiment: Experiment) -> Family:
  """Returns the Hugging Face family of an experiment.

  Raises:
    UserError: There is none.
  """
  family = type(experiment).hugging_face()
  if family is None:
    raise UserError(f"Hugging Face has no counterpart of {type(experiment).__name__}.")
  return family


def _derived(
  run: pathlib.Path, experiment: Experiment, module: Any, allow_modules: Sequence[str]
) -> Mapping[str, Derived]:
  """Returns how a run's optimizer computes the weights that it evaluates."""
  saved = saved_experiment.graph(run).arguments
  graph = experiment.optimizer()
  if graph_file.difference(graph, saved["optimizer"]):  # The run's optimizer was edited.
    graph = graph_file.read(run / "config.json", allow_modules=allow_modules).optimizer
  definition = Definition(
    module, trained=saved.get("trained", ""), dtype=saved.get("weight_dtype", "float32")
  )
  return evaluated_weights.derived(definition, building.build(graph))


def _check_edits(run: pathlib.Path, model: Any):
  """Raises a UserError if a run's graph has another model than `model`, which its knobs make."""
  saved = saved_experiment.graph(run).arguments["model"]
  if getattr(model, "mtp", None) is None:
    others = {name: value for name, value in saved.arguments.items() if name != "mtp"}
    saved = dataclasses.replace(saved, arguments=others)
  if line := model_graph.difference(model, saved):
    raise UserError(
      f"{run / 'config.json'} has {line} as set by the knobs of {saved_experiment.FILE}: a model"
      " whose graph was edited cannot be converted; set knobs instead."
    )


def _check_config(experiment: Experiment):
  """Raises a UserError if Hugging Face's `config.json` cannot describe an experiment's model."""
  family = family_of(experiment)
  base = next(cls for cls in type(experiment).__mro__ if "hugging_face" in vars(cls))
  model, lacks_mtp = _exported(experiment, family)

  def first_difference(**more: Any) -> str | None:
    return model_graph.difference(_exported(base(**knobs, **more), family)[0], model)

  try:
    knobs = family.read(config_of(experiment, dtype="float32", without_mtp=lacks_mtp))
    line = first_difference()
  except UserError as error:
    raise UserError(f"{family.architecture} of Hugging Face has no such model: {error}") from None
  if line is None:
    return
  shown = line
  for name, knob in base.knobs().items():
    value = experiment.values()[name].value
    if name in knobs or value == knob.default:
      continue
    try:
      is_cause = first_difference(**{name: value}) != line
    except UserError:
      continue  # Invalid without another knob, which is tried too.
    if is_cause:
      shown = f"{name}={value} ({line})"
      break
  raise UserError(f"{family.architecture} of Hugging Face has no place for {shown}.")


def config_of(experiment: Experiment, *, dtype: str, without_mtp: bool = False) -> dict[str, Any]:
  """Returns the `config.json` of Hugging Face for an experiment's model, its weights in `dtype`.

  `without_mtp` omits layers for multi-token prediction.
  """
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
  if without_mtp:
    complete["MTP_NUM_LAYERS"] = 0
  return family_of(experiment).write(complete, dtype=dtype)
