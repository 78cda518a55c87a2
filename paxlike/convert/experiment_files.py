# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a run's folder that describe its experiment."""

import pathlib
from typing import Any

from paxlike import registry
from paxlike.config import graph_file
from paxlike.experiment import Experiment


def write(folder: pathlib.Path, graph: Any, experiment: Experiment):
  """Writes an experiment and its root graph into a folder.

  Raises:
    OSError: A file cannot be written.
  """
  (folder / "config.json").write_text(graph_file.dump(graph))
  (folder / "config.txt").write_text(graph_file.describe(graph) + "\n")
  (folder / "experiment.json").write_text(registry.dump(experiment))
