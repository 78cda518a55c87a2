# SPDX-License-Identifier: Apache-2.0
"""Hints in error messages: which flags to give instead."""

import contextlib
import difflib
import os
import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

# Name of a flag in other programs -> the flag here.
_ELSEWHERE = {
  "batch_size": "--fdl.PERCORE_BATCH_SIZE",
  "config": "--fdl_config",
  "data": "--fdl.DATA_PATH",
  "epochs": "--fdl.NUM_EPOCHS",
  "experiment": "--fdl_config",
  "logdir": "--job_log_dir",
  "lr": "--fdl.LEARNING_RATE",
  "model": "--fdl_config",
  "num_train_epochs": "--fdl.NUM_EPOCHS",
  "output": "--job_log_dir",
  "output_dir": "--job_log_dir",
  "seed": "--fdl.RANDOM_SEED",
  "steps": "--fdl.MAX_STEPS",
  "max_length": "--fdl.MAX_SEQ_LEN",
}
_NAMED = re.compile(r"--?(?:fdl_config|exp)(?:=(.*))?")


def of_flag(name: str, argv: Sequence[str], known: Iterable[str]) -> str:
  """Returns a hint for an unknown flag.

  Args:
    name: Name of the unknown flag.
    argv: The command line.
    known: Names of all flags.
  """
  key, known = name.lower(), list(known)
  if key not in _ELSEWHERE and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.85)):
    return f" Did you mean --{near[0]}?"
  knobs = _knobs(argv)
  flags = {flag: f"--{flag}" for flag in known} | {knob.lower(): f"--fdl.{knob}" for knob in knobs}
  flags |= {
    other: flag
    for other, flag in _ELSEWHERE.items()
    if not flag.startswith("--fdl.") or flag.removeprefix("--fdl.") in knobs
  }
  if key not in flags:
    key = next(iter(difflib.get_close_matches(key, flags, n=1, cutoff=0.75)), "")
  if not key:
    return " --help lists the flags."
  found = flags[key]
  if not found.startswith("--fdl."):
    return f" Did you mean {found}?"
  given = [arg.partition("=") for arg in argv]
  value = next((value for flag, _, value in given if flag.lstrip("-") == name), "")
  return f" Did you mean the knob {found}={shlex.quote(value) if value else 'VALUE'}?"


def _knobs(argv: Sequence[str]) -> list[str]:
  """Returns the knobs of the experiment on a command line, else those of `Experiment`."""
  from paxlike import registry
  from paxlike.experiment import Experiment

  for index, arg in enumerate(argv):
    if match := _NAMED.fullmatch(arg):
      name = match[1] if match[1] is not None else "".join(argv[index + 1 : index + 2])
      with contextlib.suppress(UserError):
        return list(registry.find(name).knobs())
  return list(Experiment.knobs())


@contextlib.contextmanager
def of_edit(experiment: "Experiment | None", path: str, text: str) -> Iterator[None]:
  """Context of a graph edit: if it fails, the error suggests the knob of the same name, if any."""
  try:
    yield
  except UserError as error:
    knob = path.upper()
    if experiment is None or not experiment.declares(knob):
      raise
    value = shlex.quote(f"--fdl.{knob}={text}")
    raise UserError(f"--fdl.{path}={text}: knobs are UPPER_CASE. Did you mean {value}?") from error


def stopped(number: int) -> str:
  """Returns a sentence that names the signal that stopped a run."""
  return f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}."


def saved(folder: str | None) -> str:
  """Returns a sentence about the checkpoint from which a stopped run resumes."""
  from paxlike import file_io

  names = []
  if folder is not None:
    with contextlib.suppress(*file_io.failures()):
      inside = file_io.absolute(folder) / "checkpoints"
      names = [path.name for path in file_io.beginning_with(inside, "checkpoint_")]
  steps = [int(name.removeprefix("checkpoint_")) for name in names if name[-1].isdigit()]
  if not steps:
    return " No checkpoint was saved: the same command starts over."
  return f" Checkpoint {max(steps)} is saved in {folder}: the same command resumes from it."


def of_run(folder: str | None) -> str:
  """Returns a hint to use the configuration of the run in a folder; "" if there is none."""
  from paxlike.config import allowed_symbols, graph_file

  path = os.path.join(folder or "", "config.json")
  if folder is None or not os.path.isfile(path):
    return ""
  try:
    with open(path) as file:
      foreign = allowed_symbols.foreign(graph_file.names(file.read()))
  except (OSError, ValueError):
    return ""
  more = f" --fdl_allow_modules={','.join(foreign)}" if foreign else ""
  trust = " if you trust these modules" if foreign else ""
  return (
    f" For that of the run in --job_log_dir: --fdl_config_file={shlex.quote(path)}{more}{trust}."
  )
