# SPDX-License-Identifier: Apache-2.0
"""The one place for exceptions that nobody foresaw while a run was built and checked.

Nothing has been written by then. What went wrong is said in one line with the flag, the knob or the
line of the user's code that is nearest to it; `--traceback` shows the rest. A flag is blamed only
if the same command fails again, and succeeds without that flag. Once a run computes and writes,
its exceptions are not caught: they are defects, and their tracebacks are needed. But `sys.exit` in
the user's code is always explained: by its status a run would seem finished that is not.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator

from paxlike import flags
from paxlike.errors import RunError, UserError

_PACKAGE = f"{pathlib.Path(__file__).parent}{os.sep}"
_LIBRARIES = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})
# Seconds for finding out which flag is to blame, by leaving out one after another. What took longer
# to fail is not tried again.
_PATIENCE = 15
# A graph in a message of Fiddle's: `<Partial[Mlp(hidden_dim=64, ...)]>`.
_GRAPH = re.compile(r"<(\w+\[[\w.]+)\(.*\)\]>", re.DOTALL)

Attempt = Callable[[flags.Options], object]


@dataclasses.dataclass
class Stage:
  """The part of a program in which a run is built and checked.

  Attributes:
    attempt: Builds and checks the same with other options; None: that is not possible yet.
    is_over: Whether that part has ended, and the run computes and writes.
  """

  attempt: Attempt | None = None
  is_over: bool = False


@contextlib.contextmanager
def explained(options: flags.Options) -> Iterator[Stage]:
  """Context in which what is unexpected becomes one line, until the stage ends.

  Raises:
    UserError: A flag or the user's own code is to blame, or has called `sys.exit`.
    RunError: Neither is; or a running program found too little memory.
  """
  stage = Stage()
  began = time.monotonic()
  try:
    yield stage
  except (UserError, RunError):
    raise
  except (Exception, SystemExit) as error:
    if stage.is_over and not (_is_out_of_memory(error) or isinstance(error, SystemExit)):
      raise
    too_late = stage.is_over or time.monotonic() - began > 2 * _PATIENCE
    raise _explained(error, options, None if too_late else stage.attempt) from error


def _is_out_of_memory(error: BaseException) -> bool:
  return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _explained(error: BaseException, options: flags.Options, attempt: Attempt | None) -> Exception:
  """Returns what to raise instead; `attempt` is None where it is too early or too late for one."""
  what, where = _summary(error), _of_user(error)
  if _is_out_of_memory(error):
    return RunError(
      f"the devices have too little memory ({what}). Lower PERCORE_BATCH_SIZE, set"
      " CHECKPOINT_POLICY=SAVE_NOTHING, or shard the model over more devices (ICI_MESH_SHAPE);"
      " --mode=compile shows what a step takes."
    )
  if attempt is not None and (given := _to_blame(options, attempt, type(error))):
    each = " Without any one of these flags it would have succeeded." if len(given) > 1 else ""
    return UserError(
      f"{', '.join(given)}: {what}{f' ({where})' if where else ''}.{each} --traceback shows more."
    )
  if where:
    return UserError(f"{where}: {what}. --traceback shows more.")
  if isinstance(error, MemoryError):
    return RunError(f"this machine has too little memory: {what}.")
  if experiment := _experiment_of_user(options):
    return UserError(f"{experiment}: unexpected {what}. --traceback shows where.")
  knobs = _knobs_near(error)
  near = f" near {', '.join(knobs[:5])}" if knobs else ""
  return RunError(f"unexpected{near}: {what}. --traceback shows where.")


def _summary(error: BaseException) -> str:
  if isinstance(error, SystemExit):
    return f"sys.exit({'' if error.code is None else repr(error.code)[:300]}) was called"
  text = _GRAPH.sub(r"\1]", str(error).partition("\n\nFiddle context:")[0])
  lines = text.strip().splitlines()
  text = " ".join(map(str.strip, lines[:2])).rstrip(".")
  return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _of_user(error: BaseException) -> str:
  """Returns the innermost line of code that is neither ours nor a library's, or ""."""
  if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
    return f"{error.filename}, line {error.lineno}"  # It has not run.
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    path = os.path.abspath(frame.filename)
    is_ours = path.startswith((_PACKAGE, *_LIBRARIES)) or not os.path.isfile(path)
    if not is_ours and not _is_entry(path):
      return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
  return ""


def _is_entry(path: str) -> bool:
  """Whether a file is the program that was started, as a script is that calls `main`."""
  import __main__

  return path == os.path.abspath(getattr(__main__, "__file__", None) or "")


def _experiment_of_user(options: flags.Options) -> str:
  """Returns the file and the class of the experiment if it is none of ours, or ""."""
  module, _, name = (options.fdl_config or "").rpartition(".")
  file = getattr(sys.modules.get(module), "__file__", None)
  is_ours = file is None or os.path.abspath(file).startswith(_PACKAGE)
  return "" if is_ours else f"{file}, class {name}"


def _to_blame(options: flags.Options, attempt: Attempt, expected: type[BaseException]) -> list[str]:
  """Returns up to three flags without any one of which it would have succeeded.

  An attempt with all flags that succeeds, or fails otherwise, clears every flag of blame.
  """
  if failure(functools.partial(attempt, options)) is not expected:
    return []
  found, began = [], time.monotonic()
  for field, prefix in (("edits", "--fdl."), ("fiddlers", "--fiddler="), ("knobs", "--fdl.")):
    given = getattr(options, field)
    for index, one in reversed(list(enumerate(given))):
      if time.monotonic() - began > _PATIENCE:
        break
      without = dataclasses.replace(options, **{field: given[:index] + given[index + 1 :]})
      if failure(functools.partial(attempt, without)) is None:
        text = one if isinstance(one, str) else "=".join(one)
        found.append(prefix + (text if len(text) <= 100 else f"{text[:100]}..."))
  return found[:3]


def failure(attempt: Callable[[], object]) -> type[BaseException] | None:
  """Returns by what kind of exception an attempt fails, None if it succeeds; prints nothing."""
  nowhere = io.StringIO()
  outcome: list[BaseException] = []
  try:
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
      attempt()
  except BaseException as error:
    outcome.append(error)
  if outcome and not isinstance(outcome[0], Exception | SystemExit):
    raise outcome[0]
  return type(outcome[0]) if outcome else None


def _knobs_near(error: BaseException) -> list[str]:
  """Returns the knobs that are read by the innermost method of an experiment on the way there."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  for frame in reversed(frames):
    declared = getattr(type(frame.f_locals.get("self")), "_declared", {})
    if knobs := [name for name in frame.f_code.co_names if name in declared]:
      return knobs
  return []
