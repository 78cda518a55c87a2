# SPDX-License-Identifier: Apache-2.0
"""The notebooks of examples/ run from the first cell to the last."""

import os

import nbclient
import nbformat
import pytest
from helpers import pages
from helpers.sources import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", f"{pages.shell(tmp_path / 'bin')}:{os.environ['PATH']}")
  monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
  notebook = nbformat.read(path, as_version=4)
  folder = {"metadata": {"path": str(tmp_path)}}
  nbclient.NotebookClient(notebook, timeout=1200, resources=folder).execute()


def test_there_are_notebooks_with_the_outputs_that_pages_show():
  cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
  assert len(NOTEBOOKS) == 3
  assert all(cell.outputs for cell in cells if cell.source.startswith("!paxlike"))
