# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others to a folder that paxlike decodes, evaluates and restores from."""

import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import fiddle as fdl
import numpy as np

from paxlike import config_file, fiddlers, registry, run_folder
from paxlike.convert import matching, streaming
from paxlike.convert.matching import Match
from paxlike.convert.meta import MetaFolder
from paxlike.convert.quantized import Dequantized
from paxlike.convert.tensors import TensorFolder, TensorSpec, read_json
from paxlike.data import chat
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.hugging_face import Family, Wrapper
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

# File -> the knob TOKENIZER for it; the first that is there is taken.
TOKENIZERS = {"tokenizer.model": "sentencepiece", "tokenizer.json": "huggingface"}


class Tensors(Protocol):
  """Tensors by name."""

  specs: dict[str, TensorSpec]

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    ...


class _Named:
  """Tensors whose names begin with a prefix, even if none does in the files."""

  def __init__(self, tensors: Tensors, prefix: str):
    self._tensors = tensors
    self._added = "" if any(name.startswith(prefix) for name in tensors.specs) else prefix
    self.specs = {self._added + name: spec for name, spec in tensors.specs.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors.read(name.removeprefix(self._added))


class _Part:
  """Those tensors of a model of text and images that are of its text part."""

  def __init__(self, tensors: Tensors, wrapper: Wrapper):
    self._tensors = tensors
    self._names = {
      name: theirs for theirs in tensors.specs if (name := wrapper.name(theirs)) is not None
    }
    self.specs = {name: tensors.specs[theirs] for name, theirs in self._names.items()}

  def read(self, name: str) -> np.ndarray:
    return self._tensors.read(self._names[name])


class Source:
  """A model of others: what it is, and where its weights are.

  Attributes:
    matches: A match for every weight.
    family: Says what the names mean.
  """

  def __init__(self, path: pathlib.Path, config: Mapping[str, Any], tensors: Tensors):
    """Finds a place for every tensor and reads none.

    Raises:
      UserError: No family fits, or tensors, configuration and tokenizer do not agree.
    """
    self._experiment, self.family = _family(config, path)
    try:
      wrapper = self.family.wrapper
      if wrapper is not None and config["model_type"] == wrapper.model_type:
        config, tensors = wrapper.text(config), _Part(tensors, wrapper)
      self._knobs = self.family.read(config)
    except UserError as error:
      raise UserError(f"{path / 'config.json'}: {error}") from None
    self._tensors = _Named(tensors, self.family.prefix)
    self._tokenizer = next((path / name for name in TOKENIZERS if (path / name).exists()), None)
    self.matches = matching.match(Definition(self._model()), self.family)
    matching.check(self.matches, self._tensors.specs, self.family, self._knobs)
    if self._tokenizer is not None:
      self._check(self._tokenizer)

  @classmethod
  def hugging_face(cls, path: pathlib.Path) -> Self:
    """Opens a folder as Hugging Face has it.

    Raises:
      UserError: A file is missing or damaged; or as above.
    """
    config = read_json(path / "config.json")
    return cls(path, config, Dequantized(TensorFolder(path), block=_fp8_block(config)))

  @classmethod
  def meta(cls, path: pathlib.Path) -> Self:
    """Opens a folder of Meta's LLaMA.

    Raises:
      UserError: A file is missing or damaged; or as above.
    """
    folder = MetaFolder(path)
    return cls(path, folder.config, folder)

  def table(self) -> str:
    """Returns a line for each weight: its name and shape, and where it comes from."""
    return matching.table(self.matches, "<-")

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must not hold anything yet."""
    with run_folder.built(to, flag="to") as folder:
      layout = layout_of(self._model())
      streaming.write(folder / "checkpoints", self._weights(), dtype=np.dtype(dtype), layout=layout)
      if self._tokenizer is not None:
        copy_tokenizer(self._tokenizer.parent, folder)
      graph = self._graph(to.absolute())
      (folder / "config.json").write_text(config_file.dump(graph))
      (folder / "config.txt").write_text(config_file.describe(graph) + "\n")
      (folder / "experiment.json").write_text(registry.dump(self._experiment(**self._knobs)))

  def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
    for match in self.matches:
      yield f"params.{match.ours}", _weight(match, self._tensors)

  def _model(self) -> Any:
    return fdl.build(self._graph(None).model)

  def _graph(self, folder: pathlib.Path | None) -> fdl.Config:
    """Returns the graph of an experiment that has the weights, and the tokenizer in `folder`."""
    knobs: dict[str, Any] = dict(self._knobs)
    mixin: type[Experiment] = datasets.Synthetic
    if folder is not None and self._tokenizer is not None:
      mixin, name = datasets.LocalText, self._tokenizer.name
      knobs |= {"TOKENIZER": TOKENIZERS[name], "VOCAB_PATH": str(folder / name)}
    graph = type(self._experiment.__name__, (mixin, self._experiment), {})(**knobs).trainer()
    fiddlers.stack(graph, scan=False)
    return graph

  def _check(self, tokenizer: pathlib.Path):
    size = fdl.build(self._graph(tokenizer.parent).train_data.corpus.tokenizer).vocab_size
    if size > self._knobs["VOCAB_SIZE"]:
      raise UserError(
        f"{tokenizer} has {size} ids, but the model knows {self._knobs['VOCAB_SIZE']}: it is the"
        " tokenizer of another model."
      )


def copy_tokenizer(source: pathlib.Path, to: pathlib.Path):
  """Copies what is there of tokenizers' files."""
  for name in (*TOKENIZERS, *chat.FILES):
    if (source / name).exists():
      shutil.copyfile(source / name, to / name)


def _weight(match: Match, tensors: Tensors) -> np.ndarray:
  return match.rule.load([tensors.read(name) for name in match.theirs], match.shape)


def _fp8_block(config: dict[str, Any]) -> int:
  """Returns the side of the blocks that share a scale, if the model is stored in FP8."""
  sides = (config.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
  if sides[0] != sides[1]:
    raise UserError(f"config.json: weight_block_size={sides} is not square.")
  return sides[0]


def _family(config: Mapping[str, Any], path: pathlib.Path) -> tuple[type[Experiment], Family]:
  """Returns the experiment that a configuration is of, and what it says of Hugging Face."""
  bases = {base for cls in registry.registered().values() for base in cls.__mro__}
  families: dict[str, tuple[type[Experiment], Family]] = {}
  for base in bases:
    if "hugging_face" in vars(base) and (family := base.hugging_face()) is not None:
      families[family.model_type] = base, family
      if family.wrapper is not None:
        families[family.wrapper.model_type] = base, family
  kind = config.get("model_type")
  if kind in families:
    return families[kind]
  raise UserError(
    f"{path / 'config.json'}: model_type is {kind!r}; paxlike has {', '.join(sorted(families))}."
  )
