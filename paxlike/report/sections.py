# SPDX-License-Identifier: Apache-2.0
"""The sections of the page that are text, tables and bars: readable without JavaScript."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from paxlike.config import graph_text
from paxlike.report import mesh_picture
from paxlike.report.html_text import (
  NUM_COLORS,
  Html,
  bar,
  details,
  element,
  joined,
  section,
  table,
  void,
)
from paxlike.report.run_data import RunData, is_number
from paxlike.telemetry import formatting, goodput

_DASHES = ("", "7 4", "2 3")
_MAX_LINES = 200  # Of the difference between two graphs.
_NOT_METRICS = ("kind", "set", "step", "updates", "time", "loss", "num_predictions", "num_examples")


def runs(found: Sequence[RunData]) -> Html:
  """Returns the table of the runs, whose check boxes show and hide their curves."""
  sets = sorted({name for run in found for name in run.eval_sets})
  header = ["run", "state", "updates", "training loss", *(f"loss of {name}" for name in sets)]
  header += ["tokens/s", "s/step"]
  has_mfu = any(run.typical("mfu_causal") is not None for run in found)
  header += ["MFU"] if has_mfu else []
  rows = []
  for number, run in enumerate(found):
    state = element("span", run.state or "unknown", class_=f"state {run.state or 'unknown'}")
    rows.append(
      [
        _legend(number, run.name),
        state,
        "" if run.progress is None else f"{run.progress[0]:,} of {run.progress[1]:,}",
        formatting.number(run.last("train", "loss")),
        *(formatting.number(run.last("eval", "loss", of=name)) for name in sets),
        formatting.number(run.typical("tokens_per_second")),
        formatting.number(run.typical("seconds_per_step")),
        *([_percent(run.typical("mfu_causal"))] if has_mfu else []),
      ]
    )
  folders = table(
    ("run", "experiment", "folder"),
    [(run.name, run.config.experiment, run.folder) for run in found],
    label="Folders",
    numbers=False,
  )
  note = "Losses are the newest; speeds are medians without the first fifth of the records."
  content = [table(header, rows, label="Runs"), element("p", note, class_="note"), *_notes(found)]
  return section("runs", "Runs", *content, details("Experiments and folders", folders))


def _legend(number: int, name: str) -> Html:
  dash = _DASHES[number // NUM_COLORS % len(_DASHES)]
  line = element(
    "svg",
    element("line", x1=0, y1=6, x2=28, y2=6, stroke_dasharray=dash or False),
    class_=f"line s{number % NUM_COLORS}",
    width=28,
    height=12,
    aria_hidden="true",
  )
  box = void("input", type="checkbox", checked=True, data_run=number)
  return element("label", box, " ", line, " ", name)


def _notes(found: Sequence[RunData]) -> list[Html]:
  """Returns what is damaged or left out, in a sentence each."""
  lines = [f"{run.name}: {note}" for run in found for note in (*run.notes, *run.config.notes)]
  if left_out := sum(run.left_out for run in found):
    lines.append(
      f"{left_out:,} records of training are left out (--max_records): of each stretch of a run,"
      " those of the least and the largest loss are shown."
    )
  return [element("p", line, class_="note") for line in lines]


def knobs(found: Sequence[RunData]) -> Html:
  """Returns the knobs that differ between runs, or those that a single run sets, and the others."""
  names = list(dict.fromkeys(name for run in found for name in run.config.knobs))
  if not names:
    return Html("")
  values = {name: [_value(run, name) for run in found] for name in names}
  if len(found) == 1:
    title, rest = "Knobs that were set", "All knobs"
    shown = {name: values[name] for name in found[0].config.changed}
    same = values
    empty = "No knob was set: all values are those of the experiment."
  else:
    title, rest = "Knobs that differ", "Knobs with the same value in all runs"
    shown = {name: of for name, of in values.items() if len(set(of)) > 1}
    same = {name: of for name, of in values.items() if name not in shown}
    empty = "No knob differs between the runs."
  header, rows = ("knob", *(run.name for run in found)), [(n, *of) for n, of in shown.items()]
  if len(found) > len(shown) > 0:
    # A row a run instead of a row a knob.
    header, *rows = zip(("run", *header[1:]), *rows, strict=True)
  first = table(header, rows, label=title, numbers=False) if rows else element("p", empty)
  others = [(name, of[0]) for name, of in same.items()]
  folded = details(rest, table(("knob", "value"), others, label=rest, numbers=False))
  return section("knobs", title, first, folded, *_graphs(found))


def _value(run: RunData, name: str) -> Html:
  """Returns the value of a knob, or why it has none."""
  config = run.config
  if name in config.knobs:
    return element("code", config.knobs[name])
  # If the experiment could not be loaded, only the knobs that were set are known.
  reason = "default" if config.knobs == config.changed else "no such knob"
  return element("span", reason, class_="note")


def _graphs(found: Sequence[RunData]) -> list[Html]:
  """Returns how the graphs differ from that of the first run, whether by knobs or otherwise."""
  first, *others = found
  parts = []
  for run in others:
    if first.config.graph is None or run.config.graph is None:
      continue
    lines = graph_text.difference(first.config.graph, run.config.graph).splitlines()
    if lines:
      more = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
      text = element("pre", "\n".join([*lines[:_MAX_LINES], *more]), tabindex=0)
      parts.append(details(f"Graph of {run.name}, compared with {first.name}", text))
  return parts


def evaluations(found: Sequence[RunData]) -> Html:
  """Returns a table for each eval set: the newest metrics of each run, and its least loss."""
  tables = []
  for name in sorted({name for run in found for name in run.eval_sets}):
    of_run = {
      run.name: [r for r in run.records if r.get("kind") == "eval" and r.get("set") == name]
      for run in found
    }
    newest = {run: records[-1] for run, records in of_run.items() if records}
    metrics = list(dict.fromkeys(key for record in newest.values() for key in record))
    metrics = [key for key in metrics if key not in _NOT_METRICS and not key.endswith("_stderr")]
    rows = []
    for run, record in newest.items():
      losses = [(r["loss"], r["updates"]) for r in of_run[run] if is_number(r.get("loss"))]
      best = "" if not losses else f"{formatting.number(min(losses)[0])} (after {min(losses)[1]:,})"
      cells = [_with_error(record, key) for key in metrics]
      rows.append((run, f"{record['updates']:,}", *cells, best))
    header = ("run", "updates", *metrics, "least loss")
    tables += [element("h3", name), table(header, rows, label=f"Newest evaluation on {name}")]
  return section("evaluation", "Evaluation", *tables)


def _with_error(record: Mapping[str, Any], key: str) -> str:
  error = record.get(f"{key}_stderr")
  return formatting.number(record.get(key)) + (f" ± {error:.2g}" if is_number(error) else "")


def time_spent(found: Sequence[RunData]) -> Html:
  """Returns on what the time of each run was spent since its first start."""
  parts = []
  for run in found:
    if run.goodput is None:
      continue
    ledger = run.goodput
    seconds = {goodput.CATEGORIES[name]: s for name, s in ledger.seconds.items() if s > 0}
    texts = {
      name: f"{_duration(value)} ({value / max(ledger.wall, 1e-9):.1%})"
      for name, value in seconds.items()
    }
    starts = f"in {ledger.attempts} recorded starts" if ledger.attempts > 1 else "in one start"
    line = f"{ledger.share:.1%} of {_duration(ledger.wall)} {starts} were steps that count."
    parts += [element("h3", run.name), element("p", line)]
    parts.append(bar(seconds, texts, label=f"Time of {run.name}"))
  return section("goodput", "Goodput", *parts)


def memory(found: Sequence[RunData]) -> Html:
  """Returns the memory of a device: the training state by kind, and the measured peaks.

  Runs with the same training state share a bar.
  """
  parts = []
  for same in _grouped(found, lambda run: tuple(run.config.memory.items())):
    state = same[0].config.memory
    kinds: dict[str, float] = {kind: one.per_device for kind, one in state.items()}
    texts = {
      kind: f"{formatting.nbytes(one.per_device)} ({formatting.nbytes(one.total)} in total)"
      for kind, one in state.items()
    }
    device, host = (_peak(same, name) for name in ("device", "host"))
    lines = ["These devices do not report their peak."] if kinds and device is None else []
    if device is not None:
      lines.append(f"Measured peak of a device: {formatting.nbytes(device)}.")
      if kinds and device > sum(kinds.values()):
        rest = "activations, gradients and temporaries"
        kinds[rest] = device - sum(kinds.values())
        texts[rest] = f"{formatting.nbytes(kinds[rest])} (peak without the rest)"
    if host is not None:
      lines.append(f"Measured peak of the process on its host: {formatting.nbytes(host)}.")
    if lines:
      parts += [element("h3", _names(same)), element("p", " ".join(lines))]
    if kinds:
      parts.append(bar(kinds, texts, label=f"Memory of a device of {_names(same)}"))
  note = "The training state is computed from shapes and shardings, per device."
  return section("memory", "Memory", *parts, parts and element("p", note, class_="note"))


def _peak(runs: Iterable[RunData], name: str) -> int | None:
  return max((run.peaks[name] for run in runs if name in run.peaks), default=None)


def _grouped(found: Iterable[RunData], key: Callable[[RunData], Hashable]) -> list[list[RunData]]:
  """Returns the runs in groups of the same key, in the order of their first runs."""
  groups: dict[Hashable, list[RunData]] = {}
  for run in found:
    groups.setdefault(key(run), []).append(run)
  return list(groups.values())


def _names(runs: Sequence[RunData], *, most: int = 6) -> str:
  shown = ", ".join(run.name for run in runs[:most])
  return shown if len(runs) <= most else f"{shown} and {len(runs) - most} more"


def meshes(found: Sequence[RunData]) -> Html:
  """Returns a picture of each mesh, with the runs that have it."""
  parts = []
  known = [run for run in found if run.config.mesh]
  for same in _grouped(known, lambda run: tuple(run.config.mesh.items())):
    names = "" if len(same) == len(found) else element("h3", _names(same))
    parts += [names, mesh_picture.picture(same[0].config.mesh)]
  return section("mesh", "Mesh", *parts)


def samples(found: Sequence[RunData]) -> Html:
  """Returns the texts that the runs have generated, the newest first."""
  parts = []
  for run in found:
    figures = [
      element(
        "figure",
        element("figcaption", sample["source"]),
        element("pre", element("b", sample["prompt"]), sample["text"], tabindex=0),
      )
      for sample in reversed(run.samples)
    ]
    if figures:
      title = f"{run.name}: {len(figures)} sample{'s'[: len(figures) != 1]}"
      parts.append(details(title, *figures, opened=not parts))
  return section("samples", "Samples", *parts)


def _percent(value: float | None) -> str:
  return "" if value is None else f"{value:.1%}"


def _duration(seconds: float) -> str:
  return f"{seconds:.1f} s" if seconds < 60 else formatting.duration(seconds)


def everything(found: Sequence[RunData], curves: Html, layers: Html) -> Html:
  """Returns all sections that have content, in order; `curves` and `layers` are drawn later."""
  parts = [runs(found), curves, knobs(found), evaluations(found), time_spent(found), layers]
  return joined([*parts, samples(found), memory(found), meshes(found)])
