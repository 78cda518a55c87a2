# SPDX-License-Identifier: Apache-2.0
"""The goodput ledger: on what every second since the first start of a run was spent.

Each start of the program is an attempt with its own file, `goodput/attempt_00000000.jsonl`. A line
holds the time, the completed updates, and the seconds of the attempt so far by category. There is
one line for each checkpoint, and a last line for the current state. A thread rewrites the last line
every `BEAT` seconds, so that after a kill at most that long is unknown. If a finished run is later
trained further, the time in between is not counted.
"""

import collections
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from etils import epath

from paxlike import file_io
from paxlike.errors import RunError, UserError
from paxlike.processes import phases, verdicts

#: Category -> its title.
CATEGORIES = {
  "step": "steps",
  "data_wait": "waiting for data",
  "evaluation": "evaluation",
  "save": "saving",
  "restore": "restoring",
  "compile": "compilation",
  "profile": "starting and stopping the profiler",
  "start_up": "start and end",
  "stalled": "stalled",
  "lost": "recomputed steps",
  "down": "not running",
}
#: Seconds between writes.
BEAT = 10.0
_OF_PHASE = {
  "restore": "restore",
  **dict.fromkeys(phases.COMPILES, "compile"),
  "init": "start_up",
  "data": "data_wait",
  **dict.fromkeys(("dispatch", "sample", "reward", "step"), "step"),
  **dict.fromkeys(("eval", "decode"), "evaluation"),
  "save": "save",
  "profile": "profile",
}
# What is computed again after a restart from an earlier checkpoint.
_RECOMPUTED = ("step", "data_wait")
_FOLDER, _PREFIX = "goodput", "attempt_"
_MARKS = 1000  # Checkpoints of an attempt that are remembered.


class Mark(NamedTuple):
  """A line of an attempt.

  Attributes:
    time: In seconds since 1970.
    updates: Completed updates of the run; None while its state is not restored.
    seconds: Since the attempt began, by category.
    finished: Whether the run is finished.
  """

  time: float
  updates: int | None
  seconds: dict[str, float]
  finished: bool = False


class Goodput(NamedTuple):
  """The time since the first start of a run.

  Attributes:
    seconds: For each category; they add up to `wall`.
    attempts: Starts of the program that left a file.
  """

  seconds: dict[str, float]
  attempts: int

  @property
  def wall(self) -> float:
    """Seconds since the first start."""
    return sum(self.seconds.values())

  @property
  def share(self) -> float:
    """The goodput: the fraction of the time that computed steps which were kept."""
    return self.seconds["step"] / max(self.wall, 1e-9)

  def text(self) -> str:
    """Returns a line for a person."""
    starts = f", in {self.attempts} recorded starts" if self.attempts > 1 else ""
    longest = sorted(self.seconds.items(), key=lambda item: -item[1])
    parts = [f"{CATEGORIES[name]} {value:.1f} s" for name, value in longest if value >= 0.05]
    return f"goodput: {self.share:.1%} of {self.wall:.1f} s{starts}: {', '.join(parts)}"


def summary(folder: epath.Path) -> Goodput | None:
  """Returns the goodput of the run in `folder`, up to its last line; None without a ledger."""
  attempts = _attempts(folder)
  return _sum(attempts) if attempts else None


def _sum(attempts: Sequence[Sequence[Mark]]) -> Goodput:
  """Adds up attempts, each at least one line, oldest first."""
  seconds = dict.fromkeys(CATEGORIES, 0.0)
  kept, later_start = None, None  # The step from which a later attempt resumed; when it began.
  for marks in reversed(attempts):
    last = marks[-1]
    for name, value in last.seconds.items():
      seconds[name] += value
    if kept is not None:
      useful = _at(marks, kept).seconds
      for name in _RECOMPUTED:
        lost = last.seconds.get(name, 0.0) - useful.get(name, 0.0)
        seconds[name] -= lost
        seconds["lost"] += lost
    if later_start is not None and not last.finished:
      seconds["down"] += max(0.0, later_start - last.time)
    start = marks[0].updates
    if start is not None:
      kept = start if kept is None else min(kept, start)
    later_start = last.time - sum(last.seconds.values())
  return Goodput(seconds, len(attempts))


def _at(marks: Sequence[Mark], updates: int) -> Mark:
  """Returns the line of an attempt when it had completed `updates`, at the latest its last."""
  return next((mark for mark in marks if (mark.updates or 0) >= updates), marks[-1])


def _attempts(folder: epath.Path) -> list[list[Mark]]:
  """Reads the attempts of a run, oldest first; lines that are damaged are skipped."""
  found = [_read(path) for path in _files(folder)]
  return [marks for marks in found if marks]


def _files(folder: epath.Path) -> list[epath.Path]:
  found = file_io.beginning_with(folder / _FOLDER, _PREFIX)
  return [path for path in found if re.fullmatch(rf"{_PREFIX}\d{{8}}\.jsonl", path.name)]


def _read(path: epath.Path) -> list[Mark]:
  marks = []
  for line in file_io.read_bytes(path).splitlines():
    with contextlib.suppress(*file_io.MALFORMED):
      data = json.loads(line)
      known = {name: float(data["seconds"].get(name, 0.0)) for name in CATEGORIES}
      updates = data["updates"]
      updates = None if updates is None else int(updates)
      finished = data.get("finished") is True
      marks.append(Mark(float(data["time"]), updates, known, finished))
  return marks


class Ledger:
  """The ledger of this process's attempt, whose phases `phases.OWN` measures.

  Attributes:
    updates: Completed updates of the run; None while its state is not restored.
  """

  def __init__(self, folder: epath.Path, *, check_owner: Callable[[], None] = lambda: None):
    """Begins an attempt. Nothing is written in a new folder before `start`.

    Args:
      folder: The run's folder.
      check_owner: Raises if this process may no longer write.
    """
    self.updates: int | None = None
    self._check_owner = check_owner
    self._earlier = _attempts(folder)
    number = max((int(path.stem.removeprefix(_PREFIX)) for path in _files(folder)), default=-1) + 1
    self._path = folder / _FOLDER / f"{_PREFIX}{number:08d}.jsonl"
    self._first: Mark | None = None  # Kept, because it says from which step the attempt resumed.
    self._marks: collections.deque[Mark] = collections.deque(maxlen=_MARKS)
    self._is_written = self._is_finished = self._is_left_out = False
    self._lost = dict.fromkeys(_RECOMPUTED, 0.0)  # Seconds of steps before a rollback.
    self._lock = threading.Lock()
    self._ends = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True, name="goodput")
    self._thread.start()
    verdicts.last_actions.append(self._end_by)

  def mark(self, updates: int, *, finished: bool = False):
    """Writes the state of the attempt at its start, a checkpoint, or its end.

    An attempt that finds the run finished and completes no update is left out.

    Args:
      updates: Completed updates of the run.
      finished: Whether the run is finished.
    """
    self.updates, self._is_finished = updates, finished
    was_finished = bool(self._earlier) and self._earlier[-1][-1].finished
    if finished and was_finished and self._first is not None and self._first.updates == updates:
      self.leave_out()
      return
    now = self._now()
    self._first = self._first or now
    self._marks.append(now)
    self._write()

  def rolled_back(self, updates: int):
    """Counts the time of the steps after `updates` as lost."""
    now, kept = self._now().seconds, _at(self._marks, updates).seconds
    for name in _RECOMPUTED:
      self._lost[name] += now.get(name, 0.0) - kept.get(name, 0.0)
    while self._marks and (self._marks[-1].updates or 0) > updates:
      self._marks.pop()

  def leave_out(self):
    """Removes this attempt from the ledger: it found nothing to train."""
    with self._lock:
      self._is_left_out = True
      if self._is_written:
        self._path.unlink(missing_ok=True)

  def summary(self) -> Goodput | None:
    """Returns the goodput of the run up to now; None if there is no attempt."""
    own = [] if self._is_left_out else [self._lines(self._now())]
    attempts = [*self._earlier, *own]
    return _sum(attempts) if attempts else None

  def close(self, *, writes: bool = True):
    """Ends the thread, and, if anything was written, writes the last line."""
    verdicts.last_actions.remove(self._end_by)
    self._ends.set()
    self._thread.join()
    with contextlib.suppress(*file_io.failures(), UserError, RunError):
      if writes and self._is_written:
        self._write()

  def _now(self) -> Mark:
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    for kind, spent in phases.OWN.seconds().items():
      seconds[_OF_PHASE.get(kind, "start_up")] += spent
    for name, lost in self._lost.items():
      seconds[name] -= lost
      seconds["lost"] += lost
    return Mark(time.time(), self.updates, dict(seconds), self._is_finished)

  def _lines(self, last: Mark) -> list[Mark]:
    first = [] if self._first is None or self._first in self._marks else [self._first]
    return [*first, *self._marks, last]

  def _write(self, last: Mark | None = None):
    with self._lock:
      if self._is_left_out:
        return
      self._check_owner()
      self._path.parent.mkdir(parents=True, exist_ok=True)
      lines = self._lines(last or self._now())
      file_io.write(self._path, "".join(f"{json.dumps(mark._asdict())}\n" for mark in lines))
      self._is_written = True

  def _beat(self):
    while not self._ends.wait(BEAT):
      if self._is_written or self._earlier:
        # The main thread reports a folder that cannot be written.
        with contextlib.suppress(*file_io.failures(), UserError, RunError):
          self._write()

  def _end_by(self, verdict: verdicts.Verdict):
    """Counts the phase in which the job is ended by `verdict` as stalled, unless it has failed."""
    last = self._now()
    if verdict.kind != "failed":
      phase = phases.OWN.now
      spent = time.monotonic() - phase.since
      last.seconds[_OF_PHASE.get(phase.kind, "start_up")] -= spent
      last.seconds["stalled"] = spent
    with contextlib.suppress(UserError, RunError):
      self._write(last)
