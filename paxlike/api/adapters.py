# SPDX-License-Identifier: Apache-2.0
"""Adapters of several runs, with which one base model decodes."""

import copy
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx

from paxlike import fiddlers, file_io, run_folder, run_mode
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import PROVENANCE, Restore, began_with
from paxlike.config import building, graph_file
from paxlike.convert.stored import Stored
from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.fiddlers import matmuls
from paxlike.layers import Definition, Linear
from paxlike.layers.module import Params
from paxlike.layers.stack import layout_of
from paxlike.training import evaluated_weights
from paxlike.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Adapters:
  """A base model with the adapters of several runs.

  Attributes:
    names: The name of each adapter, in the order of `Context.adapters_B`.
    trainer: The base's trainer, whose model has a place for all adapters.
    params: The weights of the adapters.
  """

  names: tuple[str, ...]
  trainer: Trainer
  params: Params

  def numbers(self, chosen: Any, num_prompts: int) -> list[int]:
    """Returns the number of each prompt's adapter, -1 for none.

    Args:
      chosen: The name of an adapter for all prompts or, in a list, of each; None is the base.
      num_prompts: Their number.

    Raises:
      UserError: A name is unknown, or there are not as many as prompts.
    """
    each = [chosen] * num_prompts if chosen is None or isinstance(chosen, str) else list(chosen)
    if len(each) != num_prompts:
      raise UserError(f"adapters: {len(each)} for {num_prompts} prompts: name one for each.")
    for name in each:
      if name is not None and name not in self.names:
        raise UserError(f"adapters: no {name!r}; there are {', '.join(self.names)}.")
    return [-1 if name is None else self.names.index(name) for name in each]


def load(
  graph: Any,
  base: epath.Path,
  step: int,
  folders: Mapping[str, str | os.PathLike[str]],
  *,
  allow_modules: Sequence[str] = (),
) -> Adapters:
  """Reads the adapters of runs and stacks them.

  Args:
    graph: The base's root graph, prepared for decoding.
    base: The folder of the base.
    step: The base's checkpoint.
    folders: Name -> the folder of a run that trained adapters of this checkpoint.
    allow_modules: Modules outside of paxlike that the runs' files may import.

  Raises:
    UserError: A run has no adapters or has some of another kind, or was trained on another base.
  """
  runs = [_Run(str(folder), allow_modules=allow_modules) for folder in folders.values()]
  for run in runs:
    run.check_base(base, step)
  rank = max(run.rank for run in runs)
  graph = copy.deepcopy(graph)
  roles = sorted({role for run in runs for role in run.roles.values()})
  fiddlers.lora_bank(graph, rank=rank, num_adapters=len(runs), roles=roles)
  trainer = run_mode.build_trainer(graph)
  weights = trainer.definition.weights
  layers = {name.removesuffix(".lora.a") for name in weights if name.endswith(".lora.a")}
  stacked = {
    f"{layer}.lora.{part}": np.zeros(weights[f"{layer}.lora.{part}"].shape, np.float32)
    for layer in sorted(layers)
    for part in ("a", "b")
  }
  for number, run in enumerate(runs):
    for layer in run.roles:
      place = slice(number * rank, number * rank + run.rank)
      a, b = run.read(layer)
      whole_a, whole_b = (stacked[f"{layer}.lora.{part}"] for part in ("a", "b"))
      whole_a[..., place], whole_b[place] = a, b
  with jax.set_mesh(trainer.devices):
    params = {
      name: jax.device_put(w, mesh.sharding(trainer.devices, weights[name].dims, w.shape))
      for name, w in stacked.items()
    }
  return Adapters(tuple(folders), trainer, params)


class _Run:
  """A run that trained adapters.

  Attributes:
    rank: Of its adapters.
    roles: Name of an adapted linear map -> its role.
  """

  def __init__(self, folder: str, *, allow_modules: Sequence[str]):
    self._folder = run_folder.existing(os.fspath(file_io.absolute(folder)))
    graph: Any = graph_file.read(self._folder / "config.json", allow_modules=allow_modules)
    fiddlers.decoding(graph)
    module: Any = building.build(graph.model)
    definition = Definition(module, trained=getattr(graph, "trained", ""))
    linears = {
      ".".join(map(str, path)): one
      for path, one in nnx.iter_modules(module)
      if isinstance(one, Linear) and one.lora is not None
    }
    roles = matmuls.lora_roles(module)
    self.roles = {name: roles[name] for name in linears}
    self._scales = {name: one.lora.scale for name, one in linears.items() if one.lora is not None}
    shapes = {n: spec.shape for n, spec in definition.weights.items() if ".lora." in n}
    if not shapes:
      raise UserError(f"{self._folder} has no adapters: it was not trained with USE_LORA.")
    plain = {f"{name}.lora.{part}" for name in linears for part in ("a", "b")}
    if other := sorted(shapes.keys() - plain):
      raise UserError(
        f"{self._folder} has {other[0]}: only adapters of linear maps in blocks, without LORA_DORA,"
        " can be decoded beside others; merge it with paxlike-convert."
      )
    self.rank = max(shape[-1] for name, shape in shapes.items() if name.endswith(".a"))
    directory = pathlib.Path(self._folder) / "checkpoints"
    self._stored = Stored(directory, None, layout_of(module))
    optimizer = building.build(graph.optimizer)
    self._stored.derive(evaluated_weights.derived(definition, optimizer))
    self._stored.check(shapes)

  def check_base(self, base: epath.Path, step: int):
    """Raises a UserError unless the adapters were trained on checkpoint `step` of `base`."""
    given = Restore(path=os.fspath(base), step=step)
    began = None
    if (self._folder / PROVENANCE).exists():  # Else all weights were initialized.
      began = began_with(self._folder, given=given, flag="the folder of paxlike.load")
    own = Checkpoints(given.folder, keep=None).at(step).identity()
    if began is None or began.step is None or began.saved.at(began.step).identity() != own:
      raise UserError(
        f"the adapters in {self._folder} were not trained on checkpoint {step} of {base}."
      )

  def read(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a and scale * b of a linear map's adapter."""
    a, b = (self._stored.read(f"{layer}.lora.{part}") for part in ("a", "b"))
    return np.asarray(a, np.float32), np.asarray(b, np.float32) * self._scales[layer]
