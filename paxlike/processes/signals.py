# SPDX-License-Identifier: Apache-2.0
"""Graceful stop on preemption (SIGTERM) or Ctrl-C: save a checkpoint, then end."""

import os
import signal
import threading
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from paxlike.processes import job_watch


class StopSignal:
  """Context in which SIGTERM and Ctrl-C only request a stop; a second Ctrl-C interrupts.

  Outside of the main thread, signals keep their handlers.

  All processes of a job stop at the same sync point, whichever gets the signal: their watches agree
  on it. A process that does not reach its next sync point in time is ended by its watch. After the
  job has stopped, a process that gets the signal late ignores it, because the others wait for it.

  Attributes:
    number: The signal received; None if none.
  """

  def __init__(self):
    self.number: int | None = None
    self._times = 0  # Number of calls of `requested`: the index of the sync point.
    self._previous: dict[int, object] = {}
    self._is_interrupted = False
    self._watch = job_watch.current()
    # If processes joined without `multiprocess`, JAX's preemption service finds the sync point.
    self._by_jax = jax.process_count() > 1 and (self._watch is None or self._watch.is_alone)

  def requested(self) -> bool:
    """A sync point: returns whether the run should save and end here.

    All processes call this equally often, after the same steps and evaluation batches.
    """
    self._times += 1
    if self._by_jax:
      if multihost_utils.reached_preemption_sync_point(self._times):
        self.number = signal.SIGTERM
      return self.number is not None
    if self.number is not None and self._watch is not None:
      self._watch.ask_to_stop()  # In case the wake-up file descriptor did not deliver the signal.
    stops = self.number is not None if self._watch is None else self._watch.stops_here(self._times)
    if stops and self.number is None:
      self.number = signal.SIGTERM  # Another process got it.
    return stops

  def __enter__(self) -> Self:
    is_main = threading.current_thread() is threading.main_thread()
    noted = (signal.SIGINT,) if self._by_jax else (signal.SIGTERM, signal.SIGINT)
    for number in noted if is_main else ():
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object):
    for number, handler in self._previous.items():
      if self._may_come_late(number):
        signal.signal(number, signal.SIG_IGN)
        continue
      # None stands for a handler of C code (JAX's), which Python cannot restore.
      known = signal.SIG_DFL if handler is None else handler
      signal.signal(number, known)  # pyright: ignore[reportArgumentType]

  def _may_come_late(self, number: int) -> bool:
    """Returns whether all have stopped, perhaps before this process gets the signal of the job."""
    is_alone = self._watch is None or self._watch.is_alone
    is_second_ctrl_c = number == signal.SIGINT and self._is_interrupted
    return self.number is not None and not is_alone and not is_second_ctrl_c

  def _note(self, number: int, frame: FrameType | None):
    del frame
    if number == signal.SIGINT and self._is_interrupted:
      raise KeyboardInterrupt
    self._is_interrupted = number == signal.SIGINT
    if self._is_interrupted:
      # Not `print`, which a signal may interrupt in the middle.
      os.write(2, b"\nstopping after this step, and saving; Ctrl-C again stops at once\n")
    if self._by_jax:
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      self.number = number
