# SPDX-License-Identifier: Apache-2.0
"""Divides the time of a device among the instructions that run on it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from paxlike.profiling.trace import Interval


class Times(NamedTuple):
  """The times of one instruction, summed over its runs.

  Attributes:
    count: The number of runs.
    busy: The sum of their durations in seconds.
    exposed: Its share of the device's time; see `divide`.
  """

  count: int
  busy: float
  exposed: float


class Timeline(NamedTuple):
  """Where the time went, summed over devices.

  Attributes:
    times: Instruction -> its times.
    idle: Seconds in which no instruction ran.
    total: Seconds from the first start to the last end: the sum of all exposed times and of idle.
  """

  times: dict[str, Times]
  idle: float
  total: float


def divide(intervals: Iterable[Interval], *, is_hidden: Callable[[str], bool]) -> Timeline:
  """Divides the time of each device.

  Instructions that run at the same time share it equally, but those that are `is_hidden`
  (collectives) get only the time in which no other runs. All devices are looked at from the first
  start to the last end on any of them.
  """
  of_device: dict[int, list[Interval]] = {}
  for one in intervals:
    of_device.setdefault(one.device, []).append(one)
  every = [one for found in of_device.values() for one in found]
  start, end = min(one.start for one in every), max(one.end for one in every)
  exposed: dict[str, float] = {}
  for found in of_device.values():
    _add_shares(found, is_hidden, exposed)
  times = {}
  for one in every:
    count, busy, _ = times.get(one.name, (0, 0.0, 0.0))
    times[one.name] = Times(count + 1, busy + one.end - one.start, exposed.get(one.name, 0.0))
  total = (end - start) * len(of_device)
  return Timeline(times, total - sum(exposed.values()), total)


def _add_shares(found: list[Interval], is_hidden: Callable[[str], bool], exposed: dict[str, float]):
  """Adds the shares of one device's time to `exposed`, moving from one start or end to the next."""
  edges = sorted(
    (time, is_start, one.name)
    for one in found
    for time, is_start in ((one.start, True), (one.end, False))
    if one.end > one.start
  )
  running: tuple[dict[str, int], dict[str, int]] = {}, {}  # Others, hidden: name -> runs.
  before = 0.0
  for now, is_start, name in edges:
    active = running[0] or running[1]
    if active:
      share = (now - before) / sum(active.values())
      for other, count in active.items():
        exposed[other] = exposed.get(other, 0.0) + count * share
    counts = running[is_hidden(name)]
    counts[name] = counts.get(name, 0) + (1 if is_start else -1)
    if not counts[name]:
      del counts[name]
    before = now
