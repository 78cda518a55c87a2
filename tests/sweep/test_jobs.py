# SPDX-License-Identifier: Apache-2.0
"""Sweeps whose runs are jobs of a launcher."""

import json
import os
import pathlib

from helpers import program

from paxlike.sweep import main

SHORT = (*program.TINY, "--fdl.MAX_STEPS=4", "--fdl.EVAL_INTERVAL_STEPS=0")


def rows(folder: pathlib.Path) -> dict[str, dict]:
  return {row["run"]: row for row in json.loads((folder / "results.json").read_text())}


def submitting(folder: pathlib.Path, monkeypatch, *, ends: str = "exit 0") -> pathlib.Path:
  """Puts a program in the place of sbatch, which notes what it is given; returns its notes."""
  notes = folder / "notes"
  program = folder / "bin" / "sbatch"
  program.parent.mkdir(exist_ok=True)
  program.write_text(f"#!/bin/sh\necho $(basename $1) >> {notes}\n{ends}\n")
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
  kept = folder / "jobs" / "RANDOM_SEED=2.sub"
  script = kept.read_text()
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
  assert "RANDOM_SEED=1: finished\n" in out
  advice = f"was submitted before; `squeue --me` shows its job; to submit it again, remove {kept}"
  assert f"RANDOM_SEED=2: not started, {advice}\n" in out
  # A run that has stopped since may be in Slurm's queue again.
  (folder / "RANDOM_SEED=2").mkdir()
  (folder / "RANDOM_SEED=2" / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
  later = kept.stat().st_mtime + 10
  os.utime(folder / "RANDOM_SEED=2" / "status.json", (later, later))
  notes.write_text("")
  assert main.run([*flags, f"{sweep},3]"]) == 0
  assert f"RANDOM_SEED=2: stopped, {advice}\n" in capsys.readouterr().out
  assert notes.read_text() == ""
  kept.unlink()
  assert main.run([*flags, f"{sweep},3]"]) == 0
  assert notes.read_text() == "RANDOM_SEED=2.sub\n"


def test_failed_submissions_are_noted_and_tried_again(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "sweep"
  flags = [*SHORT, "--sweep.RANDOM_SEED=[1,2]", f"--job_log_dir={folder}", "--launch=slurm"]
  notes = submitting(tmp_path, monkeypatch, ends="echo 'sbatch: error: no account' >&2; exit 3")
  assert main.run(flags) == 1
  assert len(notes.read_text().splitlines()) == 2
  message = "its submission failed with status 3: sbatch: error: no account"
  assert rows(folder)["RANDOM_SEED=1"]["error"] == message
  assert f"RANDOM_SEED=2: {message}\n" in capsys.readouterr().out
  notes = submitting(tmp_path, monkeypatch)
  assert main.run(flags) == 0
  assert len(notes.read_text().splitlines()) == 2


def test_nothing_is_submitted_where_the_program_is_missing(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("PATH", str(tmp_path))
  flags = [*SHORT, "--sweep.RANDOM_SEED=[1]", f"--job_log_dir={tmp_path}/s", "--launch=slurm"]
  assert main.run(flags) == 2
  assert "--launch=slurm: this machine has no sbatch" in capsys.readouterr().err
  assert not (tmp_path / "s").exists()
