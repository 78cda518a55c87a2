# SPDX-License-Identifier: Apache-2.0
"""The page in a real Chromium: it draws, zooms, fits a phone, and asks for nothing."""

import json
import pathlib

import pytest
from helpers import chromium, reported_runs

from paxlike.report import main

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="there is no Chromium")
CHART = "document.querySelector('.plot')"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
  """The page of two runs."""
  folder = tmp_path_factory.mktemp("report")
  paths = [
    reported_runs.write(folder / "a", layers=6, sample="main():\n  <b>pass</b>"),
    reported_runs.write(folder / "b", rate=3.0, knobs={"NUM_LAYERS": "2"}, state="failed"),
  ]
  assert main.run([*paths, f"--to={folder / 'page.html'}"]) == 0
  return folder / "page.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  """A page of one Chromium for all tests."""
  with chromium.running(tmp_path_factory.mktemp("profile")) as found:
    yield found


def axis(page: chromium.Page) -> list[str]:
  """The labels of the axes of the first chart."""
  return json.loads(
    page.run(f"JSON.stringify([...{CHART}.querySelectorAll('text')].map((t) => t.textContent))")
  )


def tip(page: chromium.Page) -> str:
  return page.run(
    "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').innerText"
  )


def place(page: chromium.Page, across: float, down: float = 0.5) -> tuple[float, float]:
  """The place of a share of the first chart's drawing area."""
  box = json.loads(page.run(f"JSON.stringify({CHART}.getBoundingClientRect())"))
  left, right, top, bottom = 52, 8, 8, 22
  return (
    box["x"] + left + across * (box["width"] - left - right),
    box["y"] + top + down * (box["height"] - top - bottom),
  )


@pytest.mark.parametrize("width, dark", [(1200, False), (360, True)])
def test_page_draws_fits_and_asks_for_nothing(page, file, width, dark, tmp_path):
  page.open(file, width=width, dark=dark)
  assert page.run("document.querySelectorAll('#charts .chart path.curve').length") == 2 * 5
  assert page.run("document.documentElement.scrollWidth") <= width
  assert page.run("document.querySelector('#heat canvas').width") > 0
  ground = page.run("getComputedStyle(document.body).backgroundColor")
  assert ground == ("rgb(16, 19, 23)" if dark else "rgb(246, 247, 249)")
  page.picture(tmp_path / "page.png")
  assert (tmp_path / "page.png").stat().st_size > 20_000
  assert page.problems == []


def test_hovering_shows_the_records_values(page, file):
  page.open(file)
  records = page.run("JSON.parse(document.getElementById('data').textContent).runs[0].records")
  page.mouse("mouseMoved", *place(page, 1.0))
  loss = next(r["loss"] for r in reversed(records) if r["kind"] == "train")
  assert f"{loss:.5g} a" in tip(page).replace("\n", " ") and "updates 60" in tip(page)
  page.mouse("mouseMoved", 5, 5)
  assert tip(page) == ""


def test_dragging_zooms_all_charts_and_escape_resets(page, file):
  page.open(file)
  whole = axis(page)
  page.drag(place(page, 0.5), place(page, 0.75))
  zoomed = axis(page)
  assert zoomed != whole and "0" not in zoomed
  low, high = page.run("view.zoom")
  assert low == pytest.approx(30.5, abs=0.5) and high == pytest.approx(45.25, abs=0.5)
  labels = "[...svg.querySelectorAll('text')].map((text) => text.textContent)"
  every = page.run(f"[...document.querySelectorAll('#charts .plot')].map((svg) => {labels})")
  assert len(every) == 5 and all("40" in one and "60" not in one for one in every)
  assert page.run("document.getElementById('reset').disabled") is False
  page.run(f"{CHART}.focus()")
  page.key("Escape")
  assert axis(page) == whole and page.run("document.getElementById('reset').disabled")


def test_keys_move_the_values_and_zoom(page, file):
  page.open(file)
  page.run(f"{CHART}.focus()")
  page.key("ArrowRight")
  first = tip(page)
  page.key("ArrowRight")
  assert first and tip(page) not in ("", first)
  whole = axis(page)
  page.key("+")
  assert axis(page) != whole


def test_controls_change_the_curves(page, file):
  page.open(file)
  curve = f"{CHART}.querySelector('.curve').getAttribute('d')"
  plain = page.run(curve)

  def change(name: str, script: str, event: str = "change"):
    element = f"document.getElementById('{name}')"
    page.run(f"{element}.{script}; {element}.dispatchEvent(new Event('{event}'))")

  change("smooth", "value = 0.9", "input")
  smooth = page.run(curve)
  assert smooth != plain and page.run(f"{CHART}.querySelectorAll('.raw').length") == 2
  change("smooth", "value = 0", "input")
  assert page.run(curve) == plain
  change("log", "checked = true")
  assert page.run(curve) != plain and "2" in axis(page)
  change("log", "checked = false")
  change("x", "value = 'hours'")
  assert "0.03" in axis(page)
  page.run("document.querySelector('[data-run]').click()")
  assert page.run(f"{CHART}.querySelectorAll('.curve').length") == 1


def test_heat_map_has_a_color_for_each_value(page, file):
  page.open(file)
  colors = page.run(
    "(() => { const canvas = document.querySelector('#heat canvas');"
    " const cell = [canvas.width / 12, canvas.height / 6];"
    " const at = (column, row) => [...canvas.getContext('2d').getImageData("
    "(column + 0.5) * cell[0], (row + 0.5) * cell[1], 1, 1).data];"
    " return [at(11, 0), at(0, 5)]; })()"
  )
  assert colors == [[253, 231, 37, 255], [68, 1, 84, 255]]  # The ends of the scale.
  page.run("document.querySelector('#heat canvas').focus()")
  page.key("ArrowRight")
  assert "layer 0 after 10 updates" in page.run("document.querySelector('#heat .tip').innerText")
  select = "document.getElementById('heat-statistic')"
  page.run(f"{select}.value = 'rms'; {select}.dispatchEvent(new Event('change'))")
  label = page.run("document.querySelector('#heat canvas').ariaLabel")
  assert "rms of stream" in label


def test_every_control_has_a_name_and_every_picture_says_what_it_shows(page, file):
  page.open(file)
  tree = page.send("Accessibility.getFullAXTree")["nodes"]
  named = (
    "button",
    "checkbox",
    "combobox",
    "slider",
    "image",
    "table",
    "region",
    "DisclosureTriangle",
  )
  nodes = [n for n in tree if n.get("role", {}).get("value") in named and not n.get("ignored")]
  assert len(nodes) > 20
  nameless = [n for n in nodes if not n.get("name", {}).get("value")]
  assert nameless == []


def test_tables_and_notes_are_there_without_javascript(page, file):
  page.send("Emulation.setScriptExecutionDisabled", value=True)
  try:
    page.load(file)
    root = page.send("DOM.getDocument")["root"]
    text = page.send("DOM.getOuterHTML", nodeId=root["nodeId"])["outerHTML"]
  finally:
    page.send("Emulation.setScriptExecutionDisabled", value=False)
  assert "Curves and heat maps need JavaScript." in text and "NUM_LAYERS" in text
