# SPDX-License-Identifier: Apache-2.0
import json
import math
import pathlib
import sys

import matplotlib.image
import numpy as np
import pytest

from paxlike.cli import plot
from paxlike.telemetry import run_paths


def write_run(folder: pathlib.Path, *, steps: int = 60, sets=("validation",), speed=True) -> str:
  folder.mkdir(parents=True)
  lines = []
  for updates in range(1, steps + 1):
    record = {"kind": "train", "step": updates - 1, "updates": updates, "time": 0.0}
    record["loss"] = None if updates == 7 else 2 + 5 * math.exp(-updates / 20)
    if speed and updates > 1:
      record["tokens_per_second"] = 10_000 + updates
    lines.append(json.dumps(record))
    if updates % 20 == 0:
      for number, name in enumerate(sets):
        record = {"kind": "eval", "set": name, "step": updates, "updates": updates, "time": 0.0}
        lines.append(json.dumps(record | {"loss": 3.0 + number}))
  (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "tra']))
  return str(folder)


def labels(axes) -> list[str]:
  return [text.get_text() for text in axes.get_legend().get_texts()]


def test_run_is_read(tmp_path):
  run = plot.read(write_run(tmp_path / "a", sets=("x", "y")), name="a")
  assert run.loss.updates == [*range(1, 7), *range(8, 61)]  # 7 was not finite.
  assert run.loss.values[0] == 2 + 5 * math.exp(-1 / 20)
  assert run.eval_losses == {
    "x": plot.Curve([20, 40, 60], [3.0] * 3),
    "y": plot.Curve([20, 40, 60], [4.0] * 3),
  }
  assert run.tokens_per_second.updates == list(range(2, 61))


def test_single_run_shows_all_its_curves(tmp_path):
  run = plot.read(write_run(tmp_path / "a", sets=("x", "y")), name="a")
  loss, speed = plot.draw([run]).axes
  assert [label.split()[0] for label in labels(loss)] == ["train", "x", "y"]
  assert [label.split()[1] for label in labels(loss)][1:] == ["3.000", "4.000"]
  assert loss.get_ylabel() == "loss" and speed.get_ylabel() == "tokens per second"
  assert speed.get_xlabel() == "updates" and speed.get_ylim()[0] == 0
  drawn = [np.asarray(line.get_xdata()).tolist() for line in loss.lines]
  assert drawn.count([20, 40, 60]) == 2 and drawn.count(run.loss.updates) == 2
  assert np.asarray(loss.lines[0].get_ydata()).tolist() == run.loss.values
  assert len({line.get_color() for line in loss.lines}) == 3


@pytest.mark.parametrize("count", [2, 3, 10, 14])
def test_several_runs_are_told_apart(tmp_path, count):
  paths = [write_run(tmp_path / f"{number}" / "run") for number in range(count)]
  runs = [plot.read(path, name=f"run{number}") for number, path in enumerate(paths)]
  loss, evals, speed = plot.draw(runs).axes
  assert [label.split()[0] for label in labels(loss)] == [run.name for run in runs]
  assert labels(evals) == ["validation"]
  for axes in (loss, evals, speed):
    colors = {line.get_color() for line in axes.lines if len(np.asarray(line.get_xdata()))}
    assert len(colors) == count


def test_short_runs_and_runs_without_some_curve_are_drawn(tmp_path):
  runs = [
    plot.read(write_run(tmp_path / "one", steps=1, sets=(), speed=False), name="one"),
    plot.read(write_run(tmp_path / "two", steps=20, sets=()), name="two"),
  ]
  assert len(plot.draw(runs).axes) == 2
  (point,) = plot.draw(runs[:1]).axes[0].lines
  assert point.get_marker() == "o"
  only_eval = runs[0]._replace(loss=plot.Curve([], []), eval_losses={"x": plot.Curve([5], [1.0])})
  plot.save(plot.draw([only_eval]), str(tmp_path / "x.png"))


def test_running_mean_bends_no_line_and_has_the_mean_at_its_end():
  line = plot.Curve(list(range(200)), [3.0 * x + 1 for x in range(200)])
  mean = plot._running_mean(line)
  assert mean.updates == line.updates
  np.testing.assert_allclose(mean.values[:-4], line.values[:-4])
  np.testing.assert_allclose(mean.values[-1], np.mean(line.values[-5:]))
  short = plot.Curve([1, 2, 3], [5.0, 1.0, 9.0])
  assert plot._running_mean(short) == short


def test_command_writes_a_picture_and_prints_its_path(tmp_path, capsys, monkeypatch):
  one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
  monkeypatch.chdir(tmp_path)
  for arguments, expected in [
    ([one], f"{one}/curves.png"),
    ([f"{one}/"], f"{one}/curves.png"),
    (["a/run", "b/run"], "curves.png"),
    ([one, two, "--output=both.png"], "both.png"),
  ]:
    assert plot.run(arguments) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    picture = matplotlib.image.imread(expected)
    assert picture.shape[0] > 600 and picture.shape[1] > 900 and picture.std() > 0.05
    pathlib.Path(expected).unlink()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_entry_point_reads_the_command_line(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["paxlike-plot", write_run(tmp_path / "a")])
  assert plot.main() == 0
  assert (tmp_path / "a" / "curves.png").is_file()


@pytest.mark.parametrize(
  "paths, names",
  [
    (["/x/a", "/x/b"], ["a", "b"]),
    (["/x/a/run", "/y/b/run"], ["a", "b"]),
    (["/x/a/1", "/x/b/2"], ["1", "2"]),
    (["/x/a/1", "/x/b/1", "/x/a/2"], ["a/1", "b/1", "a/2"]),
    (["gs://x/a", "gs://y/a"], ["x", "y"]),
    (["runs/a/"], ["runs/a"]),
  ],
)
def test_names_are_the_shortest_that_differ(paths, names):
  assert run_paths.names(paths) == names


def fails(capsys, *arguments: str) -> str:
  assert plot.run(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and captured.err.count("\n") == 1
  return captured.err


def test_missing_or_empty_run_is_named(tmp_path, capsys):
  good = write_run(tmp_path / "good")
  assert f"{tmp_path}/none is not the folder of a run" in fails(capsys, good, f"{tmp_path}/none")
  (tmp_path / "new").mkdir()
  assert "no metrics.jsonl" in fails(capsys, f"{tmp_path}/new")
  (tmp_path / "new" / "metrics.jsonl").write_text("")
  assert f"{tmp_path}/new has no loss yet" in fails(capsys, f"{tmp_path}/new")
  assert "given twice" in fails(capsys, good, good)
  assert not list(tmp_path.rglob("*.png"))


def test_output_that_cannot_be_written_is_named(tmp_path, capsys):
  good = write_run(tmp_path / "good")
  for output in (f"{tmp_path}/none/x.png", good):
    assert f"{output} cannot be written" in fails(capsys, good, f"--output={output}")
  assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_missing_matplotlib_names_the_extra(tmp_path, capsys, monkeypatch):
  good = write_run(tmp_path / "good")
  for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
    monkeypatch.setitem(sys.modules, name, None)
  assert "pip install 'paxlike[plot]'" in fails(capsys, good)
  assert not list(tmp_path.rglob("*.png"))


def test_colors_do_not_run_out():
  runs = [plot.PlottedRun("x", plot.Curve([1], [1.0]), {}, plot.Curve([], []))] * 40
  assert len({line.get_color() for line in plot.draw(runs).axes[0].lines}) == 40
