# SPDX-License-Identifier: Apache-2.0
"""What a user adds to a run's log: callbacks on the loop, and trackers."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from paxlike import user_code
from paxlike.errors import RunError, UserError


class Callback:
  """Base of what is called while a run trains: a subclass overrides the methods that it wants.

  `step` is always the number of completed optimizer steps, as in the names of checkpoints. Of
  several processes, process 0 alone calls callbacks. They run between steps, which the devices
  compute meanwhile; a slow one holds up the run. What one raises ends the run, which can be resumed
  then. A run that is resumed makes callbacks anew, and goes on from `step` of `on_start`: what a
  tracker has of later steps comes again.
  """

  def on_start(self, step: int, folder: epath.Path):
    """The run begins, or goes on, in its folder; `config.json` and `experiment.json` are there."""

  def on_step(self, step: int, metrics: dict[str, float]):
    """A step is complete. Metrics are read late: the devices may be a few steps ahead."""

  def on_eval(self, step: int, name: str, metrics: dict[str, float]):
    """The eval set `name` has been evaluated."""

  def on_save(self, step: int, folder: epath.Path):
    """The checkpoint of `step` in `folder` is whole; that is noticed after a later step."""

  def on_record(self, record: dict[str, Any]):
    """A record, as `metrics.jsonl` has it: see `Run.records`. What a tracker wants."""

  def on_end(self, status: str):
    """The run ends: "finished", "stopped" or "failed". Not called where the process is killed."""


class Callbacks:
  """Calls each callback of a run, in order."""

  def __init__(self, callbacks: Sequence[Callback]):
    self._callbacks = tuple(callbacks)

  def call(self, method: str, *arguments: Any):
    """Calls a method of all.

    Raises:
      UserError: One failed; its line is named.
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
          f"{f'{where}: ' if where else ''}{what}. Started again, the run goes on from its newest"
          " checkpoint."
        ) from error


def check(callbacks: Any, *, source: str) -> list[Callback]:
  """Returns callbacks as a list.

  Raises:
    UserError: They are none; `source` gave them.
  """
  if not isinstance(callbacks, list | tuple):
    raise UserError(f"{source} is {callbacks!r:.100}: expected a list of paxlike.Callback.")
  for one in callbacks:
    if not isinstance(one, Callback):
      is_class = isinstance(one, type) and issubclass(one, Callback)
      hint = f" Write {one.__name__}(), not {one.__name__}." if is_class else ""
      raise UserError(f"{source} has {one!r:.100}: expected a paxlike.Callback.{hint}")
  return list(callbacks)
