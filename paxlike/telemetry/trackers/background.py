# SPDX-License-Identifier: Apache-2.0
"""A tracker in a thread of its own, so that no step waits for a network."""

import collections
import threading
from collections.abc import Iterator

from paxlike.errors import one_line
from paxlike.telemetry import metric_files
from paxlike.telemetry.trackers.tracker import Record, TrackedRun, Tracker

# Seconds until a tracker that failed is opened again; doubled after each further failure.
_RETRY, _MOST_RETRY = 30.0, 600.0
_MOST_ITEMS = 2000  # Waiting records; of more, the older half is read from metrics.jsonl again.


class Background:
  """Gives a tracker the records of a run, each of them once.

  Whenever it opens the tracker, it first sends the records of `metrics.jsonl` that the tracker
  lacks: those before it was chosen, those of a long outage, and those that a killed process had not
  sent. Records that a resumed run repeats, and that the tracker has, are left out.
  """

  def __init__(self, name: str, tracker: Tracker, run: TrackedRun):
    """Starts the thread, which opens the tracker."""
    self._name = name
    self._tracker = tracker
    self._run = run
    self._newest: dict[str, int] = {}  # Part -> updates of the tracker's newest record.
    self._has_failed = False
    self._wait = _RETRY
    # Shared with the main thread, under the condition.
    self._changed = threading.Condition()
    self._items: collections.deque[Record | None] = collections.deque()  # None: sync.
    self._is_behind = False  # Whether items were dropped.
    self._status: str | None = None  # Set when the run ends.
    self._lines: collections.deque[str] = collections.deque()
    self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
    self._thread.start()

  def write(self, record: Record):
    """Adds a record."""
    self._add(record)

  def sync(self):
    """Makes the tracker sync after the records so far."""
    self._add(None)

  def _add(self, item: Record | None):
    with self._changed:
      if len(self._items) >= _MOST_ITEMS:
        self._is_behind = True
        for _ in range(_MOST_ITEMS // 2):  # The newest may not be on a bucket yet.
          self._items.popleft()
      self._items.append(item)
      self._changed.notify()

  def end(self, status: str):
    """Ends the run after the records so far."""
    with self._changed:
      self._status = status
      self._changed.notify()

  def wait(self, seconds: float):
    """Waits at most `seconds` for the end, until which all records are sent."""
    self._thread.join(seconds)
    if self._thread.is_alive():
      self._give_up("it takes too long")

  def lines(self) -> Iterator[str]:
    """Yields new lines for the console."""
    while self._lines:
      yield self._lines.popleft()

  def _work(self):
    while True:
      is_ending = self._status is not None
      try:
        self._follow()
        return
      # Whatever a library raises: the run has its records in metrics.jsonl.
      except BaseException as error:
        reason = f"{type(error).__name__}: {one_line(error, limit=300).rstrip('.')}"
      if is_ending:
        self._give_up(reason)
        return
      if not self._has_failed:
        self._lines.append(
          f"tracker {self._name} failed: {reason}. Training goes on; the tracker is tried again and"
          " then gets what it lacks."
        )
      self._has_failed = True
      with self._changed:
        self._changed.wait_for(lambda: self._status is not None, timeout=self._wait)
      self._wait = min(2 * self._wait, _MOST_RETRY)

  def _give_up(self, reason: str):
    self._lines.append(
      f"tracker {self._name}: some records were not sent ({reason}). The same command again sends"
      " what it lacks."
    )

  def _follow(self):
    """Opens the tracker, sends what it lacks, and then records as they come, until the end."""
    self._newest = dict(self._tracker.open(self._run))
    if not self._has_failed:
      self._say_where()
    self._catch_up()
    if self._has_failed:
      self._say_where(" works again")
    self._has_failed, self._wait = False, _RETRY
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._items or self._status)
        item = self._items[0] if self._items else None
        is_done = not self._items
      if self._is_behind:
        self._catch_up()
        continue
      if is_done:
        self._tracker.close(str(self._status))
        return
      if item is None:
        self._tracker.sync()
      else:
        self._send(item)
      with self._changed:
        if self._items and self._items[0] is item:
          self._items.popleft()  # Only now: after a failure it is tried again.

  def _say_where(self, again: str = ""):
    if (where := self._tracker.where()) is not None:
      self._lines.append(f"tracker {self._name}{again}: {where}")

  def _catch_up(self):
    """Sends the records of `metrics.jsonl` that the tracker lacks."""
    with self._changed:
      self._is_behind = False
    for values in metric_files.records(self._run.folder):
      self._send(Record.of(values))

  def _send(self, record: Record):
    if record.updates > self._newest.get(record.part, -1):
      self._tracker.write(record)
      self._newest[record.part] = record.updates
