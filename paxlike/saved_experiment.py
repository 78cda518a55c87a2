# SPDX-License-Identifier: Apache-2.0
"""Reads the experiment of a run or a converted model from its folder."""

from collections.abc import Sequence

from etils import epath

from paxlike import file_io, registry, run_folder
from paxlike.config import allowed_symbols, graph_file
from paxlike.config.graph_data import Part
from paxlike.errors import UserError
from paxlike.experiment import Experiment

FILE = "experiment.json"


def read(
  folder: epath.Path, knobs: Sequence[tuple[str, str]], *, allow_modules: Sequence[str] = ()
) -> Experiment:
  """Returns the experiment of a run, with `knobs` of the command line set.

  Args:
    folder: The run's folder.
    knobs: (name, text) pairs.
    allow_modules: Modules outside of paxlike that the run may use.

  Raises:
    UserError: The folder has no experiment, or the run's graph is not the one of its knobs, because
      fiddlers or other flags edited it.
  """
  given = f"--fdl.{knobs[0][0]}={knobs[0][1]}" if knobs else "--fdl_help"
  advice = "set --fdl_config=NAME and the flags that the run was started with"
  if not (folder / FILE).exists():
    raise UserError(f"{given} needs {folder / FILE}, which is missing: {advice}.")
  experiment = registry.load(folder / FILE, allow_modules=allow_modules)
  if graph_file.difference(experiment.trainer(), graph(folder)):
    raise UserError(
      f"{given}: {folder / 'config.json'} differs from the graph of the knobs in {FILE}: {advice}."
    )
  experiment.reset_reads()
  for name, text in knobs:
    experiment.set(name, text, source="command line")
  return experiment


def foreign_modules(folder: epath.PathLike) -> list[str]:
  """Returns the modules outside of paxlike that the graph and the experiment of a run need.

  Raises:
    UserError: A file of the run is damaged.
  """
  folder = epath.Path(folder)
  found: list[str] = []
  with run_folder.reading(folder):
    if (path := folder / "config.json").exists():
      found += allowed_symbols.foreign(graph_file.names(file_io.read_bytes(path)))
    if (path := folder / FILE).exists():
      found += filter(None, [registry.foreign_module(path)])
  return list(dict.fromkeys(found))


def graph(folder: epath.PathLike) -> Part:
  """Returns the root graph of a run or a converted model as `graph_data`; imports nothing.

  Raises:
    UserError: It cannot be read, or is not the graph of a run.
  """
  path = epath.Path(folder) / "config.json"
  found = graph_file.read_data(path)
  if not isinstance(found, Part) or "model" not in found.arguments:
    raise UserError(f"{path} is damaged: it is not the graph of a run.")
  return found
