# SPDX-License-Identifier: Apache-2.0
"""The interface of trackers, and what they are given: a run and its records."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from etils import epath

from paxlike.errors import UserError

# Keys of a record that identify it.
_IDENTITY = ("kind", "set", "step", "updates", "time")
UPDATES = "/updates"  #: Suffix of the metrics that say how far a part goes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
  """A run, at one of its starts.

  Attributes:
    id: Letters and digits, the same at each start; kept in the run's folder.
    name: The name of its folder.
    project: TRACKER_PROJECT; None: not set.
    folder: Its folder, which may be on a bucket.
    step: Completed optimizer steps when it starts or resumes.
    is_trained: False: only evaluations of its checkpoints are written.
    knobs: The knobs of its experiment; empty if it has none.
    facts: The model's size, devices, versions, commit and the like, as one flat mapping.
    files: Name -> content of its configuration files, such as `config.json`.
  """

  id: str
  name: str
  project: str | None = None
  folder: epath.Path
  step: int = 0
  is_trained: bool = True
  knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  facts: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A record of a run, such as a line of `metrics.jsonl`.

  Attributes:
    part: What it is about: "train", "eval_SET", "sample", "layers" and so on.
    step: Training steps are counted from 0; in other parts the same as `updates`.
    updates: Completed optimizer steps.
    time: Seconds since 1970.
    scalars: Numbers by name; nested mappings and lists are flattened into names with slashes.
    texts: Texts by name.
    values: The whole record as in `metrics.jsonl`.
  """

  part: str
  step: int
  updates: int
  time: float
  scalars: Mapping[str, float]
  texts: Mapping[str, str]
  values: Mapping[str, Any]

  @classmethod
  def of(cls, values: Mapping[str, Any]) -> Self:
    """Returns a record of `metrics.jsonl` as a `Record`."""
    kind = values.get("kind", "train")
    rest = {name: value for name, value in values.items() if name not in _IDENTITY}
    leaves = dict(_leaves("", rest))
    return cls(
      part=f"eval_{values['set']}" if kind == "eval" else kind,
      step=values.get("step", values["updates"]),
      updates=values["updates"],
      time=values.get("time", 0.0),
      scalars={name: leaf for name, leaf in leaves.items() if not isinstance(leaf, str)},
      texts={name: leaf for name, leaf in leaves.items() if isinstance(leaf, str)},
      values=values,
    )

  def named(self) -> dict[str, float]:
    """Returns the scalars with the part in their names, such as "train/loss".

    The last one is `updates`, such as "train/updates": see `newest`.
    """
    prefix = f"{self.part}/"
    values = {
      name if name.startswith(prefix) else prefix + name: value
      for name, value in self.scalars.items()
    }
    return values | {f"{self.part}{UPDATES}": self.updates}


def newest(values: Mapping[str, Any]) -> dict[str, int]:
  """Returns part -> updates from the newest values of a tracker's metrics, for `Tracker.open`."""
  return {
    name.removesuffix(UPDATES): int(value)
    for name, value in values.items()
    if name.endswith(UPDATES)
  }


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, float | str]]:
  """Yields (name, leaf) of nested mappings and lists, without those that are None."""
  if isinstance(value, Mapping):
    for name, child in value.items():
      yield from _leaves(f"{prefix}/{name}" if prefix else str(name), child)
  elif isinstance(value, list | tuple):
    for index, child in enumerate(value):
      yield from _leaves(f"{prefix}/{index}", child)
  elif isinstance(value, str):
    yield prefix, value
  elif value is not None:
    yield prefix, value if isinstance(value, int) else float(value)


class Tracker:
  """Base class of trackers: shows a run somewhere, such as on a server.

  A tracker has a thread of its own, which calls its methods one after another, so they may wait for
  a network. After an exception the thread prints one warning, waits, opens the tracker again and
  sends what it lacks; training goes on. Only process 0 has trackers.

  Attributes:
    library: The library that it needs, imported only in methods; None: none.
    in_folder: Whether it writes into the run's folder. It is then called in the main thread, and an
      exception ends the run, as with other files of the folder.
  """

  library: ClassVar[str | None] = None
  in_folder: ClassVar[bool] = False

  @classmethod
  def check(cls):
    """Checks before training that the tracker can be used; asks no server.

    Raises:
      UserError: A library or a login is missing.
    """
    if cls.library is not None and importlib.util.find_spec(cls.library) is None:
      raise UserError(f"{cls.library} is missing: pip install 'paxlike[{cls.library}]'.")

  def open(self, run: TrackedRun) -> Mapping[str, int]:
    """Opens the tracker's run `run.id`, new or existing.

    Returns:
      Part -> updates of its newest record that the tracker has. `write` is not given those again.
    """
    raise NotImplementedError

  def where(self) -> str | None:
    """Returns where an open run can be seen, such as its URL, to be printed; None: nothing."""
    return None

  def write(self, record: Record):
    """Adds a record. Within a part, `updates` increases; parts are independent."""
    raise NotImplementedError

  def sync(self):
    """Makes written records durable; called with each checkpoint."""

  def close(self, status: str):
    """Ends the run with "finished", "stopped" or "failed"; it may be opened again."""
