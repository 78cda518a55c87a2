# SPDX-License-Identifier: Apache-2.0
"""What a sweep consists of, checked before its first run, and kept in its folder."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence

from etils import epath

from paxlike import file_io, root_graph, run_folder
from paxlike.cli import command_line
from paxlike.config import knob_text
from paxlike.errors import UserError
from paxlike.processes.lease import Lease
from paxlike.sweep import combinations
from paxlike.sweep.combinations import Combination
from paxlike.telemetry import metric_files

FILE = "sweep.json"
LEFT_ALONE = ("finished", "running")  #: States of runs that a sweep does not start.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """The runs of a sweep.

  Attributes:
    folder: Its folder, in which each run has a folder of its own.
    flags: The flags of paxlike that all runs have.
    runs: Name -> combination.
  """

  folder: epath.Path
  flags: tuple[str, ...]
  runs: dict[str, Combination]

  def folder_of(self, name: str) -> epath.Path:
    """Returns the folder of a run."""
    return self.folder / name

  def flags_of(self, name: str) -> list[str]:
    """Returns all flags of a run."""
    own = combinations.flags(self.runs[name])
    return [*self.flags, *own, f"--job_log_dir={os.fspath(self.folder_of(name))}"]

  def check(self):
    """Builds the graph of each run; starts nothing, and writes nothing.

    Raises:
      UserError: A run is wrong, or two are the same.
    """
    seen: dict[str, str] = {}
    for name in self.runs:
      try:
        content = _content(self.flags_of(name))
      except UserError as error:
        raise UserError(f"{name}: {error}") from error
      if content in seen:
        raise UserError(f"{seen[content]} and {name} are the same run.")
      seen[content] = name

  @contextlib.contextmanager
  def owned(self) -> Iterator[None]:
    """Context in which no other sweep uses the folder, which is created if it is missing.

    Raises:
      UserError: Another sweep does, it is the folder of a run, or it cannot be read or written.
    """
    run_folder.create(os.fspath(self.folder))
    with run_folder.reading(self.folder):
      is_run = bool(metric_files.files(self.folder))
    if is_run:
      raise UserError(f"--job_log_dir={self.folder} is the folder of a run: set another one.")
    with run_folder.writing(self.folder):
      lease = Lease(self.folder)
    try:
      lease.check()
      yield
    finally:
      lease.release()

  def keep(self):
    """Writes the sweep's file, and checks that the folder holds no other sweep.

    Runs may have been added since: to a list, or to the file of combinations.

    Raises:
      UserError: It does, or it cannot be read or written.
    """
    path = self.folder / FILE
    with run_folder.reading(path):
      saved = file_io.read_bytes(path) if path.exists() else None
    if saved is not None:
      flags, runs = _parsed(saved, path)
      if flags != self.flags or not runs.items() <= self.runs.items():
        raise UserError(
          f"--job_log_dir={self.folder} holds another sweep, {_difference(flags, runs, self)}: set"
          " another --job_log_dir."
        )
    text = json.dumps({"flags": self.flags, "runs": self.runs}, indent=1) + "\n"
    with run_folder.writing(self.folder):
      file_io.write(path, text)


def _parsed(saved: bytes, path: epath.Path) -> tuple[tuple[str, ...], dict[str, Combination]]:
  """Returns the flags and the runs of a saved sweep."""
  try:
    found = json.loads(saved)
    if not isinstance(found["flags"], list) or not isinstance(found["runs"], dict):
      raise TypeError
  except file_io.MALFORMED:
    raise UserError(
      f"{path} is damaged: expected JSON with flags and runs. Restore it, or set another"
      " --job_log_dir."
    ) from None
  return tuple(found["flags"]), found["runs"]


def _difference(flags: Sequence[str], runs: dict[str, Combination], sweep: Sweep) -> str:
  """Returns a clause that says how a saved sweep differs."""
  if added := [flag for flag in flags if flag not in sweep.flags]:
    return f"with {added[0]}"
  if missing := [flag for flag in sweep.flags if flag not in flags]:
    return f"without {missing[0]}"
  other = [name for name, one in runs.items() if sweep.runs.get(name) != one]
  return f"with a run {other[0]}" if other else "with its flags in another order"


def _content(flags: Sequence[str]) -> str:
  """Returns what a run trains, as text that is equal for equal runs.

  Raises:
    UserError: A flag, the experiment, a knob or an edit is wrong.
  """
  options = command_line.parse(["paxlike", *flags])
  if options.list or options.help or options.fdl_help or options.mode != "train":
    raise UserError("paxlike-sweep trains: leave out --mode, --list, --help and --fdl_help.")
  experiment = root_graph.experiment_if_named(options)
  root_graph.of(options, experiment)
  values = {} if experiment is None else experiment.values()
  knobs = {name: knob_text.spell(setting.value) for name, setting in values.items()}
  return json.dumps([knobs, dict(options.edits), options.fiddlers])
