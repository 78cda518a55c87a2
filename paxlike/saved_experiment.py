# SPDX-License-Identifier: Apache-2.0
"""The experiment of a run or of a converted model, for commands that name only its folder."""

from collections.abc import Sequence

from etils import epath

from paxlike import config_file, registry
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.graph_data import Part

FILE = "experiment.json"


def read(folder: epath.Path, knobs: Sequence[tuple[str, str]]) -> Experiment:
  """Returns the experiment of a run, with other values of knobs as the command line gives them.

  Raises:
    UserError: The folder does not say what its experiment was, or the run was more than its knobs:
      its graph was edited.
  """
  given = f"--fdl.{knobs[0][0]}={knobs[0][1]}"
  advice = "give --fdl_config=NAME and what the run began with"
  if not (folder / FILE).exists():
    raise UserError(f"{given} needs {folder / FILE}, which is not there: {advice}.")
  experiment = registry.load(folder / FILE)
  if config_file.difference(experiment.trainer(), graph(folder)):
    raise UserError(
      f"{given}: {folder / 'config.json'} is not what the knobs of {FILE} make: {advice}."
    )
  experiment.reset_reads()
  for name, text in knobs:
    experiment.set(name, text, source="command line")
  return experiment


def graph(folder: epath.PathLike) -> Part:
  """Returns the root graph of a run or of a converted model, as data: it imports nothing.

  Raises:
    UserError: It cannot be read, or is no graph of a run.
  """
  path = epath.Path(folder) / "config.json"
  found = config_file.read_data(path)
  if not isinstance(found, Part) or "model" not in found.arguments:
    raise UserError(f"{path} is damaged: it is no graph of a run.")
  return found
