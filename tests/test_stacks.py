# SPDX-License-Identifier: Apache-2.0
"""Stacks: on a signal, and in files."""

import signal

import pytest
from etils import epath

from paxlike import main, stacks


def test_sigusr1_prints_stacks_from_the_start_of_the_program(monkeypatch, capfd):
  monkeypatch.setattr(main, "main", lambda argv: signal.raise_signal(signal.SIGUSR1) or 0)
  with pytest.raises(SystemExit) as ended:
    main.run()
  assert ended.value.code == 0
  assert "Current thread" in capfd.readouterr().err


def test_a_debugger_does_not_count_as_stuck(monkeypatch):
  assert not stacks.is_debugged()
  monkeypatch.setitem(globals(), "__name__", "pdb")
  assert stacks.is_debugged()


def test_files_of_stacks_are_bounded_and_say_where_the_process_was(tmp_path):
  folder = epath.Path(tmp_path)
  (tmp_path / "stacks").mkdir()
  for number in range(30):
    (tmp_path / "stacks" / f"periodic_00003_2020{number:02d}.txt").write_text("")
  stall = stacks.write(folder, 3, "why: stuck")
  stacks.write_periodic(folder, 3, stacks.text(["why: asked"]))
  assert stall.read_text() == "why: stuck"
  files = sorted(path.name for path in (tmp_path / "stacks").glob("periodic_*"))
  assert len(files) == 20
  text = (tmp_path / "stacks" / files[-1]).read_text()
  assert text.startswith("why: asked") and "test_stacks.py" in text
