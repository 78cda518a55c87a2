# SPDX-License-Identifier: Apache-2.0
"""Sweeps that run here, one after another."""

import csv
import json
import pathlib
import signal
import subprocess
import sys

import pytest
from etils import epath
from helpers import program
from helpers.launched import until
from helpers.sources import REPOSITORY

from paxlike.sweep import main
from paxlike.telemetry import metric_files

SHORT = (*program.TINY, "--fdl.MAX_STEPS=4", "--fdl.EVAL_INTERVAL_STEPS=0")
LONG = (*program.TINY, "--fdl.EVAL_INTERVAL_STEPS=0", "--fdl.LR_COS_DECAY_END=100")


def rows(folder: pathlib.Path) -> dict[str, dict]:
  return {row["run"]: row for row in json.loads((folder / "results.json").read_text())}


def metrics(run: pathlib.Path) -> list[dict]:
  return list(metric_files.records(epath.Path(run)))


def start(*flags: str) -> subprocess.Popen:
  """Starts a sweep as a script does in the background, which ignores Ctrl-C at first."""
  command = [sys.executable, "-m", "paxlike.sweep.main", *flags]
  return subprocess.Popen(
    ["bash", "-c", 'trap "" INT; exec "$@"', "sweep", *command],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.slow
def test_failed_runs_are_noted_and_finished_ones_are_skipped(tmp_path, capsys):
  folder = tmp_path / "sweep"
  flags = [*SHORT, "--sweep.NUM_LAYERS=[1]", f"--job_log_dir={folder}"]
  sweep = "--sweep.CHECKPOINT_RESTORE_PATH=[nowhere,none"
  bad, good, more = (f"NUM_LAYERS=1,CHECKPOINT_RESTORE_PATH={n}" for n in ("nowhere", "none", "x"))
  assert main.run([*flags, f"{sweep}]"]) == 1
  out = capsys.readouterr().out
  assert f"[1/2] {bad}: failed with status 2" in out and f"[2/2] {good}: finished after" in out
  found = rows(folder)
  assert found[good]["state"] == "finished" and found[good]["updates"] == 4
  assert found[good]["loss"] == program.curve(folder / good)[-1][1] and not found[good]["error"]
  assert found[bad]["state"] == "failed" and "nowhere" in found[bad]["error"]
  assert f"least training loss: {found[good]['loss']:.4f} ({good})" in out
  with (folder / "results.csv").open() as file:
    table = {row["run"]: row for row in csv.DictReader(file)}
  assert table[good]["NUM_LAYERS"] == "1" and table[bad]["error"] == found[bad]["error"]
  assert "Sweep sweep" in (folder / "report.html").read_text()

  before = (folder / good / "metrics.jsonl").stat().st_mtime_ns
  assert main.run([*flags, f"{sweep},x]"]) == 1  # With a value more.
  out = capsys.readouterr().out
  assert f"[2/3] {good}: finished\n" in out and f"[3/3] {more}: failed with status 2" in out
  assert (folder / good / "metrics.jsonl").stat().st_mtime_ns == before
  assert list(rows(folder)) == [bad, good, more]


@pytest.mark.slow
def test_stopped_sweep_saves_and_goes_on_to_the_same_losses(tmp_path):
  folder = tmp_path / "sweep"
  flags = [*LONG, "--sweep.RANDOM_SEED=[1,2]", f"--job_log_dir={folder}"]
  first = folder / "RANDOM_SEED=1"
  for number in (signal.SIGINT, signal.SIGTERM):
    before = len(metrics(first))
    process = start(*flags, "--fdl.MAX_STEPS=100000")
    until(lambda: len(metrics(first)) > before + 5, seconds=240, what="it does not train")  # noqa: B023
    process.send_signal(number)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + number, out
    assert "the same command goes on" in out and "[2/2]" not in out
    states = {name: row["state"] for name, row in rows(folder).items()}
    assert states == {"RANDOM_SEED=1": "stopped", "RANDOM_SEED=2": "not started"}
  # The same sweep, but for where it ends.
  steps = f"--fdl.MAX_STEPS={len(metrics(first)) + 3}"
  saved = json.loads((folder / "sweep.json").read_text())
  saved["flags"][-1] = steps
  (folder / "sweep.json").write_text(json.dumps(saved))
  process = start(*flags, steps)
  out, _ = process.communicate(timeout=480)
  assert process.returncode == 0 and "[1/2] RANDOM_SEED=1: resumes" in out, out
  assert {row["state"] for row in rows(folder).values()} == {"finished"}
  whole = tmp_path / "whole"
  uninterrupted = program.start(*LONG, steps, "--fdl.RANDOM_SEED=1", f"--job_log_dir={whole}")
  assert program.finish(uninterrupted)[0] == 0
  assert program.curve(first) == program.curve(whole)
