# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep as jobs of a launcher."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import UserError, one_line
from paxlike.launchers import main as launcher
from paxlike.sweep.definition import LEFT_ALONE, Sweep
from paxlike.telemetry import run_status

FOLDER = "jobs"  #: Folder of the scripts that were submitted.
# Flags of `paxlike-launch` that the sweep sets, or that only print.
_OWN_FLAGS = ("--to", "--submit", "--help", "-h")
# Target -> the command that lists its jobs, and what must be deleted before a job of the same name
# is accepted. The submissions of the other targets end with their job.
_LISTS = {
  "slurm": ("squeue --me", ""),
  "k8s": ("kubectl get jobsets", "its JobSet"),
  "xpk": ("xpk workload list", "its workload"),
  "sky": ("sky jobs queue", ""),
}


def check(sweep: Sweep, words: Sequence[str]):
  """Makes the script of each run's job, and drops it.

  Args:
    sweep: The sweep, which has been checked.
    words: The target of `paxlike-launch` and its flags.

  Raises:
    UserError: A flag is the sweep's own, or `paxlike-launch` refuses it or the target.
  """
  if words[0] not in launcher.TARGETS:
    known = ", ".join(launcher.TARGETS)
    raise UserError(f"--launch: no target {words[0]}: expected one of {known}.")
  for word in words:
    if word.partition("=")[0] in _OWN_FLAGS:
      raise UserError(f"--launch: leave out {word}: the sweep itself submits the job of each run.")
  if _is_named(words) and len(sweep.runs) > 1:
    raise UserError("--launch: leave out --name: the job of each run has the name of the run.")
  with tempfile.TemporaryDirectory() as scratch:
    for name in sweep.runs:
      if launcher.run(_job(sweep, name, words, f"{scratch}/job")):
        raise UserError(f"--launch={' '.join(words)}: paxlike-launch refuses it.")
  program = launcher.submission(words, "job")[0]
  if shutil.which(program) is None:
    raise UserError(f"--launch={words[0]}: this machine has no {program}, which submits jobs.")


def launch(sweep: Sweep, words: Sequence[str]) -> dict[str, str]:
  """Submits a job for each run that was not submitted before, and is neither finished nor running.

  A job may wait for its start, also after a stop: it is not submitted again as long as its script
  is in the sweep's folder.

  Args:
    sweep: The sweep.
    words: As in `check`, which has accepted them.

  Returns:
    Run -> message of those whose submission failed.

  Raises:
    UserError: The sweep's folder cannot be read or written.
  """
  folder = sweep.folder / FOLDER
  with run_folder.writing(sweep.folder):
    folder.mkdir(parents=True, exist_ok=True)
  failures = {}
  for name in sweep.runs:
    state = run_status.state(sweep.folder_of(name))
    script = folder / f"{name}{launcher.TARGETS[words[0]].suffix}"
    with run_folder.reading(script):
      is_submitted = script.exists()
    if state in LEFT_ALONE:
      print(f"{name}: {state}", flush=True)
    elif is_submitted:
      print(f"{name}: {state or 'not started'}, {_advice(words[0], script)}", flush=True)
    elif message := _submit(sweep, name, words, script):
      failures[name] = message
      print(f"{name}: {message}", flush=True)
    else:
      print(f"{name}: submitted", flush=True)
  return failures


def _advice(target: str, script: epath.Path) -> str:
  """Returns what to do about a run that was submitted before and has not finished."""
  command, obstacle = _LISTS.get(target, ("", ""))
  shown = f"; `{command}` shows its job" if command else ""
  first = f"delete {obstacle} and " if obstacle else ""
  return f"was submitted before{shown}; to submit it again, {first}remove {script}"


def _submit(sweep: Sweep, name: str, words: Sequence[str], script: epath.Path) -> str:
  """Submits the job of a run, and keeps its script; returns the message if that failed, else ""."""
  with tempfile.TemporaryDirectory() as scratch:
    file = pathlib.Path(scratch, script.name)
    status, reason = launcher.run(_job(sweep, name, words, str(file))), ""
    if not status:
      status, reason = _run(launcher.submission(words, str(file)))
    if status:
      return f"its submission failed with status {status}{reason and f': {reason}'}"
    with run_folder.writing(sweep.folder):
      file_io.write(script, file.read_text())
  return ""


def _run(command: Sequence[str]) -> tuple[int, str]:
  """Runs a command; returns its exit status and its last line on standard error."""
  last = ""
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
    assert process.stderr is not None
    for line in process.stderr:
      print(line, end="", file=sys.stderr, flush=True)
      last = line.strip() or last
  return process.returncode, one_line(last, limit=300)


def _is_named(words: Sequence[str]) -> bool:
  return any(word.partition("=")[0] == "--name" for word in words)


def _job(sweep: Sweep, name: str, words: Sequence[str], file: str) -> list[str]:
  """Returns the command line of `paxlike-launch` that writes the script of a run as a file."""
  named = [] if _is_named(words) else [f"--name={name}"]
  return [*words, *named, f"--to={file}", *sweep.flags_of(name)]
