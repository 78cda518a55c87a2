# SPDX-License-Identifier: Apache-2.0
"""Turns unexpected exceptions while a run is built and checked into one-line errors.

Nothing has been written at that point. The line has the error, and the flag, the knob or the line
of the user's code that is most likely its cause; `--traceback` shows the rest. A flag is blamed
only if the same command fails again, and succeeds without that flag. Once a run computes and
writes, its exceptions are not caught: they are defects, and their tracebacks are needed. `sys.exit`
in the user's code is always reported: with its status, an unfinished run could seem finished.
"""

import contextlib
import dataclasses
import functools
import io
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from paxlike import user_code
from paxlike.cli import flags
from paxlike.errors import ArgumentError, RunError, UserError

if TYPE_CHECKING:
  from paxlike.experiment import Experiment

# Seconds for finding the flag to blame by leaving out one after another. A command that took more
# than twice as long to fail is not retried.
_PATIENCE = 15
Attempt = Callable[[flags.Options], object]


@dataclasses.dataclass
class Stage:
  """The part of a program in which a run is built and checked.

  Attributes:
    attempt: Builds and checks the run with other options; None: not possible yet.
    experiment: The experiment, to name the knobs that set a layer's arguments; None: unknown or
      none.
    is_over: Whether the run has begun to compute and write.
    entry: See `user_code.line_of`.
  """

  attempt: Attempt | None = None
  experiment: "Experiment | None" = None
  is_over: bool = False
  entry: bool = False


@contextlib.contextmanager
def explained(options: flags.Options, *, entry: bool = False) -> Iterator[Stage]:
  """Context that turns unexpected exceptions into one-line errors, until `Stage.is_over`.

  `entry` is whether the program that was started is the user's code.

  Raises:
    UserError: A flag or the user's code is to blame, or the user's code has called `sys.exit`.
    RunError: Neither is to blame, or the devices ran out of memory.
  """
  stage = Stage(entry=entry)
  began = time.monotonic()
  try:
    yield stage
  except RunError:
    raise
  except UserError as error:
    too_late = stage.is_over or time.monotonic() - began > 2 * _PATIENCE
    attempt = None if too_late else stage.attempt
    given = [] if attempt is None else _unnamed(error, options, attempt)
    text = _with_knobs(error, stage)
    if not given and text == str(error):
      raise
    raise UserError(f"{', '.join(given)}: {text}" if given else text) from error
  except (Exception, SystemExit) as error:
    if stage.is_over and not (_is_out_of_memory(error) or isinstance(error, SystemExit)):
      raise
    too_late = stage.is_over or time.monotonic() - began > 2 * _PATIENCE
    stage = dataclasses.replace(stage, attempt=None if too_late else stage.attempt)
    raise _explained(error, options, stage) from error


def _with_knobs(error: UserError, stage: Stage) -> str:
  """Returns an error's message; if a layer refused its arguments, with the knobs that set them."""
  if not isinstance(error, ArgumentError) or stage.experiment is None:
    return str(error)
  from paxlike.config import knob_arguments

  return knob_arguments.named(stage.experiment, error)


def _is_out_of_memory(error: BaseException) -> bool:
  return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _explained(error: BaseException, options: flags.Options, stage: Stage) -> Exception:
  """Returns the exception to raise instead of `error`; tries no flags without `stage.attempt`."""
  what, where = user_code.summary(error), user_code.line_of(error, entry=stage.entry)
  if _is_out_of_memory(error):
    return RunError(
      f"the devices have too little memory ({what}). Lower PERCORE_BATCH_SIZE, set"
      " CHECKPOINT_POLICY=SAVE_NOTHING, or shard the model over more devices (ICI_MESH_SHAPE);"
      " --mode=compile shows the memory of a step."
    )
  if stage.attempt is not None and (given := _to_blame(options, stage.attempt, error)):
    each = " Without any one of these flags it succeeds." if len(given) > 1 else ""
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


def _unnamed(error: UserError, options: flags.Options, attempt: Attempt) -> list[str]:
  """Returns the graph edits that cause an error; none if its message already mentions one."""
  text, paths = str(error), [path for path, _ in options.edits]
  names = [name for path in paths for name in re.findall(r"[A-Za-z_]\w*", path)[-1:]]
  if not names or any(re.search(rf"\b{name}\b", text) for name in names):
    return []
  return _to_blame(options, attempt, error, kinds=("edits",), alone=False)


def _experiment_of_user(options: flags.Options) -> str:
  """Returns the file and the class of the experiment if it is the user's, else ""."""
  module, _, name = (options.fdl_config or "").rpartition(".")
  file = getattr(sys.modules.get(module), "__file__", None)
  return "" if file is None or user_code.is_ours(file) else f"{file}, class {name}"


def _to_blame(
  options: flags.Options,
  attempt: Attempt,
  error: BaseException,
  kinds: Iterable[str] = ("edits", "fiddlers", "knobs"),
  *,
  alone: bool = True,
) -> list[str]:
  """Returns up to three flags such that leaving out any one of them avoids the error.

  Returns none if an attempt with all flags succeeds, or fails with another type of error. If
  `alone`, the attempt without a flag must succeed; otherwise it may fail with another error.
  """
  if type(failure(functools.partial(attempt, options))) is not type(error):
    return []
  found, began = [], time.monotonic()
  for field in kinds:
    given, prefix = getattr(options, field), "--fiddler=" if field == "fiddlers" else "--fdl."
    for one in reversed(dict.fromkeys(given)):
      if time.monotonic() - began > _PATIENCE:
        break
      others = tuple(other for other in given if not _sets_the_same(other, one))
      without = dataclasses.replace(options, **{field: others})
      other = failure(functools.partial(attempt, without))
      if other is None or not (alone or str(other) == str(error)):
        text = one if isinstance(one, str) else "=".join(one)
        found.append(prefix + (text if len(text) <= 100 else f"{text[:100]}..."))
  return found[:3]


def _sets_the_same(other: str | tuple[str, str], one: str | tuple[str, str]) -> bool:
  return other == one if isinstance(one, str) else other[0] == one[0]


def failure(attempt: Callable[[], object]) -> BaseException | None:
  """Returns the exception that an attempt raises, None if it succeeds; hides its output."""
  nowhere = io.StringIO()
  outcome: list[BaseException] = []
  try:
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
      attempt()
  except BaseException as error:
    outcome.append(error)
  if outcome and not isinstance(outcome[0], Exception | SystemExit):
    raise outcome[0]
  return outcome[0] if outcome else None


def _knobs_near(error: BaseException) -> list[str]:
  """Returns the knobs that the innermost experiment method in the traceback reads."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  for frame in reversed(frames):
    declared = getattr(type(frame.f_locals.get("self")), "_declared", {})
    if knobs := [name for name in frame.f_code.co_names if name in declared]:
      return knobs
  return []
