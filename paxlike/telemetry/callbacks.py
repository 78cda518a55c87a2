# SPDX-License-Identifier: Apache-2.0
"""Callbacks: the user's code that is called during training, such as experiment trackers."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from paxlike import user_code
from paxlike.errors import RunError, UserError


class Callback:
  """Base class of callbacks; a subclass overrides the methods that it needs.

  `step` is the number of completed optimizer steps, as in the names of checkpoints. Only process 0
  calls callbacks. They run on the host while the devices compute; a slow one delays the run. An
  exception ends the run, which can be resumed. A resumed run makes new callbacks and continues from
  `step` of `on_start`, so that a tracker may receive later steps again.
  """

  def on_start(self, step: int, folder: epath.Path):
    """Called when the run starts, resumes or, again, rolls back (ON_SPIKE) to completed `step`.

    `folder` has `config.json` and `experiment.json`.
    """

  def on_step(self, step: int, metrics: dict[str, float]):
    """Called after each step. Metrics arrive late: the devices may be a few steps ahead."""

  def on_eval(self, step: int, name: str, metrics: dict[str, float]):
    """Called after each evaluation of the eval set `name`."""

  def on_save(self, step: int, folder: epath.Path):
    """Called when the checkpoint of `step`, in `folder`, is complete: usually some steps later."""

  def on_record(self, record: dict[str, Any]):
    """Called with each record of `metrics.jsonl`, see `Run.records`; meant for trackers."""

  def on_end(self, status: str):
    """Called at the end with "finished", "stopped" or "failed", unless the process is killed."""


class Callbacks:
  """Calls each callback of a run, in order."""

  def __init__(self, callbacks: Sequence[Callback]):
    self._callbacks = tuple(callbacks)

  def call(self, method: str, *arguments: Any):
    """Calls a method of every callback.

    Raises:
      UserError: One failed; the message names the line.
    """
    for callback in self._callbacks:
      try:
        getattr(callback, method)(*arguments)
      except (UserError, RunError):
        raise
      except Exception as error:
        where = user_code.line_of(error, entry=True)
        name = f"{type(callback).__name__}.{method}"
        what = f"{user_code.summary(error)} (in {name})"
        raise UserError(
          f"{f'{where}: ' if where else ''}{what}. Run it again to resume from the newest"
          " checkpoint."
        ) from error


def of_experiment(experiment: Any) -> list[Callback]:
  """Returns the callbacks of an experiment.

  Raises:
    UserError: Its `callbacks` returns something else.
  """
  source = f"what {type(experiment).__name__}.callbacks() returns"
  return check(experiment.callbacks(), source=source)


def check(callbacks: Any, *, source: str) -> list[Callback]:
  """Returns callbacks as a list.

  Raises:
    UserError: They are not a list of callbacks; the message begins with `source`.
  """
  if not isinstance(callbacks, list | tuple):
    raise UserError(f"{source} is {callbacks!r:.100}: expected a list of paxlike.Callback.")
  for one in callbacks:
    if not isinstance(one, Callback):
      is_class = isinstance(one, type) and issubclass(one, Callback)
      hint = f" Write {one.__name__}(), not {one.__name__}." if is_class else ""
      raise UserError(f"{source} has {one!r:.100}: expected a paxlike.Callback.{hint}")
  return list(callbacks)
