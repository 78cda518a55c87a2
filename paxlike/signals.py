# SPDX-License-Identifier: Apache-2.0
"""Ending a run in good order when the system or the user asks for it."""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from paxlike import watch


class StopSignal:
  """Context in which SIGTERM and Ctrl-C are noted instead of obeyed; a second Ctrl-C is obeyed.

  Several processes stop at the same place, whichever of them gets the signal: their watches agree
  on it. A process that does not get to the next such place is ended by its watch.

  Attributes:
    number: The signal received, None so far.
  """

  def __init__(self):
    self.number: int | None = None
    self._times = 0  # How often `requested` was called.
    self._previous: dict[int, object] = {}
    self._is_interrupted = False
    self._watch = watch.current()
    # Processes that somebody else than `paxlike.distributed` has joined have JAX's service agree.
    self._by_jax = jax.process_count() > 1 and (self._watch is None or self._watch.is_alone)

  def requested(self) -> bool:
    """Returns whether the run shall save and end here.

    All processes call this as often, after the same steps and batches of an evaluation.
    """
    self._times += 1
    if self._by_jax:
      if multihost_utils.reached_preemption_sync_point(self._times):
        self.number = signal.SIGTERM
      return self.number is not None
    if self.number is not None and self._watch is not None:
      self._watch.ask_to_stop()  # Also where the signal's number has not come to it.
    stops = self.number is not None if self._watch is None else self._watch.stops_here(self._times)
    if stops and self.number is None:
      self.number = signal.SIGTERM  # Another process got it.
    return stops

  def __enter__(self) -> Self:
    for number in (signal.SIGINT,) if self._by_jax else (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object):
    for number, handler in self._previous.items():
      # JAX's handler of SIGTERM, which Python does not know, is not put back.
      known = signal.SIG_DFL if handler is None else handler
      signal.signal(number, known)  # pyright: ignore[reportArgumentType]

  def _note(self, number: int, frame: FrameType | None):
    del frame
    if number == signal.SIGINT and self._is_interrupted:
      raise KeyboardInterrupt
    self._is_interrupted = number == signal.SIGINT
    if self._by_jax:
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      self.number = number
