# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others to a folder that paxlike decodes, evaluates and restores from."""

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import fiddle as fdl
import numpy as np

from paxlike import checkpoint, config_file, fiddlers, registry, run_folder
from paxlike.convert import matching
from paxlike.convert.matching import Match
from paxlike.convert.quantized import Dequantized
from paxlike.convert.tensors import TensorFolder
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.hugging_face import Family, normalized
from paxlike.layers.module import Definition
from paxlike.layers.stack import layout_of

TOKENIZER = "tokenizer.model"


class Source:
  """A model of Hugging Face: what it is, and where its weights are.

  Attributes:
    matches: A match for every weight.
    family: Says what the names mean.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the configuration and the headers of the tensor files.

    Raises:
      UserError: No family fits, a file is damaged, or tensors and configuration do not agree.
    """
    self._path = path
    config = normalized(_json(path / "config.json"))
    self._experiment, self.family = _family(config, path)
    self._knobs = self.family.read(config)
    self._tensors = Dequantized(TensorFolder(path), block=_fp8_block(config))
    self.matches = matching.match(Definition(self._model()), self.family)
    matching.check(self.matches, self._tensors.specs, self.family, self._knobs)

  def table(self) -> str:
    """Returns a line for each weight: its name and shape, and where it comes from."""
    return "\n".join(
      f"{match.ours} {list(match.shape)} <- {', '.join(match.theirs)}" for match in self.matches
    )

  def convert(self, to: pathlib.Path, *, dtype: str):
    """Writes the folder `to`, which must not hold anything yet."""
    with run_folder.built(to, flag="to") as folder:
      weights, layout = self._weights(np.dtype(dtype)), layout_of(self._model())
      checkpoint.write_streamed(folder / "checkpoints", weights, layout=layout)
      if (self._path / TOKENIZER).exists():
        shutil.copyfile(self._path / TOKENIZER, folder / TOKENIZER)
      graph = self._graph(to.absolute() / TOKENIZER)
      (folder / "config.json").write_text(config_file.dump(graph))
      (folder / "config.txt").write_text(config_file.describe(graph) + "\n")
      (folder / "experiment.json").write_text(registry.dump(self._experiment(**self._knobs)))

  def _weights(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    for match in self.matches:
      yield f"params.{match.ours}", _weight(match, self._tensors).astype(dtype)

  def _model(self) -> Any:
    return fdl.build(self._graph(None).model)

  def _graph(self, tokenizer: pathlib.Path | None) -> fdl.Config:
    """Returns the graph of an experiment that has the weights, and the tokenizer if any."""
    knobs: dict[str, Any] = dict(self._knobs)
    mixin: type[Experiment] = datasets.Synthetic
    if tokenizer is not None and (self._path / TOKENIZER).exists():
      mixin = datasets.LocalText
      knobs |= {"TOKENIZER": "sentencepiece", "VOCAB_PATH": str(tokenizer)}
    graph = type(self._experiment.__name__, (mixin, self._experiment), {})(**knobs).trainer()
    fiddlers.stack(graph, scan=False)
    return graph


def _weight(match: Match, tensors: Dequantized) -> np.ndarray:
  return match.rule.load([tensors.read(name) for name in match.theirs], match.shape)


def _fp8_block(config: dict[str, Any]) -> int:
  """Returns the side of the blocks that share a scale, if the model is stored in FP8."""
  sides = (config.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
  if sides[0] != sides[1]:
    raise UserError(f"config.json: weight_block_size={sides} is not square.")
  return sides[0]


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    config = json.loads(path.read_text())
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}.") from None
  except ValueError as error:
    raise UserError(f"{path} is no JSON: {error}.") from None
  if not isinstance(config, dict):
    raise UserError(f"{path} holds no configuration.")
  return config


def _family(config: dict[str, Any], path: pathlib.Path) -> tuple[type[Experiment], Family]:
  """Returns the experiment that a configuration is of, and what it says of Hugging Face."""
  bases = {base for cls in registry.registered().values() for base in cls.__mro__}
  families = {
    base: family
    for base in bases
    if "hugging_face" in vars(base) and (family := base.hugging_face()) is not None
  }
  fitting = {base: f for base, f in families.items() if not f.mismatch(config)}
  if fitting:
    ((base, family),) = fitting.items()
    return base, family
  same = [f for f in families.values() if f.model_type == config.get("model_type")]
  if same:
    reasons = "; ".join(sorted({family.mismatch(config) for family in same}))
    raise UserError(f"{path / 'config.json'} is of no family that paxlike has: {reasons}.")
  known = ", ".join(sorted({family.model_type for family in families.values()}))
  raise UserError(
    f"{path / 'config.json'}: model_type is {config.get('model_type')!r}; paxlike has {known}."
  )
