# SPDX-License-Identifier: Apache-2.0
"""Detects that this process has stalled: its phase has made no progress for longer than a limit."""

from typing import Any

from paxlike.processes import phases, stack_traces, watchdog

# Seconds from a request to stop until the process must have reached the sync point; three steps if
# they take longer.
GRACE = 20.0
_GRACE_TO_COMPILE = 300.0  # The same while compiling, and until two steps have begun.
BEYOND = 10.0  # Seconds after the limit before the watchdog acts: the watch should act first.
# Reported as the phase if standard output is blocked, because the pipe's reader does not read.
_PRINTS = "waiting for a reader of its output"


class Stall:
  """The time without progress in the current phase of this process (`phases.OWN`).

  Attributes:
    age: Seconds without progress.
    is_over: Whether `age` is beyond the limit.
  """

  def __init__(self, name: str):
    """`name` is what messages call this process."""
    self.age, self.is_over = 0.0, False
    self._name = name
    self._number, self._bytes = -1, 0
    self._watchdog = watchdog.Watchdog()

  def observe(
    self, tick: float, timeout: float | None, *, must_stop: bool = False, is_ending: bool = False
  ):
    """Measures the phase, `tick` seconds after the last call, and arms the watchdog.

    Args:
      tick: Seconds.
      timeout: STALL_TIMEOUT; see `phases.Progress.limit`.
      must_stop: Whether the process was asked to stop and has not reached `StopAgreement.agreed`.
      is_ending: Whether the process has finished or failed; then it has no limit.
    """
    now = phases.OWN.now
    moved = False
    if now.kind in phases.MOVES_BYTES:
      moved = (count := phases.bytes_moved()) - self._bytes > 2**20
      if moved or now.number != self._number:
        self._bytes = count
    self.age = 0.0 if moved or now.number != self._number else self.age + tick
    self._number = now.number
    limit = limit_of(now.kind, timeout, must_stop=must_stop)
    self.is_over = (
      not is_ending and limit is not None and self.age > limit and not stack_traces.is_debugged()
    )
    if limit is None or is_ending:
      self._watchdog.disarm()
    else:
      line = f"{self._name} is stuck: no Python code runs (last seen {now}),"
      line += " probably a C function holds the GIL. Its stacks follow; it ends by"
      self._watchdog.arm(max(limit - self.age, 0.0) + BEYOND, f"{line} SIGALRM.")

  def report(self) -> dict[str, Any]:
    """Returns the part of a process's report that is about its phase."""
    now = phases.OWN.now
    return {
      "number": now.number,
      "what": _PRINTS if self.is_over and stack_traces.is_printing() else str(now),
      "age": self.age,
      "over": self.is_over,
      "waits": self.is_over and stack_traces.waits_for_others(),
    }

  def disarm(self):
    """Removes the watchdog's time limit."""
    self._watchdog.disarm()

  def close(self):
    """Ends the watchdog."""
    self._watchdog.close()


def limit_of(kind: str, timeout: float | None, *, must_stop: bool) -> float | None:
  """Returns the limit of a phase in seconds; None: it has none."""
  limit = phases.OWN.limit(kind, timeout)
  if not must_stop or kind in phases.MOVES_BYTES:
    return limit
  step = None if kind in phases.COMPILES else phases.OWN.step_seconds()
  grace = _GRACE_TO_COMPILE if step is None else max(GRACE, 3 * step)
  return grace if limit is None else min(limit, grace)
