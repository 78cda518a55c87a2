# SPDX-License-Identifier: Apache-2.0
"""Ending a run in good order when the system or the user asks for it."""

import signal
from types import FrameType
from typing import Self


class StopSignal:
  """Context in which SIGTERM and Ctrl-C are noted instead of obeyed; a second Ctrl-C is obeyed.

  Attributes:
    number: The signal received, None so far.
  """

  def __init__(self):
    self.number: int | None = None
    self._previous: dict[int, object] = {}

  @property
  def requested(self) -> bool:
    """Whether the run shall save and end."""
    return self.number is not None

  def __enter__(self) -> Self:
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *unused: object):
    for number, handler in self._previous.items():
      signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

  def _note(self, number: int, frame: FrameType | None):
    del frame
    if number == signal.SIGINT and self.number == signal.SIGINT:
      raise KeyboardInterrupt
    self.number = number
