# SPDX-License-Identifier: Apache-2.0
"""Imports checkpoints of MaxText and Pax as folders that paxlike evaluates and restores from."""

import importlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike import registry, run_folder
from paxlike.checkpoints.hf_rules import Rules
from paxlike.config import building
from paxlike.config.knob_text import spell
from paxlike.convert import (
  experiment_files,
  jax_program,
  matching,
  maxtext,
  maxtext_config,
  new_folder,
  pax,
  streaming,
  tokenizer_files,
)
from paxlike.convert.layered_arrays import LayeredArrays
from paxlike.convert.maxtext_config import MaxTextConfig
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.convert.tensorstore_arrays import TensorStoreArrays
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

# Dim of a weight -> the knob of its size.
_KNOBS = {
  "vocab": "VOCAB_SIZE",
  "model": "MODEL_DIMS",
  "ffn": "HIDDEN_DIMS",
  "heads": "NUM_HEADS",
  "kv_heads": "NUM_KV_HEADS",
  "head": "DIMS_PER_HEAD",
  "experts": "NUM_EXPERTS",
  "position": "MAX_SEQ_LEN",
}
# Primes, unlike any size, which show where a rule puts the dims of a weight.
_MARKS = (1_000_003, 1_000_033, 1_000_037, 1_000_039)
_LEFT_OUT = "the optimizer's state, the step and the place in the data are not converted"

# (model, template -> the weight's name in its first layer, arrays) -> rules.
_RulesOf = Callable[[Any, Mapping[str, str], Mapping[str, TensorSpec]], Rules]


class Requested(NamedTuple):
  """The experiment that a checkpoint is to become.

  Attributes:
    name: Its name (`--fdl_config`); None: that of the checkpoint's configuration.
    knobs: (KNOB, text) from the command line.
  """

  name: str | None
  knobs: Sequence[tuple[str, str]] = ()


class JaxCheckpoint:
  """A checkpoint of another JAX program, and the experiment that it becomes.

  Attributes:
    matches: A match for every weight.
  """

  def __init__(
    self, arrays: LayeredArrays, experiment: Experiment, rules: _RulesOf, *, program: str
  ):
    """Finds the array of every weight; reads no arrays.

    Raises:
      UserError: The arrays are not those of the experiment's model.
    """
    self._arrays, self._experiment = arrays, experiment
    self._tokenizer = _tokenizer(experiment)
    definition = Definition(self._model())
    _check_knobs(experiment)
    layout = layout_of(definition.module)
    first: dict[str, str] = {}
    for name in definition.weights:
      location = layout.locate(name)
      first.setdefault(name if location is None else location.template, name)
    found = rules(definition.module, first, arrays.specs)
    self.matches = matching.match(definition, lambda _: found, program=program)
    self._check_sizes(definition)
    try:
      matching.check(self.matches, arrays.specs, maxtext.is_ignored)
    except UserError as error:
      raise UserError(f"{arrays.path}: {error}") from None

  @classmethod
  def maxtext(
    cls, path: pathlib.Path, requested: Requested, *, step: int | None = None
  ) -> "JaxCheckpoint":
    """Opens a checkpoint of MaxText.

    Raises:
      UserError: There is none, or as `__init__`.
    """
    folder = jax_program.find(path, step, program="MaxText", item="items", pattern=r"(\d+)")
    # Of train states and parameters; the last of MaxText's own program for parameters alone.
    prefixes = "params.params.", "params.", ""
    arrays = TensorStoreArrays(folder, prefixes=prefixes, root="decoder.")
    config = maxtext_config.find(folder)
    experiment = _experiment(requested, config, program="maxtext")
    axis = _scan_axis(arrays, experiment) if config is None else config.axis
    values = experiment.values()
    scaled = "ROPE_SCALING" in values and values["ROPE_SCALING"].value == "llama3"
    pairs = (scaled and values["ROPE_FACTOR"].value is not None) if config is None else config.pairs
    return cls(
      LayeredArrays(arrays, lambda name: maxtext.layers(name, axis=axis)),
      experiment,
      lambda *given: maxtext.rules(*given, pairs=pairs),
      program="MaxText",
    )

  @classmethod
  def pax(
    cls, path: pathlib.Path, requested: Requested, *, step: int | None = None
  ) -> "JaxCheckpoint":
    """Opens a checkpoint of Pax.

    Raises:
      UserError: There is none, or as `__init__`.
    """
    pattern = r"checkpoint_(\d+)"
    folder = jax_program.find(path, step, program="Pax", item="state", pattern=pattern)
    arrays = TensorStoreArrays(
      folder, prefixes=("mdl_vars.params.",), root="lm.", shapes=pax.unpadded_shapes(folder)
    )
    experiment = _experiment(requested, None, program="pax")
    return cls(LayeredArrays(arrays, pax.layers), experiment, pax.rules, program="Pax")

  def table(self) -> str:
    """Returns a line for each weight: its name, its shape and its arrays."""
    return matching.table(self.matches, "<-")

  def notes(self) -> list[str]:
    """Returns notes about the converted model for the user, one line each."""
    compute = self._experiment.values()["FPROP_DTYPE"].value
    lines = [f"computes in {compute}: --fdl.FPROP_DTYPE changes that", _LEFT_OUT]
    if self._tokenizer is None:
      lines.append(f"{tokenizer_files.NONE}: --fdl.VOCAB_PATH=FILE gives it one")
    return lines

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must be missing or empty."""
    with new_folder.filling(to, flag="to") as folder:
      layout = layout_of(self._model())
      streaming.write(folder / "checkpoints", self._weights(), dtype=np.dtype(dtype), layout=layout)
      if self._tokenizer is not None:
        name = tokenizer_files.import_file(*self._tokenizer, folder)
        self._experiment.set("VOCAB_PATH", run_folder.OWN + name, source="conversion")
      experiment_files.write(folder, self._experiment.trainer(), self._experiment)

  def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
    # The layers of one array follow each other, because they are read together.
    for match in sorted(self.matches, key=lambda match: self._arrays.order(match.theirs[0])):
      tensors = [self._arrays.read(name) for name in match.theirs]
      yield f"params.{match.ours}", match.rule.load(tensors, match.shape)

  def _model(self) -> Any:
    return building.build(self._experiment.trainer().model)

  def _check_sizes(self, definition: Definition):
    """Raises a UserError that names the knobs of the sizes that differ."""
    differ: dict[str, tuple[int, int]] = {}
    found, wanted = self._arrays.num_layers, self._experiment.NUM_LAYERS
    if found != wanted:
      differ["NUM_LAYERS"] = found, wanted
    for match in self.matches:
      spec = definition.weights[match.ours]
      theirs = match.rule.their_shapes(_MARKS[: spec.ndim])[0]
      found = self._arrays.specs.get(match.theirs[0])
      if found is None or len(found.shape) != len(theirs):
        continue
      for dim, size, mark in zip(spec.dims, spec.shape, _MARKS, strict=False):
        if mark in theirs and (other := found.shape[theirs.index(mark)]) != size:
          differ.setdefault(self._knob(dim, match.ours), (other, size))
    if differ:
      self._raise_sizes(differ)

  def _knob(self, dim: str, weight: str) -> str:
    values = self._experiment.values()
    knob = "RELATIVE_BUCKETS" if weight.endswith("relative_bias.table") else _KNOBS[dim]
    knob = _KNOBS["heads"] if dim == "heads" else knob
    if dim == "ffn" and ".experts." in weight and values["EXPERT_DIMS"].value is not None:
      return "EXPERT_DIMS"
    return knob if knob in values else _KNOBS["heads"]

  def _raise_sizes(self, differ: Mapping[str, tuple[int, int]]):
    lines = [f"{knob} is {theirs}, not {ours}" for knob, (theirs, ours) in differ.items()]
    flags = " ".join(f"--fdl.{knob}={theirs}" for knob, (theirs, _) in differ.items())
    raise UserError(
      f"{self._arrays.path} is not of this size: {', '.join(lines)}. For its size add {flags}."
    )


def _experiment(requested: Requested, config: MaxTextConfig | None, *, program: str) -> Experiment:
  """Returns the experiment, with synthetic data, or text if it has a tokenizer."""
  if requested.name is not None:
    family = registry.find(requested.name)
  elif config is not None:
    module, _, name = config.family.rpartition(".")
    family = getattr(importlib.import_module(f"paxlike.experiments.{module}"), name)
  else:
    file = f", as the run has no {maxtext_config.FILE}" if program == "maxtext" else ""
    raise UserError(f"--from={program} needs --fdl_config=NAME{file}: which experiment is it?")
  given = dict(requested.knobs)
  with_text = "VOCAB_PATH" in given
  data = datasets.LocalText if with_text else datasets.Synthetic
  has_data = issubclass(family, data)
  experiment = (family if has_data else registry.with_data(family, data.__name__))()
  if with_text:
    is_json = given["VOCAB_PATH"].endswith(".json")
    experiment.set("TOKENIZER", "huggingface" if is_json else "sentencepiece", source="conversion")
    experiment.set("TRAIN_SHARE", 0.0, source="conversion")
  experiment.set("USE_REPEATED_LAYER", False, source="conversion")
  for name, text in given.items():
    experiment.set(name, text, source="command line")
  if config is not None:
    _configure(experiment, config, given, is_named=requested.name is not None)
  return experiment


def _configure(
  experiment: Experiment, config: MaxTextConfig, given: Mapping[str, str], *, is_named: bool
):
  """Sets the knobs of a configuration, or compares them with those of a named experiment.

  Raises:
    UserError: They differ.
  """
  if not is_named:
    for name, value in config.knobs.items():
      if name not in given:
        experiment.set(name, value, source=config.path.name)
    return
  values = experiment.values()
  differ = {
    name: value
    for name, value in config.knobs.items()
    if name in values and values[name].value not in (value, None)
    # Given on purpose, or of no importance but for positions, which are a weight then.
    if name not in given and name != "MAX_SEQ_LEN"
  }
  if differ:
    flags = " ".join(f"--fdl.{name}={spell(value)}" for name, value in differ.items())
    raise UserError(
      f"{config.path} is of another model than {type(experiment).__name__}: add {flags}, or leave"
      " out --fdl_config."
    )


def _check_knobs(experiment: Experiment):
  """Raises a UserError if a knob of the command line has no effect on the model or its data."""
  settings = experiment.settings()
  for name in experiment.unread():
    if settings[name].source == "command line":
      raise UserError(f"--fdl.{name} has no effect on {type(experiment).__name__}: leave it out.")


def _tokenizer(experiment: Experiment) -> tuple[pathlib.Path, str] | None:
  """Returns the tokenizer's file and its name in a converted folder; None if there is none.

  Raises:
    UserError: It is missing or damaged, or has more ids than the model.
  """
  if "VOCAB_PATH" not in experiment.settings():
    return None
  path = pathlib.Path(experiment.values()["VOCAB_PATH"].value)
  if not path.is_file():
    raise UserError(f"--fdl.VOCAB_PATH={path}: no such file.")
  found = tokenizer_files.file_of(experiment)
  if found is not None:
    tokenizer_files.check(path, experiment.trainer(), vocab_size=experiment.VOCAB_SIZE)
  return found


def _scan_axis(arrays: TensorStoreArrays, experiment: Experiment) -> int:
  """Returns the dim along which layers are stacked: MaxText's default 1, or 0."""
  for name, spec in arrays.specs.items():
    held = maxtext.layers(name, axis=1)
    if held is not None and held.group is None and name.endswith("norm.scale"):
      return 0 if spec.shape[1:] == (experiment.MODEL_DIMS,) != spec.shape[:1] else 1
  return 1
