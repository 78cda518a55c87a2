# SPDX-License-Identifier: Apache-2.0
"""The current phase of this process, from which its watch detects a stall.

Entering a phase costs less than a microsecond. All processes of a job enter the same phases in the
same order, so the process that has entered the fewest is the one that the others wait for.
"""

import collections
import statistics
import threading
import time
from typing import NamedTuple

#: Kind of phase -> its description; `of` is a step or a name.
KINDS = {
  "start": "starting",
  "check": "checking the run and its data",
  "compare": "comparing its graph with that of process 0",
  "meet": "waiting until all have checked the run",
  "poll": "waiting for a checkpoint",
  "restore": "restoring its state",
  "init": "initialising its state",
  "compile": "compiling the step",
  "data": "waiting for data of step {of}",
  "dispatch": "dispatching step {of}",
  "sample": "sampling answers",
  "reward": "waiting for rewards",
  "step": "waiting for step {of} on its devices",
  "eval_compile": "compiling the evaluation of {of}",
  "eval": "evaluating {of}",
  "decode_compile": "compiling the decoding",
  "decode": "decoding",
  "listen": "waiting for a message",
  "save": "saving checkpoint {of}",
  "profile": "starting or stopping the profiler before step {of}",
  "end": "ending",
}
#: Kinds that compile.
COMPILES = ("init", "compile", "eval_compile", "decode_compile")
# Kinds without a default limit.
_UNLIMITED = ("start", "check", "compare", "meet", "reward", *COMPILES, "end")
# Kinds without any limit: they wait for another job, or for a person.
_NEVER_STUCK = ("poll", "listen")
#: Kinds in which bytes read and written count as progress.
MOVES_BYTES = ("restore", "save")

FLOOR, FLOOR_OF_BYTES = 60.0, 600.0  # Least limit in seconds; the second for MOVES_BYTES.
UNMEASURED = 1800.0  # Limit in seconds for a kind that was entered fewer than three times.
_MEDIANS, _LONGEST = 20, 3  # The limit is 20 times the median or 3 times the longest, if larger.
_KEPT = 51


class Phase(NamedTuple):
  """A phase of the process.

  Attributes:
    kind: A key of KINDS.
    of: A step or a name.
    number: Number of phases entered before.
    since: `time.monotonic()` at its start.
  """

  kind: str
  of: object
  number: int
  since: float

  def __str__(self) -> str:
    return KINDS[self.kind].format(of=self.of)


class Progress:
  """The phases of one process; only its main thread enters them.

  Attributes:
    now: The current phase.
    began: `time.monotonic()` when the run began.
  """

  def __init__(self):
    self.now = Phase("start", "", 0, time.monotonic())
    self.began = self.now.since
    self._seconds = collections.defaultdict[str, float](float)
    self._counting = threading.Lock()
    self._recent: collections.deque[Phase] = collections.deque(maxlen=8)
    kept = {kind: collections.deque[float](maxlen=_KEPT) for kind in KINDS}
    self._times: dict[str, collections.deque[float]] = kept
    self._longest = dict.fromkeys(KINDS, 0.0)
    self._last_step: float | None = None
    self._between_steps = collections.deque[float](maxlen=_KEPT)

  def restart(self, *, ago: float = 0.0):
    """Begins the phases of a new run in this process, `ago` seconds ago."""
    with self._counting:
      self.began = time.monotonic() - ago
      self._seconds.clear()
      self.now = Phase("start", "", self.now.number + 1, self.began)

  def count_as_start(self):
    """Counts all time so far, in `seconds`, as that of starting."""
    now = time.monotonic()
    with self._counting:
      self._seconds.clear()
      self._seconds["start"] = now - self.began
      self.now = Phase("start", "", self.now.number + 1, now)

  def enter(self, kind: str, of: object = "", *, counts_as: str | None = None):
    """Begins a phase. In `seconds`, the phase that ends is counted as `counts_as`, if given."""
    last, now = self.now, time.monotonic()
    seconds = now - last.since
    with self._counting:
      self._seconds[counts_as or last.kind] += seconds
      self.now = Phase(kind, of, last.number + 1, now)
    self._times[last.kind].append(seconds)
    if seconds > self._longest[last.kind]:
      self._longest[last.kind] = seconds
    if kind == "step":
      if self._last_step is not None:
        self._between_steps.append(now - self._last_step)
      self._last_step = now
    self._recent.append(last)

  def seconds(self) -> dict[str, float]:
    """Returns the seconds since `began` by the kind of phase; may be called in any thread."""
    with self._counting:
      seconds, now = dict(self._seconds), self.now
      seconds[now.kind] = seconds.get(now.kind, 0.0) + time.monotonic() - now.since
    return seconds

  def limit(self, kind: str, given: float | None) -> float | None:
    """Returns the seconds without progress after which a phase counts as stalled; None: no limit.

    Args:
      kind: A key of KINDS.
      given: STALL_TIMEOUT in seconds for all kinds; 0: no limit; None: derived from the median and
        the longest time of the kind so far.
    """
    if kind in _NEVER_STUCK:
      return None
    if given is not None:
      return given or None
    if kind in _UNLIMITED:
      return None
    times = list(self._times[kind])
    if len(times) < 3:
      return UNMEASURED
    floor = FLOOR_OF_BYTES if kind in MOVES_BYTES else FLOOR
    return max(floor, _MEDIANS * statistics.median(times), _LONGEST * self._longest[kind])

  def step_seconds(self) -> float | None:
    """Returns the median seconds from one step to the next, None before the second."""
    times = list(self._between_steps)
    return statistics.median(times) if times else None

  def recent(self) -> list[str]:
    """Returns a line for each of the last phases with its duration, oldest first."""
    phases = [*self._recent, self.now]
    ends = [phase.since for phase in phases[1:]] + [time.monotonic()]
    return [f"{end - one.since:10.3f} s  {one}" for one, end in zip(phases, ends, strict=True)]


def bytes_moved() -> int:
  """Returns how many bytes this process has read and written by system calls, 0 if unknown."""
  try:
    with open("/proc/self/io") as file:
      counts = dict(line.split(": ") for line in file)
  except OSError:
    return 0
  return int(counts["rchar"]) + int(counts["wchar"])


#: The progress of this process.
OWN = Progress()
enter = OWN.enter
