# SPDX-License-Identifier: Apache-2.0
"""Sweeps that run: here, one after another, and as jobs of a launcher."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from helpers import program
from helpers.launched import until
from helpers.sources import REPOSITORY

from paxlike.sweep import main

SHORT = (*program.TINY, "--fdl.MAX_STEPS=4", "--fdl.EVAL_INTERVAL_STEPS=2")
# More steps than are done before the signal arrives.
LONG = (*program.TINY, "--fdl.EVAL_INTERVAL_STEPS=0", "--fdl.LR_COS_DECAY_END=100")


def rows(folder: pathlib.Path) -> dict[str, dict]:
  return {row["run"]: row for row in json.loads((folder / "results.json").read_text())}


def start(*flags: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-m", "paxlike.sweep.main", *flags],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.slow
def test_failed_runs_are_noted_and_finished_ones_are_skipped(tmp_path, capsys):
  folder = tmp_path / "sweep"
  # No loss of the second is finite.
  flags = [*SHORT[:-1], "--fdl.MAX_SKIPPED_STEPS_IN_A_ROW=2", f"--job_log_dir={folder}"]
  sweep = "--sweep.INIT_STD=[0.02,1e30"
  assert main.run([*flags, f"{sweep}]"]) == 1
  out = capsys.readouterr().out
  assert "[1/2] INIT_STD=0.02: finished after" in out and "least loss" in out
  assert "[2/2] INIT_STD=1e30: failed with status 1" in out
  found = rows(folder)
  good, bad = found["INIT_STD=0.02"], found["INIT_STD=1e30"]
  assert good["state"] == "finished" and good["updates"] == 4 and good["error"] is None
  assert bad["state"] == "failed" and "not finite" in bad["error"]
  assert good["loss"] == program.curve(folder / "INIT_STD=0.02")[-1][1]
  with (folder / "results.csv").open() as file:
    table = {row["run"]: row for row in csv.DictReader(file)}
  assert table["INIT_STD=0.02"]["INIT_STD"] == "0.02" and table["INIT_STD=1e30"]["error"]
  assert "Sweep sweep" in (folder / "report.html").read_text()

  before = (folder / "INIT_STD=0.02" / "metrics.jsonl").stat().st_mtime_ns
  assert main.run([*flags, f"{sweep},0.01]"]) == 1  # With a value more.
  out = capsys.readouterr().out
  assert "[1/3] INIT_STD=0.02: finished\n" in out and "[3/3] INIT_STD=0.01: finished after" in out
  assert (folder / "INIT_STD=0.02" / "metrics.jsonl").stat().st_mtime_ns == before
  assert len(rows(folder)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_sweep_saves_and_goes_on_to_the_same_losses(tmp_path, number):
  folder = tmp_path / "sweep"
  flags = [*LONG, "--sweep.RANDOM_SEED=[1,2]", f"--job_log_dir={folder}"]
  run = folder / "RANDOM_SEED=1"
  process = start(*flags, "--fdl.MAX_STEPS=3000")
  until(lambda: len(program.curve(run)) > 5, seconds=120, what="it does not train")
  process.send_signal(number)
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 128 + number, out
  assert "the same command goes on" in out and "[2/2]" not in out
  found = rows(folder)
  assert found["RANDOM_SEED=1"]["state"] == "stopped"
  assert found["RANDOM_SEED=2"]["state"] == "not started"
  stopped = len(program.curve(run))
  # It is the same sweep, up to where it ends.
  saved = json.loads((folder / "sweep.json").read_text())
  steps = f"--fdl.MAX_STEPS={stopped + 3}"
  saved["flags"][-1] = steps
  (folder / "sweep.json").write_text(json.dumps(saved))
  process = start(*flags, steps)
  out, _ = process.communicate(timeout=240)
  assert process.returncode == 0 and "[1/2] RANDOM_SEED=1: resumes" in out, out
  assert rows(folder)["RANDOM_SEED=2"]["state"] == "finished"
  whole = tmp_path / "whole"
  status, *_ = program.finish(
    program.start(*LONG, steps, "--fdl.RANDOM_SEED=1", f"--job_log_dir={whole}")
  )
  assert status == 0
  assert dict(program.curve(run)) == dict(program.curve(whole))


def submitting(folder: pathlib.Path, monkeypatch, *, status: int = 0) -> pathlib.Path:
  """Puts a program in the place of sbatch, which notes what it is given; returns its notes."""
  notes = folder / "notes"
  program = folder / "bin" / "sbatch"
  program.parent.mkdir(exist_ok=True)
  program.write_text(f"#!/bin/sh\necho $(basename $1) >> {notes}\nexit {status}\n")
  program.chmod(0o755)
  monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
  notes.write_text("")
  return notes


def test_jobs_are_submitted_once(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "sweep"
  notes = submitting(tmp_path, monkeypatch)
  flags = [*SHORT, f"--job_log_dir={folder}", "--launch=slurm --nodes=2"]
  sweep = "--sweep.RANDOM_SEED=[1,2"
  assert main.run([*flags, f"{sweep}]"]) == 0
  assert notes.read_text() == "RANDOM_SEED=1.sub\nRANDOM_SEED=2.sub\n"
  script = (folder / "jobs" / "RANDOM_SEED=2.sub").read_text()
  assert f"--job_log_dir={folder}/RANDOM_SEED=2" in script and "#SBATCH --nodes=2" in script
  assert "--fdl.RANDOM_SEED=2" in script and "#SBATCH --job-name=random-seed-2" in script
  # One is finished, one waits, one is new.
  (folder / "RANDOM_SEED=1").mkdir()
  status = {"state": "finished", "step": 4, "num_steps": 4, "host": "x", "pid": 1}
  (folder / "RANDOM_SEED=1" / "status.json").write_text(json.dumps(status))
  notes.write_text("")
  capsys.readouterr()
  assert main.run([*flags, f"{sweep},3]"]) == 0
  out = capsys.readouterr().out
  assert notes.read_text() == "RANDOM_SEED=3.sub\n"
  assert "RANDOM_SEED=1: finished" in out and "RANDOM_SEED=2: waits for its start" in out
  # A run that has stopped since is submitted again.
  (folder / "RANDOM_SEED=2").mkdir()
  (folder / "RANDOM_SEED=2" / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
  later = (folder / "jobs" / "RANDOM_SEED=2.sub").stat().st_mtime + 10
  os.utime(folder / "RANDOM_SEED=2" / "status.json", (later, later))
  notes.write_text("")
  assert main.run([*flags, f"{sweep},3]"]) == 0
  assert notes.read_text() == "RANDOM_SEED=2.sub\n"


def test_failed_submissions_are_noted_and_tried_again(tmp_path, monkeypatch):
  folder = tmp_path / "sweep"
  flags = [*SHORT, "--sweep.RANDOM_SEED=[1,2]", f"--job_log_dir={folder}", "--launch=slurm"]
  notes = submitting(tmp_path, monkeypatch, status=3)
  assert main.run(flags) == 1
  assert len(notes.read_text().splitlines()) == 2
  assert rows(folder)["RANDOM_SEED=1"]["error"] == "its submission failed with status 3"
  notes = submitting(tmp_path, monkeypatch)
  assert main.run(flags) == 0
  assert len(notes.read_text().splitlines()) == 2
