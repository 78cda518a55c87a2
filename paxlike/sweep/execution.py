# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep on this machine, one after another."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Self

from paxlike import file_io, run_folder
from paxlike.errors import one_line
from paxlike.sweep.definition import LEFT_ALONE, Sweep
from paxlike.telemetry import run_status

LOGS = "logs"  #: Folder of what the runs print.


class Stop:
  """Context in which Ctrl-C and SIGTERM go to the run in progress, and no other run is started.

  Attributes:
    number: The signal received; None if none.
  """

  # The terminal was closed: the run saves and ends.
  _PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
  }

  def __init__(self):
    self.number: int | None = None
    self._process: subprocess.Popen | None = None
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> Self:
    for number in self._PASSED_ON:
      # nohup ignores SIGHUP. Shells ignore SIGINT for what a script starts in the background, but
      # a run does not, either.
      if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
        self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: FrameType | None):
    del frame
    self.number = number
    self._pass_on()

  def _pass_on(self):
    if self._process is not None and self.number is not None:
      self._process.send_signal(self._PASSED_ON[signal.Signals(self.number)])

  def wait_for(self, process: subprocess.Popen) -> int:
    """Waits for a process, which gets the signals; returns its exit status."""
    self._process = process
    self._pass_on()  # It may have come before the process.
    status = process.wait()
    self._process = None
    return status


def run_here(sweep: Sweep, environment: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
  """Trains the runs that are not finished, one after another.

  Args:
    sweep: The sweep, which has been checked.
    environment: The environment of the runs.

  Returns:
    Run -> message of those that failed, and the signal that stopped the sweep, if one did.

  Raises:
    UserError: What a run prints cannot be written.
  """
  failures: dict[str, str] = {}
  if file_io.is_remote(sweep.folder):
    logs = pathlib.Path(tempfile.mkdtemp(prefix="paxlike-sweep-"))
  else:
    logs = pathlib.Path(sweep.folder, LOGS)
  with run_folder.writing(sweep.folder):
    logs.mkdir(exist_ok=True)
  with Stop() as stop:
    for number, name in enumerate(sweep.runs, 1):
      place = f"[{number}/{len(sweep.runs)}] {name}"
      state = run_status.state(sweep.folder_of(name))
      if state in LEFT_ALONE:
        print(f"{place}: {state}", flush=True)
        continue
      log = logs / f"{name}.txt"
      print(f"{place}: {'starts' if state is None else 'resumes'}, prints to {log}", flush=True)
      began = time.monotonic()
      status = _train(sweep, name, log, environment, stop)
      if stop.number is not None:
        break
      seconds = time.monotonic() - began
      print(f"{place}: {_outcome(status)} after {seconds:.0f} s", flush=True)
      if status:
        failures[name] = _last_line(log)
        print(f"  {failures[name]}", flush=True)
  return failures, stop.number


def _train(
  sweep: Sweep, name: str, log: pathlib.Path, environment: Mapping[str, str], stop: Stop
) -> int:
  """Trains in a process of its own, which appends what it prints to a file."""
  with contextlib.ExitStack() as stack:
    with run_folder.writing(sweep.folder):
      output = stack.enter_context(open(log, "ab"))
    # In a session of its own: the terminal's Ctrl-C would reach it twice.
    process = subprocess.Popen(
      [sys.executable, "-m", "paxlike.main", *sweep.flags_of(name)],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
    return stop.wait_for(process)


def _outcome(status: int) -> str:
  if status == 0:
    return "finished"
  return f"ended by signal {-status}" if status < 0 else f"failed with status {status}"


def _last_line(log: pathlib.Path) -> str:
  """Returns the message with which a run ended: its last line, without the program's name."""
  lines = log.read_text(errors="replace").split("\n")
  last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
  return one_line(last.removeprefix("paxlike: "), limit=300)
