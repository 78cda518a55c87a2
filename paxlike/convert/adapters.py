# SPDX-License-Identifier: Apache-2.0
"""Imports and exports LoRA adapters in the format of Hugging Face's PEFT."""

import json
import math
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, cast

import fiddle as fdl
import numpy as np
from fiddle import daglish

from paxlike import fiddlers, file_io, layers, registry, run_folder
from paxlike.checkpoints.hf_rules import Matrix
from paxlike.checkpoints.layout_conversion import MTP
from paxlike.checkpoints.warm_start import PROVENANCE, Restore
from paxlike.config import building, graph_file, ranges
from paxlike.convert import (
  experiment_files,
  matching,
  new_folder,
  safetensors_files,
  streaming,
  tokenizer_files,
)
from paxlike.convert.exporting import ExportedRun, adapters, family_of
from paxlike.convert.known_keys import Declared
from paxlike.convert.matching import Match
from paxlike.convert.safetensors_files import TensorFolder, TensorSpec, read_json
from paxlike.convert.stored import Adapter, Stored, magnitudes
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.fiddlers import matmuls
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

_EMBEDDING = "embedding.table"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# The keys of PEFT's `LoraConfig`.
_DECLARED = Declared(
  kinds={
    "r": ranges.Size,
    "lora_alpha": ranges.Factor,
    "lora_dropout": ranges.Probability,
    "use_dora": bool,
    "use_rslora": bool,
    "ensure_weight_tying": bool,
  },
  defaults={
    "lora_dropout": 0.0,
    "use_dora": False,
    "use_rslora": False,
    "ensure_weight_tying": False,
  },
  fixed={
    "bias": "none",
    "fan_in_fan_out": False,
    # Other values also change the base weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "lora_bias": False,
    "use_bdlora": False,
    "use_qalora": False,
    # With any value of these it is not plain LoRA.
    "alora_invocation_tokens": None,
    "alpha_pattern": None,
    "arrow_config": None,
    "kasa_config": None,
    "layer_replication": None,
    "layers_to_transform": None,
    "megatron_config": None,
    "modules_to_save": None,
    "monteclora_config": None,
    "rank_pattern": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "velora_config": None,
  },
  neutral=frozenset(
    # Origin and loading.
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"}
    | {"revision", "runtime_config", "task_type", "merge_weights"}
    # Which linear maps are adapted: the tensors show that.
    | {"exclude_modules", "layers_pattern", "target_modules"}
    # Initialization, and options of a key in `fixed`.
    | {"corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_core"}
    | {"qalora_group_size"}
  ),
)


class _Part(NamedTuple):
  """A weight of an adapter: PEFT's name, our name, PEFT's shape and the adapted weight."""

  theirs: str
  ours: str
  shape: tuple[int, ...]
  of: Match


def _names(match: Match) -> tuple[str, ...]:
  """Returns PEFT's names of A [rank, inputs], B [outputs, rank] and of DoRA's magnitudes [outputs].

  () if the weight is not a matrix.
  """
  module = f"base_model.model.{match.theirs[0].removesuffix('.weight')}"
  if match.ours == _EMBEDDING:
    return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
  if not isinstance(match.rule, Matrix):
    return ()
  return tuple(f"{module}.lora_{name}" for name in ("A.weight", "B.weight", "magnitude_vector"))


def _parts(match: Match, adapter: Adapter, rank: int) -> list[_Part]:
  """Returns the weights of an adapter.

  Raises:
    UserError: PEFT cannot represent it.
  """
  is_matrix = isinstance(match.rule, Matrix) and match.rule.transposed
  if match.ours != _EMBEDDING and not is_matrix:
    raise UserError(
      f"PEFT cannot represent the adapter of {match.ours}: Hugging Face stores {match.theirs[0]}"
      " in another form; a run with this adapter can only be exported whole, without --adapter."
    )
  inputs = _num_inputs(match)
  outputs = math.prod(match.shape) // inputs
  shapes = (rank, inputs), (outputs, rank), (outputs,)
  given = zip(_names(match), adapter.names, shapes, strict=False)
  return [_Part(theirs, ours, shape, match) for theirs, ours, shape in given]


def _num_inputs(match: Match) -> int:
  return math.prod(match.shape[: match.rule.inputs if isinstance(match.rule, Matrix) else 1])


def _is_tied(matches: Sequence[Match], adapters: Collection[str]) -> bool:
  """Returns whether the embedding is adapted and also is the output projection."""
  return _EMBEDDING in adapters and all(match.ours != "head.w" for match in matches)


def _magnitudes(base: Stored, match: Match) -> np.ndarray:
  return magnitudes(base.read(match.ours).reshape(_num_inputs(match), -1))


class TrainedAdapters:
  """The adapters of a run, which `convert` writes as a PEFT folder.

  Attributes:
    matches: The adapted weights.
  """

  def __init__(self, run: ExportedRun):
    """Finds PEFT's name of each adapter; reads no weights.

    Raises:
      UserError: The run has no adapters, or PEFT cannot represent them.
    """
    if not run.adapted:
      raise UserError(f"{run.path} has no adapters: it was not trained with USE_LORA.")
    self.matches = [match for match in run.adapted if not match.ours.startswith(MTP)]
    self._run = run
    rank = run.experiment.LORA_RANK
    adapters = run.adapter_of
    self._parts = [p for m in self.matches for p in _parts(m, adapters[m.ours], rank)]

  def table(self) -> str:
    """Returns a line for each weight of an adapter: its name, PEFT's shape and PEFT's name."""
    return "\n".join(f"{part.ours} {list(part.shape)} -> {part.theirs}" for part in self._parts)

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must be missing or empty."""
    experiment = self._run.experiment
    rank = experiment.LORA_RANK
    specs = {part.theirs: TensorSpec(part.shape, np.dtype(dtype)) for part in self._parts}
    sources = {part.theirs: part for part in self._parts}

    def value(name: str) -> np.ndarray:
      part = sources[name]
      weight = self._run.adapters.read(part.ours)
      if len(part.shape) == 1:
        assert self._run.base_weights is not None
        return _magnitudes(self._run.base_weights, part.of) + weight.reshape(-1)
      is_a = part.ours.endswith(".a")
      flat = weight.reshape(-1, weight.shape[-1]) if is_a else weight.reshape(len(weight), -1)
      return flat.T

    config = {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": self._run.base,
      "r": rank,
      "lora_alpha": rank if experiment.LORA_ALPHA is None else experiment.LORA_ALPHA,
      "use_rslora": experiment.LORA_RSLORA,
      "use_dora": experiment.LORA_DORA,
      "lora_dropout": experiment.LORA_DROPOUT,
      "target_modules": sorted({match.theirs[0].split(".")[-2] for match in self.matches}),
      "bias": "none",
      "fan_in_fan_out": False,
      "ensure_weight_tying": _is_tied(self._run.matches, self._run.adapter_of),
      "inference_mode": True,
    }
    with new_folder.filling(to, flag="to") as folder:
      safetensors_files.write_file(folder / _TENSORS, specs, value)
      (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


class PeftAdapter:
  """A PEFT adapter for a base model in paxlike's format.

  Attributes:
    matches: The adapted weights of the base.
  """

  def __init__(self, path: pathlib.Path, *, base: pathlib.Path, allow_modules: Sequence[str] = ()):
    """Finds the weight of every tensor; reads no tensors.

    Args:
      path: PEFT's folder.
      base: The folder of a run or of a converted model.
      allow_modules: Modules outside paxlike that the base's files may use.

    Raises:
      UserError: It is not a LoRA adapter, has an option that paxlike lacks, or needs another base.
    """
    config = read_json(path / _CONFIG)
    if config.get("peft_type") != "LORA":
      raise UserError(
        f"{path / _CONFIG} is not a LoRA adapter: peft_type {config.get('peft_type')!r}."
      )
    declared = _DECLARED.read(config, place=str(path / _CONFIG))
    self._base = base
    self._rank: int = declared["r"]
    self._alpha: float = declared["lora_alpha"]
    self._kind = {"rslora": declared["use_rslora"], "dora": declared["use_dora"]}
    self._dropout: float = declared["lora_dropout"]
    self._tensors = TensorFolder(path / _TENSORS)
    self._graph: Any = graph_file.read(base / "config.json", allow_modules=allow_modules)
    fiddlers.stack(self._graph, scan=False)
    fiddlers.next_token_only(self._graph)
    plain = Definition(cast(Any, building.build(self._graph.model)))
    self._experiment = registry.load(base / "experiment.json", allow_modules=allow_modules)
    family = family_of(self._experiment)
    matches = matching.match(plain, family.rules_of, program=family.title)
    roles = matmuls.lora_roles(plain.module) | {_EMBEDDING: matmuls.EMBEDDING}
    adapted = [match.ours for match in matches if self._tensors.specs.keys() & _names(match)]
    self._roles = sorted({roles[name.removesuffix(".w")] for name in adapted})
    if not self._roles:
      raise UserError(f"the adapter matches no linear map of {base}.")
    fiddlers.lora(
      self._graph,
      rank=self._rank,
      alpha=self._alpha,
      dropout=self._dropout,
      roles=self._roles,
      **self._kind,
    )
    self._definition = Definition(
      cast(Any, building.build(self._graph.model)), trained=self._graph.trained
    )
    self._adapters = adapters(matches, self._definition)
    self.matches = [match for match in matches if match.ours in self._adapters]
    if _is_tied(matches, self._adapters) and not declared["ensure_weight_tying"]:
      raise UserError(
        f"the adapter changes the embedding of {base}, but not its output projection, which is the"
        " same weight: paxlike needs ensure_weight_tying=True."
      )
    self._plain = {match.theirs[0]: match for match in matches}
    self._check()

  def _check(self):
    wanted = {part.theirs: part.shape for part in self._all_parts()}
    # PEFT writes embedding and output projection too, if it adapts them or calls them resized.
    there = {name: spec for name, spec in self._tensors.specs.items() if not self._is_copy(name)}
    if lacking := sorted(wanted.keys() - there.keys()):
      raise UserError(f"the adapter lacks {', '.join(lacking[:5])}.")
    if more := sorted(there.keys() - wanted.keys()):
      raise UserError(f"{self._base} has no place for {', '.join(more[:5])} of the adapter.")
    for name, shape in wanted.items():
      if (found := there[name].shape) != shape:
        raise UserError(f"{name} is {list(found)}, but {self._base} needs {list(shape)}.")

  def _copied(self, name: str) -> Match | None:
    """Returns the base weight that a tensor is a copy of; None: it is no copy."""
    own = name.removeprefix("base_model.model.")
    return self._plain.get(own.replace(".base_layer.", "."))

  def _is_copy(self, name: str) -> bool:
    """Returns whether a tensor is a copy: of a base weight, or of the tied embedding's adapter."""
    is_of_tied = (
      name.startswith("base_model.model.lm_head.") and "lm_head.weight" not in self._plain
    )
    return is_of_tied or self._copied(name) is not None

  def _check_copies(self, base: Stored):
    """Raises a UserError if a copied base weight is not that of the base."""
    for name in self._tensors.specs:
      if (match := self._copied(name)) is None:
        continue
      (own,) = match.rule.save(base.read(match.ours))
      given = self._tensors.read(name).astype(np.float32)
      # The base may have been converted to bfloat16.
      if given.shape != own.shape or not np.allclose(given, own, rtol=2**-7, atol=1e-6):
        raise UserError(f"{name} of the adapter is not the weight of {self._base}: give its base.")

  def _all_parts(self) -> list[_Part]:
    return [p for m in self.matches for p in _parts(m, self._adapters[m.ours], self._rank)]

  def table(self) -> str:
    """Returns a line for each adapted weight: its name and shape, and where its adapter is."""
    return "\n".join(
      f"{part.ours} {list(self._definition.weights[part.ours].shape)} <- {part.theirs}"
      for part in self._all_parts()
    )

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must be missing or empty."""
    graph: Any = self._graph
    base = os.fspath(file_io.absolute(self._base))
    graph.restore = fdl.Config(Restore, path=base, ignore=(layers.lora.WEIGHTS,))
    experiment = self._experiment
    knobs = {
      "USE_LORA": True,
      "MTP_NUM_LAYERS": 0,
      "LORA_RANK": self._rank,
      "LORA_ALPHA": self._alpha,
      "LORA_RSLORA": self._kind["rslora"],
      "LORA_DORA": self._kind["dora"],
      "LORA_DROPOUT": self._dropout,
      "LORA_TARGET_LAYERS": ",".join(self._roles),
      "CHECKPOINT_RESTORE_PATH": base,
    }
    for name, value in knobs.items():
      experiment.set(name, value, source=_CONFIG)
    _use_copied_tokenizer(graph, experiment, base)
    definition = self._definition
    restore: Restore = building.build(graph.restore)
    restore.check(definition)
    layout = layout_of(definition.module)
    stored = Stored(pathlib.Path(restore.folder), None, layout)
    self._check_copies(stored)
    with new_folder.filling(to, flag="to") as folder:
      weights = self._weights(stored)
      streaming.write(folder / "checkpoints", weights, dtype=np.dtype(dtype), layout=layout)
      tokenizer_files.copy(pathlib.Path(base), folder)
      experiment_files.write(folder, graph, experiment)
      (folder / PROVENANCE).write_text(
        restore.provenance(restore.saved.find(None), [], definition.frozen)
      )

  def _weights(self, base: Stored) -> Iterator[tuple[str, np.ndarray]]:
    for part in self._all_parts():
      value = self._tensors.read(part.theirs)
      if len(part.shape) == 1:
        value = value.astype(np.float32) - _magnitudes(base, part.of)
      yield f"params.{part.ours}", value.T.reshape(self._definition.weights[part.ours].shape)


def _use_copied_tokenizer(graph: Any, experiment: Experiment, base: str):
  """Replaces the paths of tokenizer files in `base` by those of their copies."""
  own = {f"{base}/{name}": run_folder.OWN + name for name in tokenizer_files.TOKENIZERS}
  for node, _ in daglish.iterate(graph):
    for name, value in list(node.__arguments__.items()) if isinstance(node, fdl.Buildable) else ():
      if isinstance(value, str) and value in own:
        setattr(node, str(name), own[value])
  for name, setting in experiment.settings().items():
    if isinstance(setting.value, str) and setting.value in own:
      experiment.set(name, own[setting.value], source=_CONFIG)
