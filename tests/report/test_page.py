# SPDX-License-Identifier: Apache-2.0
"""The page of runs: what it holds, that it is strict, and that no text in it can do harm."""

import base64
import hashlib
import json
import pathlib
import re

import pytest
from etils import epath
from helpers import reported_runs, strict_html

from paxlike.report import main, page, run_data
from paxlike.telemetry import metric_files

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'\u2028"
PACKAGE = pathlib.Path(page.__file__).parent


def written(*paths: str, to: pathlib.Path) -> strict_html.Element:
  """Runs the command, and parses the page strictly."""
  assert main.run([*paths, f"--to={to}"]) == 0
  return strict_html.parse(to.read_text())


def embedded(document: strict_html.Element) -> list[dict]:
  (script,) = [e for e in document.all("script") if e.attributes.get("id") == "data"]
  return json.loads(script.text)["runs"]


def table(document: strict_html.Element, label: str) -> list[list[str]]:
  (found,) = [e for e in document.all("table") if any(c.words == label for c in e.all("caption"))]
  return [[cell.words for cell in row.all("th", "td")] for row in found.all("tr")]


def test_data_of_the_page_are_the_records_of_the_runs(tmp_path):
  paths = [
    reported_runs.write(tmp_path / name, rate=rate, layers=3)
    for name, rate in (("a", 1.0), ("b", 2.0))
  ]
  runs = embedded(written(*paths, to=tmp_path / "page.html"))
  assert [run["name"] for run in runs] == ["a", "b"]
  for run, path in zip(runs, paths, strict=True):
    records = list(metric_files.records(epath.Path(path)))
    assert run["records"] == [r for r in records if r["kind"] in ("train", "eval")]
    assert run["layers"] == [r for r in records if r["kind"] == "layers"]
    assert run["tokensPerStep"] == 20_480


def test_page_refers_to_nothing_else_and_runs_no_other_script(tmp_path):
  document = written(reported_runs.write(tmp_path / "a", layers=2), to=tmp_path / "page.html")
  for element in document.all():
    assert element.tag not in ("link", "iframe", "object", "embed", "base", "form")
    for name, value in element.attributes.items():
      assert name not in ("src", "href", "action") and not name.startswith("on")
      assert "url(" not in (value or "")
  (style,) = document.all("style")
  assert "url(" not in style.text and "@import" not in style.text
  data, script = document.all("script")
  assert data.attributes["type"] == "application/json"
  (policy,) = [
    e.attributes["content"]
    for e in document.all("meta")
    if e.attributes.get("http-equiv") == "Content-Security-Policy"
  ]
  digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
  assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'")


def test_text_of_runs_is_only_text(tmp_path):
  """Names of folders, eval sets and metrics, knobs and samples."""
  folder = tmp_path / "<script>alert(1)<" / "script>"
  path = reported_runs.write(folder, experiment="", sets=(EVIL,), sample=EVIL, layers=1)
  other = reported_runs.write(tmp_path / "<script>alert(1)<" / "b")
  knobs = {"experiment": f"mine.{EVIL}", "knobs": {EVIL: EVIL}}
  (folder / "experiment.json").write_text(json.dumps(knobs))
  (folder / "decode_out").mkdir()
  decoded = {"prompt": EVIL, "text": EVIL, "tokens": [1]}
  (folder / "decode_out" / "decode_00000060.jsonl").write_text(json.dumps(decoded) + "\n{")
  with (folder / "metrics.jsonl").open("a") as file:
    file.write(f"\n{json.dumps({'kind': 'train', 'updates': 61, 'loss': 1.0, EVIL: 2.0})}\n")
  document = written(path, other, to=tmp_path / "page.html")
  assert len(document.all("script")) == 2 and not document.all("img")
  assert [run["name"] for run in embedded(document)] == ["script>", "b"]
  assert any(path in cell for row in table(document, "Folders") for cell in row)
  plain = " ".join(EVIL.split())
  texts = [" ".join(element.text.split()) for element in document.all("pre", "b", "code", "h3")]
  assert sum(plain in text for text in texts) >= 5
  assert plain in " ".join(e.words for e in document.all("thead"))
  assert json.loads(json.dumps(embedded(document)))[0]["records"][-1][EVIL] == 2.0


def test_page_is_whole_without_configuration_status_or_speed(tmp_path):
  folder = tmp_path / "a"
  folder.mkdir()
  (folder / "metrics.jsonl").write_text('{"kind": "train", "updates": 1, "loss": null}\n')
  document = written(str(folder), to=tmp_path / "page.html")
  headings = [e.text for e in document.all("h2")]
  assert headings == ["Runs", "Curves"]
  assert table(document, "Runs")[1] == ["a", "unknown", "", "", "", ""]


def test_records_of_other_shapes_do_no_harm(tmp_path):
  folder = tmp_path / "a"
  path = reported_runs.write(folder, steps=20)
  odd = [
    {"kind": "train", "updates": 21, "loss": "low", "tokens_per_second": [1]},
    {"kind": "eval", "updates": 21, "loss": {}},
    {"kind": "eval", "set": "x", "updates": 21, "loss": "low", "m": "text", "m_stderr": "text"},
    {"kind": "layers", "updates": 21, "layers": {"norm": [1.0]}},
    {"kind": "layers", "updates": 21},
    {"kind": "sample", "updates": 21, "text": 3},
    {"kind": "new", "updates": 21},
    {"updates": 21},
  ]
  lines = "".join(f"{json.dumps(record)}\n" for record in odd)
  (folder / "metrics.jsonl").write_text(lines)
  document = written(path, to=tmp_path / "page.html")
  assert embedded(document)[0]["records"] == odd[:3] and embedded(document)[0]["layers"] == []
  assert table(document, "Newest evaluation on x")[1] == ["a", "21", "text", ""]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
  folder = tmp_path / "a"
  path = reported_runs.write(folder)
  for name in ("config.json", "experiment.json", "status.json"):
    (folder / name).write_text('{"graph": ')
  document = written(path, to=tmp_path / "page.html")
  notes = " ".join(e.words for e in document.all("p"))
  for name in ("config.json", "experiment.json", "status.json"):
    assert str(folder / name) in notes, name
  assert table(document, "Runs")[1][1] == "unknown"
  assert len(embedded(document)[0]["records"]) == 63


def test_knobs_that_differ_are_beside_each_other(tmp_path):
  paths = [
    reported_runs.write(tmp_path / name, knobs=knobs)
    for name, knobs in (("a", {}), ("b", {"LEARNING_RATE": "0.5"}))
  ]
  document = written(*paths, to=tmp_path / "page.html")
  header, first, second = table(document, "Knobs that differ")
  assert header == ["run", "LEARNING_RATE"] and first[0] == "a" and second == ["b", "0.5"]
  same = dict(table(document, "Knobs with the same value in all runs"))
  assert "NUM_LAYERS" in same and "LEARNING_RATE" not in same
  (graph,) = document.all("pre")
  assert "0.5  # was " in graph.text and len(graph.text.splitlines()) < 5


def test_graphs_that_differ_are_shown_even_if_no_knob_does(tmp_path):
  paths = [reported_runs.write(tmp_path / name) for name in ("a", "b")]
  config = tmp_path / "b" / "config.json"
  text = config.read_text()
  changed = re.sub(r'("num_steps": )\d+', r"\g<1>44", text)
  assert changed != text
  config.write_text(changed)
  document = written(*paths, to=tmp_path / "page.html")
  assert "No knob differs between the runs." in [e.text for e in document.all("p")]
  (graph,) = document.all("pre")
  assert re.fullmatch(r"graph\.num_steps = 44  # was \d+", graph.text)


def test_evaluations_have_their_newest_values_and_their_best(tmp_path):
  paths = [
    reported_runs.write(tmp_path / n, sets=("x", "y"), rate=r) for n, r in (("a", 1), ("b", 4))
  ]
  document = written(*paths, to=tmp_path / "page.html")
  header, first, second = table(document, "Newest evaluation on y")
  assert header == ["run", "updates", "log_pplx", "least loss"]
  assert first == ["a", "60", "3.349 ± 0.01", "3.349 (after 60)"]
  assert second[0] == "b" and second[2].startswith("3.1 ")


def test_results_of_evaluations_outside_of_training_are_shown_too(tmp_path):
  path = reported_runs.write(tmp_path / "a", sets=("x",))
  (folder := tmp_path / "a" / "eval_out" / "x").mkdir(parents=True)
  results = {50: {"log_pplx": 1.5}, 60: {"log_pplx": 9.0}}  # The second is in the records.
  for updates, values in results.items():
    text = json.dumps({"checkpoint": updates, **values})
    (folder / f"eval_{updates:08d}.json").write_text(text)
  (folder / "eval_00000070.json").write_text("{")
  (folder / "eval_00000050.jsonl").write_text("{}")
  document = written(path, to=tmp_path / "page.html")
  assert table(document, "Newest evaluation on x")[1][-1] == "1.5 (after 50)"
  losses = [r["loss"] for r in embedded(document)[0]["records"] if r.get("kind") == "eval"]
  assert losses.count(1.5) == 1 and 9.0 not in losses


def test_goodput_is_shown_as_shares_of_the_time(tmp_path):
  path = reported_runs.write(tmp_path / "a")
  (tmp_path / "a" / "goodput").mkdir()
  for number, seconds in enumerate(
    ({"start_up": 4.0, "step": 16.0}, {"start_up": 5.0, "step": 65.0})
  ):
    last = {"time": 100.0 + 80 * number, "updates": 20 + 40 * number, "seconds": seconds}
    file = tmp_path / "a" / "goodput" / f"attempt_{number:08}.jsonl"
    file.write_text(json.dumps(last) + "\n")
  document = written(path, to=tmp_path / "page.html")
  (section,) = [e for e in document.all("section") if e.attributes.get("id") == "goodput"]
  assert "81.0% of 0:01:40 in 2 recorded starts were steps that count." in section.words
  parts = [e.attributes["style"] for e in section.all("span") if "style" in e.attributes]
  assert parts == ["width:81.000%", "width:9.000%", "width:10.000%"]
  assert "not running 10.0 s (10.0%)" in [e.words for e in section.all("li")]


def test_memory_by_kind_is_that_of_the_state_and_the_rest_of_the_peak(tmp_path):
  path = reported_runs.write(tmp_path / "a", knobs={"USE_LORA": "true"})
  run = run_data.read(path, name="a", max_records=100)
  memory = run.config.memory
  assert {"trained parameters", "frozen parameters", "optimizer state"} <= memory.keys()
  trained, optimizer = memory["trained parameters"], memory["optimizer state"]
  assert optimizer.total == 2 * trained.total + 8  # Two moments of float32, and two counts.
  document = strict_html.parse(page.html([run], title="a"))
  (section,) = [e for e in document.all("section") if e.attributes.get("id") == "memory"]
  styles = [e.attributes["style"] or "" for e in section.all("span") if "style" in e.attributes]
  shares = [float(re.findall(r"[\d.]+", style)[0]) for style in styles]
  assert sum(shares) == pytest.approx(100, abs=0.01)
  assert "Measured peak of a device: 100 MB" in section.words


@pytest.mark.parametrize("most", [10, 11, 50, 101])
def test_thinned_records_keep_ends_and_extremes(most):
  records = [{"updates": i, "loss": 1.0} for i in range(1000)]
  records[345]["loss"], records[700]["loss"], records[123]["loss"] = 9.0, 0.1, None
  found = run_data.thinned(records, most)
  places = [record["updates"] for record in found]
  assert places == sorted(set(places)) and len(places) <= most
  assert {0, 999, 123, 700} <= set(places) and (345 in places or most < 12)
  assert run_data.thinned(records[:most], most) == records[:most]


def contrast(one: str, other: str) -> float:
  """The contrast of two colors by WCAG 2.2."""

  def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

  high, low = sorted((luminance(one), luminance(other)), reverse=True)
  return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_guidelines_in_light_and_dark():
  css = (PACKAGE / "page.css").read_text()
  pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", css)
  colors = {name: (light, dark) for name, light, dark in pairs}
  assert len(colors) == 18
  for scheme in (0, 1):
    for name, of in colors.items():
      if name in ("page", "panel", "rule"):
        continue
      least = 3.0 if re.fullmatch(r"c\d", name) else 4.5  # Lines; text.
      for ground in ("page", "panel"):
        assert contrast(of[scheme], colors[ground][scheme]) >= least, (name, scheme)


def fails(capsys, *arguments: str) -> str:
  assert main.run(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and captured.err.count("\n") == 1
  assert captured.err.startswith("paxlike-report: ")
  return captured.err


def test_mistakes_are_named_and_nothing_is_written(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  good = reported_runs.write(tmp_path / "good", experiment="")
  (tmp_path / "new").mkdir()
  assert "none is not the folder of a run" in fails(capsys, good, "none")
  assert "no metrics.jsonl" in fails(capsys, "new")
  (tmp_path / "new" / "metrics.jsonl").write_text("")
  assert "new has no records of training or evaluation yet" in fails(capsys, "new")
  assert f"{good}/ is given twice: leave one out." in fails(capsys, good, "new", f"{good}/")
  assert "expected a number of at least 10" in fails(capsys, good, "--max_records=9")
  assert "none/x.html cannot be written" in fails(capsys, good, "--to=none/x.html")
  (tmp_path / "good" / "report.html").mkdir()
  message = fails(capsys, good)
  assert "good/report.html cannot be written: " in message
  assert message.endswith(". Name another file with --to=FILE.html.\n")
  (tmp_path / "good" / "report.html").rmdir()
  assert "RUN" in fails(capsys)
  assert not list(tmp_path.rglob("*.html"))


def test_default_files_and_folders_of_runs(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("a", "b"):
    reported_runs.write(tmp_path / "runs" / name, experiment="", steps=20)
  (tmp_path / "runs" / "logs").mkdir()
  for given, to in ((["runs/a/"], "runs/a/report.html"), (["runs"], "runs/report.html")):
    assert main.run(given) == 0
    assert capsys.readouterr().out == f"{to}\n"
  document = strict_html.parse(pathlib.Path("runs/report.html").read_text())
  assert [run["name"] for run in embedded(document)] == ["a", "b"]
