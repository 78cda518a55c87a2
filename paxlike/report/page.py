# SPDX-License-Identifier: Apache-2.0
"""The page: one HTML file with its style, its scripts and its data, and no reference elsewhere."""

import base64
import hashlib
import importlib.resources
import json
import time
from collections.abc import Sequence
from typing import Any

import paxlike
from paxlike.report import run_data, sections
from paxlike.report.html_text import Html, element, void
from paxlike.report.run_data import RunData
from paxlike.telemetry import metric_files

_SCRIPTS = ("scales.js", "charts.js", "heat_maps.js", "page.js")


def html(runs: Sequence[RunData], *, title: str) -> str:
  """Returns the page of these runs."""
  script = "\n".join(_asset(name) for name in _SCRIPTS)
  when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
  head = [
    void("meta", charset="utf-8"),
    void("meta", name="viewport", content="width=device-width, initial-scale=1"),
    void("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
    element("title", title),
    element("style", Html(_asset("page.css"))),
  ]
  body = [
    element(
      "header",
      element("h1", title),
      element("p", f"Made {when} by paxlike {paxlike.__version__}", class_="note"),
      element("button", "Light or dark", type="button", id="theme", class_="scripted"),
    ),
    element("main", sections.everything(runs, _curves(), _layers(runs))),
    element("script", Html(data(runs)), type="application/json", id="data"),
    element("script", Html(script)),
  ]
  page = element("html", element("head", *head), element("body", *body), lang="en")
  return f"<!DOCTYPE html>\n{page}\n"


def data(runs: Sequence[RunData]) -> str:
  """Returns the runs as JSON for the scripts; no character in it can end its element."""
  found = [
    {
      "name": run.name,
      "tokensPerStep": _tokens_per_step(run),
      "records": run.records,
      "layers": run.layers,
    }
    for run in runs
  ]
  text = json.dumps({"runs": _finite(found)}, separators=(",", ":"), allow_nan=False)
  for character in "<>&\u2028\u2029":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def _tokens_per_step(run: RunData) -> int | None:
  """Returns the tokens of a step; None if unknown."""
  for record in run.records:
    speed, seconds = record.get("tokens_per_second"), record.get("seconds_per_step")
    if run_data.is_number(speed) and run_data.is_number(seconds):
      return round(speed * seconds)
  return None


def _finite(value: Any) -> Any:
  """Returns a value for strict JSON: numbers that are not finite become None."""
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in metric_files.clean(value).items()}
  if isinstance(value, list):
    return [_finite(item) for item in value]
  return None if isinstance(value, float) and value - value != 0 else value


def _policy(script: str) -> str:
  """Returns a policy that lets browsers run this script and load nothing."""
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _asset(name: str) -> str:
  return (importlib.resources.files("paxlike.report") / name).read_text("utf-8")


def _choice(name: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
  items = [element("option", text, value=value) for value, text in options]
  return element("label", f"{label} ", element("select", *items, id=name))


def _curves() -> Html:
  axes = [("updates", "updates"), ("tokens", "tokens"), ("hours", "hours since the start")]
  slider = void("input", type="range", id="smooth", min=0, max=0.99, step=0.01, value=0)
  controls = [
    _choice("x", "Over", axes),
    element("label", "Smoothing ", slider, " ", element("output", "0", id="smoothing")),
    element("label", void("input", type="checkbox", id="log"), " Logarithmic"),
    element("button", "Reset zoom", type="button", id="reset", disabled=True),
  ]
  help_ = (
    "Drag over a chart to zoom into it; Escape or a double click resets. Arrow keys move the"
    " values of a chart in focus, + and - zoom."
  )
  no_script = element("noscript", element("p", "Curves and heat maps need JavaScript."))
  return element(
    "section",
    element("h2", "Curves", id="curves-heading"),
    no_script,
    element("div", *controls, class_="controls scripted"),
    element("p", help_, class_="note scripted"),
    element("div", class_="charts", id="charts"),
    element(
      "details",
      element("summary", "More curves"),
      element("div", class_="charts", id="more-charts"),
      id="more",
      class_="scripted",
    ),
    id="curves",
    aria_labelledby="curves-heading",
  )


def _layers(runs: Sequence[RunData]) -> Html:
  found = [(str(number), run.name) for number, run in enumerate(runs) if run.layers]
  if not found:
    return Html("")
  controls = [
    _choice("heat-run", "Run", found),
    _choice("heat-statistic", "Metric", []),
    _choice("heat-group", "Group", []),
    element("label", void("input", type="checkbox", id="heat-log"), " Logarithmic"),
  ]
  return element(
    "section",
    element("h2", "Layers", id="layers-heading"),
    element("div", *controls, class_="controls scripted"),
    element("div", id="heat", class_="scripted"),
    id="layers",
    aria_labelledby="layers-heading",
  )
