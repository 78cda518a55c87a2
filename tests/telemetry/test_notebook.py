# SPDX-License-Identifier: Apache-2.0
"""In a notebook, a loss curve is drawn while a run trains."""

import json
import sys
import types

import pytest

from paxlike.telemetry import console, notebook

PNG = b"\x89PNG"


class Display:
  """What `IPython.display` does, recorded."""

  def __init__(self):
    self.shown = []

  def display(self, what, *, display_id):
    assert display_id
    self.shown.append(what)
    return types.SimpleNamespace(update=self.shown.append)

  HTML = Image = staticmethod(lambda data: data)


def record(updates, **more):
  return {"kind": "train", "updates": updates, "loss": 1 / updates, **more}


@pytest.fixture
def display():
  return Display()


def test_the_curve_is_drawn_with_records_and_at_the_end(display, tmp_path):
  lines = [record(1), record(2), record(9)]  # The last is after the checkpoint.
  (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  curve = notebook.LossCurve(display)
  curve.on_start(2, tmp_path)
  assert display.shown == [""]
  curve.on_record(record(3))
  curve.on_record(record(4, loss=None))  # Not finite.
  curve.on_record(record(4, kind="eval", set="validation"))
  assert [image[:4] for image in display.shown[1:]] == [PNG]  # Seldom: drawing takes time.
  curve.on_end("finished")
  assert len(display.shown) == 3 and display.shown[2] != display.shown[1]
  assert [point[0] for point in curve._points["training"]] == [1, 2, 3]


def test_nothing_is_drawn_without_records(display, tmp_path):
  curve = notebook.LossCurve(display)
  curve.on_start(0, tmp_path)
  curve.on_end("failed")
  assert display.shown == [""]


def test_there_is_a_curve_only_in_a_notebook_with_matplotlib(monkeypatch):
  assert notebook.callbacks() == []
  monkeypatch.setattr(notebook, "in_notebook", lambda: True)
  assert [type(one) for one in notebook.callbacks()] == [notebook.LossCurve]
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  assert notebook.callbacks() == []
  assert not console.in_notebook()
