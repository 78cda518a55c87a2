# SPDX-License-Identifier: Apache-2.0
"""What the configuration files of a run say: knobs, graph, mesh, memory of the training state."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from etils import epath

from paxlike import file_io, registry, run_folder, saved_experiment
from paxlike.config import building, graph_file
from paxlike.config.graph_data import Part
from paxlike.config.knobs import UNSET, spell
from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.training import state_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """The configuration of a run, as far as it can be read here.

  Attributes:
    experiment: The name of its class; "" if unknown.
    knobs: Every knob as text; only those of `changed` if the experiment cannot be loaded.
    changed: The knobs that were set for this run.
    graph: Its root graph; None if unknown.
    mesh: Axis -> (ICI, DCN) size; empty if unknown.
    memory: Kind -> bytes of the training state.
    notes: What could not be read, and why.
  """

  experiment: str = ""
  knobs: dict[str, str] = dataclasses.field(default_factory=dict)
  changed: dict[str, str] = dataclasses.field(default_factory=dict)
  graph: Part | None = None
  mesh: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  memory: dict[str, state_memory.Bytes] = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()

  @property
  def axis_sizes(self) -> dict[str, int]:
    """Axis -> size of the mesh."""
    return {axis: math.prod(sizes) for axis, sizes in self.mesh.items()}


def read(
  folder: epath.Path, *, num_devices: int | None = None, allow_modules: Sequence[str] = ()
) -> RunConfig:
  """Returns the configuration of the run in `folder`; uses no device, and opens no data.

  Args:
    folder: The run's folder.
    num_devices: How many devices it ran on; None: unknown, and -1 in the mesh counts as 1.
    allow_modules: Modules outside of paxlike that its files may import.
  """
  found: dict[str, Any] = {}
  notes = []
  readers = (
    lambda: _knobs(folder, allow_modules),
    lambda: _mesh(folder, num_devices),
    lambda: _memory(folder, found["mesh"], allow_modules) if "mesh" in found else {},
  )
  for reader in readers:
    try:
      found |= reader()
    except UserError as error:
      notes.append(str(error))
  if not found.get("knobs"):
    found |= _names_only(folder)
  return RunConfig(**found, notes=tuple(dict.fromkeys(notes)))


def _knobs(folder: epath.Path, allow_modules: Sequence[str]) -> dict[str, Any]:
  path = folder / saved_experiment.FILE
  with run_folder.reading(path):
    if not path.exists():
      return {}
  experiment = registry.load(path, allow_modules=allow_modules)
  known = {n: s.value for n, s in experiment.values().items() if s.value is not UNSET}
  return {
    "experiment": type(experiment).__name__,
    "knobs": {name: spell(value) for name, value in known.items()},
    "changed": {name: spell(setting.value) for name, setting in experiment.settings().items()},
  }


def _names_only(folder: epath.Path) -> dict[str, Any]:
  """Returns what the experiment's file says, without the experiment; {} if it is damaged."""
  try:
    name, knobs, _ = registry.read_saved(folder / saved_experiment.FILE)
  except UserError:
    return {}
  return {"experiment": name.rpartition(".")[2], "knobs": knobs, "changed": knobs}


def _mesh(folder: epath.Path, num_devices: int | None) -> dict[str, Any]:
  with run_folder.reading(folder / "config.json"):
    if not (folder / "config.json").exists():
      return {}
  graph = saved_experiment.graph(folder)
  part = graph.arguments.get("mesh")
  arguments = part.arguments if isinstance(part, Part) else {}
  try:
    spec = mesh.MeshSpec(**{str(name): value for name, value in arguments.items()})
    sizes = _sizes(spec, num_devices)
  except file_io.MALFORMED as error:
    raise UserError(f"{folder / 'config.json'}: the mesh cannot be read: {error}") from error
  return {"graph": graph, "mesh": sizes}


def _sizes(spec: mesh.MeshSpec, num_devices: int | None) -> dict[str, tuple[int, int]]:
  """Returns axis -> (ICI, DCN) size; of several TPU slices, which the mesh need not name, too."""
  try:
    ici, dcn = spec.sizes(num_devices)
  except UserError:
    ici, dcn = spec.sizes(None)
    slices, rest = divmod(num_devices or 1, math.prod(ici.values()))
    if not rest and slices > 1:
      ici, dcn = spec.sizes(num_devices, slices=slices)
  return {axis: (ici[axis], dcn[axis]) for axis in mesh.AXES}


def _memory(
  folder: epath.Path, sizes: dict[str, tuple[int, int]], allow_modules: Sequence[str]
) -> dict[str, Any]:
  graph = graph_file.read(folder / "config.json", allow_modules=allow_modules)
  # The data of the run need not be on this machine.
  graph.train_data, graph.eval_data = None, {}
  trainer: Any = building.build(graph)
  kinds = state_memory.by_kind(trainer, {axis: ici * dcn for axis, (ici, dcn) in sizes.items()})
  return {"memory": kinds}
