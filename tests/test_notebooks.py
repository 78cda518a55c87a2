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


TRAINS = """
import pathlib, paxlike
pathlib.Path("text.txt").write_text("some words " * 2000)
small = {"NUM_LAYERS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32, "MAX_SEQ_LEN": 16, "NUM_HEADS": 2}
small |= {"VOCAB_SIZE": 257, "DIMS_PER_HEAD": 8, "PERCORE_BATCH_SIZE": 1}
run = paxlike.train(
  "Text126M", "run", DATA_PATH="text.txt", MAX_STEPS=3, SUMMARY_INTERVAL_STEPS=1, **small
)
"""


@pytest.mark.slow
def test_a_run_in_a_notebook_has_a_bar_and_a_loss_curve(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
  notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(TRAINS)])
  folder = {"metadata": {"path": str(tmp_path)}}
  nbclient.NotebookClient(notebook, timeout=600, resources=folder).execute()
  outputs = notebook.cells[0].outputs
  (curve,) = [output for output in outputs if output.output_type == "display_data"]
  assert "image/png" in curve.data  # The placeholder was replaced.
  printed = "".join(output.text for output in outputs if output.output_type == "stream")
  assert "1/3  loss" in printed and "completed step: 2" in printed


def test_there_are_notebooks_with_the_outputs_that_pages_show():
  cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
  assert len(NOTEBOOKS) == 3
  assert all(cell.outputs for cell in cells if cell.source.startswith("!paxlike"))
