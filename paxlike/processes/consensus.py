# SPDX-License-Identifier: Apache-2.0
"""Agreement of all processes: on the step at which they stop, and that their values are equal.

They agree over the watch's connections, without a collective of devices. Process 0 decides; main
threads block until then. The main thread calls `StopAgreement.is_here`, `Comparison.give` and
`Comparison.wait`; the watch's thread calls the other methods.
"""

import threading
from collections.abc import Mapping
from typing import Any


class StopAgreement:
  """The sync point at which all processes stop.

  Sync points are numbered; the main thread passes one between steps. When a stop is requested, each
  process proposes the next one at which it will block. All stop at the latest of the proposals.

  Attributes:
    asked: Set when the job is asked to stop.
    promised: The sync point that this process proposes, at which it blocks for the decision.
    agreed: The sync point at which all stop.
    is_reached: Whether this process has reached that sync point.
  """

  def __init__(self, *, is_alone: bool):
    """`is_alone`: this is the only process, which waits for nobody's decision."""
    self.asked = threading.Event()
    self.promised: int | None = None
    self.agreed: int | None = None
    self.is_reached = False
    self._is_alone = is_alone
    self._decided = threading.Condition()
    self._boundary: int | None = None  # The last sync point reached.

  def is_here(self, place: int) -> bool:
    """Returns whether all stop at sync point `place`.

    At the proposed sync point and after it, blocks until process 0 has decided.
    """
    with self._decided:
      self._boundary = place
      if self._is_alone and self.asked.is_set():
        self.agreed = place
      while self.promised is not None and place >= self.promised and self.agreed is None:
        self._decided.wait()  # The watch ends the process if nobody decides.
      self.is_reached = self.agreed is not None and place >= self.agreed
    return self.is_reached

  def promise(self):
    """Proposes the next sync point, if a stop is requested."""
    if self.asked.is_set() and self.promised is None:
      with self._decided:
        # -1: this process blocks at its first sync point.
        self.promised = -1 if self._boundary is None else self._boundary + 1

  def agree(self, place: int):
    """Decides that all stop at sync point `place`."""
    with self._decided:
      self.agreed = place
      self._decided.notify_all()


class Comparison:
  """A barrier that compares values between processes, in rounds."""

  def __init__(self):
    self._decided = threading.Condition()
    self._given: tuple[int, Mapping[str, str]] = (0, {})
    self._sent, self._compared = 0, (0, "")

  def give(self, values: Mapping[str, str]) -> int:
    """Gives this process's values; returns the round."""
    times = self._given[0] + 1
    self._given = (times, values)
    return times

  def wait(self, times: int) -> str:
    """Blocks until round `times` is settled; returns the first difference from process 0, or ""."""
    with self._decided:
      while self._compared[0] < times:
        self._decided.wait()  # The watch ends the process if another one never arrives.
    return self._compared[1]

  def unsent(self) -> dict[str, Any] | None:
    """Returns the message with the values of a round that was not sent yet, if any."""
    times, values = self._given
    if times <= self._sent:
      return None
    self._sent = times
    return {"round": times, "given": dict(values)}

  def pending(self) -> int | None:
    """In process 0, returns the round whose values it has sent and not settled; None if none."""
    times = self._compared[0] + 1
    return times if self._sent == times else None

  def settle(self, times: int, differs: str):
    """Decides round `times`; see `wait`."""
    with self._decided:
      self._compared = (times, differs)
      self._decided.notify_all()
