# SPDX-License-Identifier: Apache-2.0
import sys
import time

import pytest

from paxlike.console import Console

ERASE = "\r\033[K"


@pytest.fixture
def on_terminal(monkeypatch, capsys):
  """A console whose standard error is a terminal of 60 columns."""
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
  monkeypatch.setenv("COLUMNS", "60")
  return Console()


def screen(err: str) -> str:
  """What a terminal shows after the last time that the bar was removed."""
  return err.rpartition(ERASE)[2]


def test_without_a_terminal_there_are_plain_lines_only(capsys):
  console = Console()
  for done in range(1, 5):
    console.progress(done, 4, "loss 1.0")
    console.line(f"line {done}")
  console.close()
  out, err = capsys.readouterr()
  assert out.splitlines() == [f"line {done}" for done in range(1, 5)]
  assert err == ""


def test_the_bar_stays_under_the_lines(on_terminal, capsys):
  on_terminal.progress(1, 4, "loss 1.0")
  on_terminal.line("a line")
  out, err = capsys.readouterr()
  assert out == "a line\n"
  bar = "[######..................] 1/4  loss 1.0"
  assert err == bar + ERASE + bar


def test_the_bar_fits_the_terminal_and_goes_at_the_end(on_terminal, capsys):
  on_terminal.progress(1, 4, "x" * 100)
  assert len(screen(capsys.readouterr().err)) == 59
  on_terminal.progress(4, 4, "x")
  on_terminal.line("after")
  assert capsys.readouterr().err == ERASE


def test_closing_removes_the_bar(on_terminal, capsys):
  on_terminal.progress(1, 4, "x")
  on_terminal.close()
  assert screen(capsys.readouterr().err) == ""


def test_the_bar_is_drawn_ten_times_a_second_at_most(on_terminal, capsys, monkeypatch):
  now = 100.0
  monkeypatch.setattr(time, "monotonic", lambda: now)
  for done in range(100):
    now += 1 / 64
    on_terminal.progress(done, 1000, "x")
  # Every seventh of a 64th of a second is more than 0.1 s after the one before.
  assert capsys.readouterr().err.count("/1000") == 15
