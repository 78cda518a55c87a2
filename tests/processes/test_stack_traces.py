# SPDX-License-Identifier: Apache-2.0
"""Stacks: on a signal, and in files."""

import os
import pathlib
import signal
import tempfile
import time

import pytest
from etils import epath

from paxlike import main
from paxlike.processes import job_watch, stack_traces, verdicts


def test_sigusr1_prints_stacks_from_the_start_of_the_program(monkeypatch, capfd):
  monkeypatch.setattr(main, "main", lambda argv: signal.raise_signal(signal.SIGUSR1) or 0)
  with pytest.raises(SystemExit) as ended:
    main.run()
  assert ended.value.code == 0
  assert "Current thread" in capfd.readouterr().err


def test_a_debugger_does_not_count_as_stuck(monkeypatch):
  assert not stack_traces.is_debugged()
  monkeypatch.setitem(globals(), "__name__", "pdb")
  assert stack_traces.is_debugged()


def test_files_of_stacks_are_bounded_and_say_where_the_process_was(tmp_path):
  folder = epath.Path(tmp_path)
  (tmp_path / "stacks").mkdir()
  for number in range(30):
    (tmp_path / "stacks" / f"periodic_00003_2020{number:02d}.txt").write_text("")
  stall = stack_traces.write(folder, 3, "why: stuck")
  stack_traces.write_periodic(folder, 3, stack_traces.text(["why: asked"]))
  assert stall.read_text() == "why: stuck"
  files = sorted(path.name for path in (tmp_path / "stacks").glob("periodic_*"))
  assert len(files) == 20
  text = (tmp_path / "stacks" / files[-1]).read_text()
  assert text.startswith("why: asked") and pathlib.Path(__file__).name in text


def test_the_newest_stacks_stay_where_clocks_have_gone_back(tmp_path):
  folder = epath.Path(tmp_path)
  (tmp_path / "stacks").mkdir()
  for number in range(30):
    later = tmp_path / "stacks" / f"periodic_00003_2999{number:02d}.txt"
    later.write_text("")
    when = time.time() + 1e6 + number
    os.utime(later, (when, when))
  for number in range(3):
    assert stack_traces.write_periodic(folder, 3, f"now {number}").read_text() == f"now {number}"
  assert len(list((tmp_path / "stacks").iterdir())) == 20


def test_where_stacks_cannot_be_written_the_watch_goes_on(tmp_path, monkeypatch):
  def full(*unused, **named):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(tempfile, "TemporaryFile", full)
  if hasattr(os, "memfd_create"):
    assert pathlib.Path(__file__).name in stack_traces.text(["why: asked"])
  monkeypatch.setattr(stack_traces, "text", full)
  with job_watch.watching(job_watch.Limits(epath.Path(tmp_path))) as one:
    assert one._write_stacks("asked") is None
    signal.raise_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert one.is_alive()


def test_what_takes_long_is_given_up():
  began = time.monotonic()
  assert verdicts.in_time(lambda: time.sleep(5), seconds=0.1) is None
  assert time.monotonic() - began < 2
