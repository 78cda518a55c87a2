# SPDX-License-Identifier: Apache-2.0
"""The pages and pictures of --mode=transfer."""

import json

import numpy as np

from paxlike.cli import plot, transfer_page, transfer_plot
from paxlike.transfer.coordinate_check import Check, joined
from paxlike.transfer.rate_table import Table, Tables
from paxlike.transfer.shapes import Shape, Training

TRAINING = Training("Mine", 20, 768)
WIDTHS = (32, 64)


def sizes(last):
  """RMS of two activations, whose second grows to `last`."""
  rms = [np.array([1.0, 1.0]), np.array([1.0, last])]
  return joined(WIDTHS, [({"embedding": rms[0], "logits": one}, np.array([3.5])) for one in rms])


CHECK = Check(TRAINING, 0.01, {"standard": sizes(4.0), "mup": sizes(1.0), "broken": sizes(np.nan)})
TABLES = Tables(
  TRAINING,
  4,
  {
    "standard": Table(
      (0.01, 0.02, 0.04),
      {Shape(32, 2): np.array([2.0, 1, 2]), Shape(64, 2): np.array([1, 2, np.nan])},
    )
  },
)


def test_the_coordinate_check_shows_slopes():
  lines = [line.split() for line in transfer_page.of_check(CHECK).splitlines()]
  assert ["logits", "standard", "+2.000", "1", "4"] in lines
  assert ["embedding", "mup", "+0.000", "1", "1"] in lines
  text = transfer_page.of_check(CHECK)
  assert text.startswith("RMS of activations by MODEL_DIMS after 20 steps of 768 tokens of Mine at")
  assert "standard: the steepest slope is +2.000, of logits" in text
  facts = json.loads(json.dumps(transfer_page.facts_of_check(CHECK), allow_nan=False))
  assert facts["parametrizations"]["broken"]["slopes"] == {"embedding": 0, "logits": None}


def test_the_table_of_rates_shows_the_best():
  about, *lines = transfer_page.of_rates(TABLES).splitlines()
  assert "of 20 steps of 768 tokens of Mine, over 4 initial weights each, by" in about
  lines = [line.split() for line in lines]
  assert ["32", "2", "2.000", "1.000", "2.000", "0.02"] in lines
  assert ["64", "2", "1.000", "2.000", "-", "<0.01"] in lines
  assert "best rates differ by a factor of at least 2.00" in transfer_page.of_rates(TABLES)
  (facts,) = transfer_page.facts_of_rates(TABLES)["parametrizations"].values()
  assert [one["at_edge"] for one in facts["models"]] == [False, True]
  assert facts["models"][1]["losses"] == [1, 2, None]


def test_pictures_are_drawn(tmp_path):
  figure = transfer_plot.of_check(CHECK)
  assert [panel.get_title() for panel in figure.axes] == ["standard", "mup", "broken"]
  assert "logits  +2.00" in figure.axes[0].get_legend_handles_labels()[1]
  plot.save(figure, str(tmp_path / "a.png"))
  figure = transfer_plot.of_rates(TABLES)
  assert figure.axes[0].get_title() == "standard: best rates x 2.00"
  plot.save(figure, str(tmp_path / "b.png"))
