# SPDX-License-Identifier: Apache-2.0
"""Imports checkpoints of other programs as folders that paxlike evaluates and restores from."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from paxlike import registry, run_folder, untrusted_files
from paxlike.checkpoints.hf_family import Family, Wrapper
from paxlike.config import building
from paxlike.convert import (
  experiment_files,
  matching,
  nearest_family,
  new_folder,
  size_checks,
  streaming,
  tokenizer_files,
)
from paxlike.convert.compressed_tensors import Decompressed
from paxlike.convert.matching import Match
from paxlike.convert.meta import MetaFolder
from paxlike.convert.quantized import Dequantized, Tensors
from paxlike.convert.safetensors_files import TensorFolder, read_json
from paxlike.convert.stacked_experts import UnstackedExperts
from paxlike.convert.torch_folder import TorchFolder
from paxlike.data.tokenizers.token_settings import TOKENIZER_BYTES
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

# Declared dtype -> compute dtype: the range of float16 is too small for many models.
_COMPUTE = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
_QUANTIZED = ("compressed-tensors", "fp8", "mxfp4")


class _WithPrefix:
  """Tensors under names with a prefix, which is added if the files lack it."""

  def __init__(self, tensors: Tensors, prefix: str):
    self._tensors = tensors
    self._added = "" if any(name.startswith(prefix) for name in tensors.specs) else prefix
    self.specs = {self._added + name: spec for name, spec in tensors.specs.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors.read(name.removeprefix(self._added))


class _TextTensors:
  """The tensors of the text model in a model of text and images."""

  def __init__(self, tensors: Tensors, wrapper: Wrapper):
    self._tensors = tensors
    self._names = {
      name: theirs for theirs in tensors.specs if (name := wrapper.name(theirs)) is not None
    }
    self.specs = {name: tensors.specs[theirs] for name, theirs in self._names.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors.read(self._names[name])


class Source:
  """A model of another program: its configuration and its tensors.

  Attributes:
    matches: A match for every weight.
    family: The Hugging Face family, which maps names.
  """

  def __init__(self, path: pathlib.Path, config: Mapping[str, Any], tensors: Tensors):
    """Finds the weight of every tensor; reads no tensors.

    Raises:
      UserError: The family is unknown, or tensors, configuration and tokenizer do not match.
    """
    for name in tokenizer_files.files(path):
      untrusted_files.check(path / name, folder=path, limit=TOKENIZER_BYTES)
    self._config = dict(config)
    with size_checks.describing(path / "config.json"):
      self._experiment, self.family = _family(config, path, tensors)
      _check_quantization(config.get("quantization_config"))
      wrapper = self.family.wrapper
      if wrapper is not None and config["model_type"] == wrapper.model_type:
        config, tensors = wrapper.text(config), _TextTensors(tensors, wrapper)
        _check_quantization(config.get("quantization_config"))
      if self.family.stacked_experts:
        tensors = UnstackedExperts(tensors, self.family.stacked_experts)
      self._knobs = self.family.read(config)
      self._tensors = _WithPrefix(tensors, self.family.prefix)
      self._knobs |= _mtp_layers(self.family, self._knobs, self._tensors)
      self._tokenizer = tokenizer_files.find(path)
      self._ids: dict[str, Any] = {}
      if self._tokenizer is not None:
        self._ids = tokenizer_files.ids(
          self._config,
          model_type=self.family.model_type,
          vocab_size=self._knobs["VOCAB_SIZE"],
          place=str(path / "config.json"),
        )
      self._compute, self._reason = _compute_dtype(config, tensors)
      size_checks.check(self._knobs, self.family, self._tensors.specs)
      definition = Definition(self._model())
      family, knobs = self.family, self._knobs
      self.matches = matching.match(definition, family.rules_of, program=family.title)
      matching.check(self.matches, self._tensors.specs, lambda name: family.is_ignored(name, knobs))
    if self._tokenizer is not None:
      graph = self._with_data(f"{self._tokenizer.parent}/").trainer()
      tokenizer_files.check(self._tokenizer, graph, vocab_size=self._knobs["VOCAB_SIZE"])

  @classmethod
  def hugging_face(cls, path: pathlib.Path) -> Self:
    """Opens a Hugging Face folder.

    Raises:
      UserError: A file is missing or damaged; or as `__init__`.
    """
    config = read_json(path / "config.json")
    is_older = not TensorFolder.is_at(path) and TorchFolder.is_at(path)
    tensors = TorchFolder(path) if is_older else TensorFolder(path)
    return cls(path, config, _dequantized(tensors, config))

  @classmethod
  def meta(cls, path: pathlib.Path) -> Self:
    """Opens a folder of Meta's LLaMA.

    Raises:
      UserError: A file is missing or damaged; or as `__init__`.
    """
    folder = MetaFolder(path)
    # Generations of LLaMA have different ids, and only the tokenizer knows them.
    return cls(path, {**folder.config, "bos_token_id": None, "eos_token_id": None}, folder)

  def table(self) -> str:
    """Returns a line for each weight: its name, its shape and its tensors."""
    return matching.table(self.matches, "<-")

  def notes(self) -> list[str]:
    """Returns notes about the converted model for the user, one line each."""
    lines = [f"computes in {self._compute} ({self._reason}): --fdl.FPROP_DTYPE changes that"]
    if self._tokenizer is None:
      lines.append(tokenizer_files.NONE)
    return lines

  @property
  def dtype(self) -> str:
    """bfloat16 or float16 if all tensors have that dtype; else float32."""
    dtypes = {spec.dtype.name for spec in self._tensors.specs.values()}
    return dtypes.pop() if dtypes in ({"bfloat16"}, {"float16"}) else "float32"

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must be missing or empty."""
    self._check_copies()
    with new_folder.filling(to, flag="to") as folder:
      layout = layout_of(self._model())
      streaming.write(folder / "checkpoints", self._weights(), dtype=np.dtype(dtype), layout=layout)
      if self._tokenizer is not None:
        tokenizer_files.import_tokenizer(self._tokenizer.parent, self._ids, folder)
      experiment = self._with_data(run_folder.OWN)
      experiment_files.write(folder, experiment.trainer(), experiment)

  def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
    for match in self.matches:
      yield f"params.{match.ours}", _weight(match, self._tensors)

  def _model(self) -> Any:
    return building.build(self._with_data(None).trainer().model)

  def _with_data(self, folder: str | None) -> Experiment:
    """Returns the experiment with a data mixin.

    With a tokenizer (in `folder`) the data is the user's text, all of it for evaluation; else it is
    random tokens.
    """
    knobs: dict[str, Any] = {
      **self._knobs,
      "FPROP_DTYPE": self._compute,
      "USE_REPEATED_LAYER": False,
    }
    mixin = "Synthetic"
    if folder is not None and self._tokenizer is not None:
      mixin, name = "LocalText", self._tokenizer.name
      knobs |= {"TOKENIZER": tokenizer_files.TOKENIZERS[name], "VOCAB_PATH": folder + name}
      knobs["TRAIN_SHARE"] = 0.0
    return registry.with_data(self._experiment, mixin)(**knobs)

  def _check_copies(self):
    """Raises a UserError if tensors that the configuration ties are both stored and differ."""
    read = {name for match in self.matches for name in match.theirs}
    for name, other in self.family.copies.items():
      if name not in self._tensors.specs or name in read:
        continue
      one, two = self._tensors.read(name), self._tensors.read(other)
      if one.shape != two.shape or one.tobytes() != two.tobytes():
        raise UserError(f"tie_word_embeddings is set, but {name} is not a copy of {other}.")


def _mtp_layers(family: Family, knobs: Mapping[str, Any], tensors: Tensors) -> dict[str, int]:
  """Returns the number of layers for multi-token prediction, as a knob: those in the files.

  A configuration may declare some that were not saved.
  """
  num_layers = knobs.get("NUM_LAYERS")
  if not family.mtp or type(num_layers) is not int:
    return {}
  return {"MTP_NUM_LAYERS": family.num_mtp_layers(tensors.specs, num_layers)}


def _check_quantization(config: Any):
  """Raises a UserError if the weights' quantization method is unknown; None: not quantized."""
  method = config.get("quant_method") if isinstance(config, Mapping) else config
  if config is not None and method not in _QUANTIZED:
    known = ", ".join(_QUANTIZED)
    raise UserError(f"quantization_config.quant_method is {method!r}; paxlike reads {known}.")


def _compute_dtype(config: Mapping[str, Any], tensors: Tensors) -> tuple[str, str]:
  """Returns the compute dtype and the reason: the declared dtype, else that of the weights."""
  declared = config.get("dtype") or config.get("torch_dtype")
  if isinstance(declared, str) and declared in _COMPUTE:
    compute = _COMPUTE[declared]
    return compute, "as declared" if compute == declared else f"{declared} is declared"
  first = next(iter(tensors.specs.values()), None)
  stored = "bfloat16" if first is None else first.dtype.name
  reason = "none is declared" if not declared or declared == "auto" else f"{declared!r} is declared"
  return _COMPUTE.get(stored, "bfloat16"), f"{reason}, and weights are {stored}"


def _weight(match: Match, tensors: Tensors) -> np.ndarray:
  return match.rule.load([tensors.read(name) for name in match.theirs], match.shape)


def _dequantized(tensors: Tensors, config: dict[str, Any]) -> Tensors:
  """Returns the tensors of a folder, dequantized as its configuration declares."""
  quantization = config.get("quantization_config")
  if isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors":
    return Decompressed(tensors, quantization)
  return Dequantized(tensors, block=_fp8_block(config))


def _fp8_block(config: dict[str, Any]) -> int:
  """Returns the side of the square blocks that share an FP8 scale; 128 if not declared."""
  quantization = config.get("quantization_config")
  sides = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
  sides = sides or [128, 128]
  match sides:
    case [int(rows), int(columns)] if rows == columns and 0 < rows < 2**16:
      return rows
  raise UserError(f"config.json: weight_block_size={sides} is not square.")


def _family(
  config: Mapping[str, Any], path: pathlib.Path, tensors: Tensors
) -> tuple[type[Experiment], Family]:
  """Returns the experiment and the Hugging Face family of a configuration.

  Raises:
    UserError: There is none; names the nearest.
  """
  bases = {base for cls in registry.registered().values() for base in cls.__mro__}
  families: dict[str, tuple[type[Experiment], Family]] = {}
  wrapped: dict[str, dict[str, tuple[type[Experiment], Family]]] = {}
  for base in bases:
    if "hugging_face" in vars(base) and (family := base.hugging_face()) is not None:
      families |= dict.fromkeys((family.model_type, *family.other_types), (base, family))
      if family.wrapper is not None:
        wrapped.setdefault(family.wrapper.model_type, {})[family.model_type] = base, family
  kind, known, place = config.get("model_type"), {*families, *wrapped}, ""
  if isinstance(kind, str) and kind in wrapped:
    families, text = wrapped[kind], config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    kind = inner if len(families) > 1 else next(iter(families))
    known, place = set(families), " in text_config"
  if isinstance(kind, str) and kind in families:
    return families[kind]
  near = nearest_family.describe(config, tensors.specs, families)
  raise UserError(
    f"{path / 'config.json'}: model_type is {kind!r}{place}; paxlike has"
    f" {', '.join(sorted(known))}. {near} For a family of yours, name the module that registers an"
    " experiment of it by --fdl_allow_modules."
  )
