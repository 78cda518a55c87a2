# SPDX-License-Identifier: Apache-2.0
"""The trackers by name: the values of TRACKERS."""

from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

from paxlike.config import ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.telemetry.trackers.mlflow import Mlflow
from paxlike.telemetry.trackers.tensorboard import TensorBoard
from paxlike.telemetry.trackers.tracker import Tracker
from paxlike.telemetry.trackers.trackio import Trackio
from paxlike.telemetry.trackers.wandb import Wandb

_Class = TypeVar("_Class", bound=type[Tracker])
TRACKERS: dict[str, type[Tracker]] = {
  "tensorboard": TensorBoard,
  "wandb": Wandb,
  "mlflow": Mlflow,
  "trackio": Trackio,
}
TrackerName = Annotated[str, ranges.OneOf(TRACKERS.keys())]


def register_tracker(name: str) -> Callable[[_Class], _Class]:
  """Decorator of a subclass of `Tracker` that makes `name` a value of TRACKERS.

  Raises:
    UserError: The name is paxlike's, or registered by another module.
  """

  def register(cls: _Class) -> _Class:
    if name in TRACKERS and TRACKERS[name].__module__ != cls.__module__:
      raise UserError(f"{name!r} is already registered: {cls.__qualname__} needs another name.")
    TRACKERS[name] = cls
    return cls

  return register


def find(names: Iterable[str]) -> dict[str, type[Tracker]]:
  """Returns the trackers of these names, each once.

  Raises:
    UserError: There is no such tracker.
  """
  for name in names:
    if name not in TRACKERS:
      raise UserError(
        f"TRACKERS (trackers): there is no tracker {name!r}.{did_you_mean(name, TRACKERS)} Known:"
        f" {', '.join(TRACKERS)}. One of your own is known once its module has been imported."
      )
  return {name: TRACKERS[name] for name in names}


def check(names: Iterable[str]):
  """Checks that these trackers can be used; asks no server.

  Raises:
    UserError: There is no such tracker, or a library or a login is missing.
  """
  for name, cls in find(names).items():
    try:
      cls.check()
    except UserError as error:
      raise UserError(f"TRACKERS (trackers): {name}: {error}") from error
