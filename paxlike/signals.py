# SPDX-License-Identifier: Apache-2.0
"""Ending a run in good order when the system or the user asks for it."""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils


class StopSignal:
  """Context in which SIGTERM and Ctrl-C are noted instead of obeyed; a second Ctrl-C is obeyed.

  Several processes stop after the same step, whichever of them gets the signal: JAX notes SIGTERM,
  and lets them agree.

  Attributes:
    number: The signal received, None so far.
  """

  def __init__(self):
    self.number: int | None = None
    self._previous: dict[int, object] = {}
    self._is_interrupted = False
    self._others = jax.process_count() > 1

  def requested(self, step: int) -> bool:
    """Returns whether the run shall save and end after this step."""
    if self._others and multihost_utils.reached_preemption_sync_point(step):
      self.number = signal.SIGTERM
    return self.number is not None

  def __enter__(self) -> Self:
    for number in (signal.SIGINT,) if self._others else (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object):
    for number, handler in self._previous.items():
      signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

  def _note(self, number: int, frame: FrameType | None):
    del frame
    if number == signal.SIGINT and self._is_interrupted:
      raise KeyboardInterrupt
    self._is_interrupted = number == signal.SIGINT
    if self._others:
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      self.number = number
