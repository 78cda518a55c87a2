# SPDX-License-Identifier: Apache-2.0
"""The records of a run, given to `metrics.jsonl` and to each of its trackers."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from paxlike.telemetry.run_header import RunHeader
from paxlike.telemetry.trackers import provenance, registry
from paxlike.telemetry.trackers.background import Background
from paxlike.telemetry.trackers.json_lines import JsonLines
from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker

# Time-out at the end of a run for the last uploads of all trackers together.
_END_SECONDS = 30.0
_UPLOADED = ("config.json", "config.txt", "experiment.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracking:
  """Which trackers a run has.

  Attributes:
    names: Of `registry.TRACKERS`.
    project: Project of the run in trackers that have projects; None: theirs.
    knobs: The knobs of the experiment, for display.
  """

  names: tuple[str, ...] = ("tensorboard",)
  project: str | None = None
  knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Recorder:
  """Writes records to `metrics.jsonl` first, then to the trackers."""

  def __init__(self, folder: epath.Path, tracking: Tracking):
    """Opens nothing."""
    self._folder = folder
    self._tracking = tracking
    self._in_folder: list[Tracker] = []
    self._background: list[Background] = []

  def start(self, header: RunHeader, files: Mapping[str, str | bytes | None], *, step: int):
    """Opens the trackers of a run that trains from `step` completed updates.

    After a rollback it does so again, as if the run had been stopped.

    Raises:
      UserError: The file with the run's id is damaged.
      OSError: A file in the run's folder cannot be written; or an exception of its store.
    """
    if self.is_open:
      self.close("stopped")
    made = {name: cls() for name, cls in registry.find(self._tracking.names).items()}
    others = {name: tracker for name, tracker in made.items() if not tracker.in_folder}
    run = TrackedRun(
      id=provenance.run_id(self._folder) if others else "",
      name=self._folder.name,
      project=self._tracking.project,
      folder=self._folder,
      step=step,
      knobs=self._tracking.knobs,
      facts=provenance.facts(header) if others else {},
      files={name: text for name in _UPLOADED if (text := files.get(name)) is not None},
    )
    self._open(JsonLines(), *(tracker for tracker in made.values() if tracker.in_folder), run=run)
    self._background = [Background(name, tracker, run) for name, tracker in others.items()]

  def _open(self, *trackers: Tracker, run: TrackedRun):
    self._in_folder = list(trackers)
    for tracker in trackers:
      tracker.open(run)

  @property
  def is_open(self) -> bool:
    """Whether there is anything to close."""
    return bool(self._in_folder or self._background)

  def write(self, values: Mapping[str, Any]):
    """Writes a record; before `start`, only to trackers in the folder (`--mode=eval`)."""
    if not self._in_folder:
      # One of the user's modules may not be imported here.
      found = [registry.TRACKERS.get(name, Tracker) for name in self._tracking.names]
      run = TrackedRun(id="", name=self._folder.name, folder=self._folder, is_trained=False)
      self._open(*(cls() for cls in found if cls.in_folder), run=run)
    record = Record.of(values)
    for tracker in (*self._in_folder, *self._background):
      tracker.write(record)

  def sync(self):
    """Makes written records durable in the folder; the other trackers follow."""
    for tracker in (*self._in_folder, *self._background):
      tracker.sync()

  def lines(self) -> Iterator[str]:
    """Yields the lines of trackers for the console since the last call."""
    for tracker in self._background:
      yield from tracker.lines()

  def close(self, status: str):
    """Ends the trackers' run with "finished", "stopped" or "failed"."""
    for tracker in self._in_folder:
      tracker.close(status)
    deadline = time.monotonic() + _END_SECONDS
    for tracker in self._background:
      tracker.end(status)
    for tracker in self._background:
      tracker.wait(max(deadline - time.monotonic(), 0.0))
