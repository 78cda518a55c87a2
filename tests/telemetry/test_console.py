# SPDX-License-Identifier: Apache-2.0
import logging
import subprocess
import sys
import time

import pytest
from helpers.sources import REPOSITORY

from paxlike.cli import plot, verify
from paxlike.convert import average
from paxlike.convert import main as convert
from paxlike.sweep import fit
from paxlike.telemetry import console as console_module
from paxlike.telemetry.console import Console

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


# What a program prints, and a file that it then opens.
PROGRAM = """
import os, sys
from paxlike.telemetry import console
console.outlive_readers()
with open("file", "w") as file:
  console.Console().line("a line \u00b1")
  os.write(2, b"a library's words")
  print("an error", file=sys.stderr)
  file.write(f"{file.fileno()} {sys.stdin.read()!r} {console.output_is_lost()}")
"""


@pytest.mark.parametrize(
  ("streams", "says", "lost"),
  [
    (">/dev/full </dev/null", "paxlike: standard output cannot be written", True),
    (">/dev/full 2>/dev/full </dev/null", "", True),
    (">&- </dev/null", "an error", False),
    ("2>&- </dev/null", "a line", False),
    ("<&-", "a line", False),
    (">&- 2>&- <&-", "", False),
    ("</dev/null PYTHONIOENCODING=ascii", "a line \\xb1", False),
  ],
)
def test_a_program_goes_on_without_its_console(tmp_path, streams, says, lost):
  streams, _, encoding = streams.partition(" PYTHONIOENCODING=")
  variables = {"PYTHONIOENCODING": encoding or "utf-8"}
  ended = subprocess.run(
    ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, "-c", PROGRAM],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    env={"PYTHONPATH": str(REPOSITORY), **variables},
  )
  assert ended.returncode == 0, ended.stderr
  assert says in ended.stdout + ended.stderr
  number, read, was_lost = (tmp_path / "file").read_text().split()
  assert int(number) > 2 and read == "''" and was_lost == str(lost)


def test_work_is_named_only_if_it_takes_long(capsys):
  with console_module.mentioned("nothing", after=600):
    pass
  with console_module.mentioned("tracing", after=0):
    while not (err := capsys.readouterr().err):
      time.sleep(0.01)
  assert err == "paxlike: tracing ...\n"


COMMANDS = {
  "paxlike-average": (average.run, ["", "--to=x"]),
  "paxlike-convert": (convert.run, ["--from=hf", "--path=", "--to=x"]),
  "paxlike-fit": (fit.run, [""]),
  "paxlike-plot": (plot.run, [""]),
  "paxlike-verify": (verify.run, [""]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_the_flags_of_a_command_is_one_line(name, capsys):
  run, empty = COMMANDS[name]
  for given, says in (
    ([], "are required: "),
    (["--what"], ""),
    (empty, "a path that is not empty"),
  ):
    assert run(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"{name}: ") and says in err and err.count("\n") == 1


def test_an_error_of_a_store_is_not_logged_besides(monkeypatch):
  logger = logging.getLogger("gcsfs")
  monkeypatch.setattr(logger, "level", logging.NOTSET)
  assert console_module.exit_status("x", lambda: int(logger.isEnabledFor(logging.ERROR))) == 0
