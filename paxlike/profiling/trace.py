# SPDX-License-Identifier: Apache-2.0
"""Reads when each HLO instruction ran, from a trace of JAX's profiler.

A trace is an XSpace protocol buffer: planes (a host, a device) of lines (a thread, a stream) of
events. XLA notes the instruction (`hlo_op`) and the program (`hlo_module`) with the events of
kernels (GPUs; `cupti_collector.cc`) and of thunks (CPUs; `thunk.cc`).
"""

import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from paxlike.errors import UserError

_GPU = re.compile(r"/device:GPU:(\d+)")
_HOST = "/host:CPU"
_END = "end: "  # Prefix of the event at the end of a thunk.


class Interval(NamedTuple):
  """One run of one instruction.

  Attributes:
    name: The instruction.
    device: The device, as this process counts them.
    start, end: Seconds.
  """

  name: str
  device: int
  start: float
  end: float


def read(folder: str | os.PathLike[str], module: str) -> list[Interval]:
  """Returns the runs of all instructions of a program.

  Args:
    folder: The folder given to `profiler.trace`.
    module: The name of the program, such as "jit_train_step".

  Raises:
    UserError: The trace has no such program.
  """
  files = sorted(pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb"))
  data: Any = jax.profiler.ProfileData.from_file(os.fspath(files[-1])) if files else None
  planes = [] if data is None else list(data.planes)
  found = [one for plane in planes for one in _of_gpu(plane, module)]
  found = found or [one for plane in planes for one in _of_cpu(plane, module)]
  if not found:
    raise UserError(
      f"the trace in {os.fspath(folder)} has no kernels of {module}. On GPUs, the driver may allow"
      " profiling to root only (NVreg_RestrictProfilingToAdminUsers)."
    )
  return found


def _of_gpu(plane: Any, module: str) -> Iterator[Interval]:
  match = _GPU.match(plane.name)
  if match is None:
    return
  for line in plane.lines:
    if not line.name.startswith("Stream"):  # Other lines summarize those of the streams.
      continue
    for event in line.events:
      stats = dict(event.stats)
      if stats.get("hlo_module") == module and "hlo_op" in stats:
        end = event.start_ns + event.duration_ns
        yield Interval(stats["hlo_op"], int(match[1]), event.start_ns * 1e-9, end * 1e-9)


def _of_cpu(plane: Any, module: str) -> Iterator[Interval]:
  """Yields the thunks of a host plane.

  An asynchronous thunk returns before it ends; its end is an event of its own, in any thread, which
  consumes (`_c`) what the event of the thunk produces (`_p`).
  """
  if plane.name != _HOST:
    return
  thunks: list[tuple[Any, Any, str, int]] = []
  ends: dict[Any, float] = {}
  for line in plane.lines:
    for event in line.events:
      if event.name.startswith(_END):
        ends[dict(event.stats).get("_c")] = event.start_ns
        continue
      stats = dict(event.stats)
      if stats.get("hlo_module") == module and "hlo_op" in stats:
        thunks.append((event, stats.get("_p"), stats["hlo_op"], stats.get("device_ordinal", 0)))
  for event, produced, name, device in thunks:
    end = event.start_ns + event.duration_ns
    if produced is not None:
      end = max(end, ends.get(produced, end))
    yield Interval(name, int(device), event.start_ns * 1e-9, end * 1e-9)
