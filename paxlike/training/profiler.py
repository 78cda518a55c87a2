# SPDX-License-Identifier: Apache-2.0
"""Profiles a window of the training steps: a trace for xprof, or a range for Nsight Systems."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import jax
from etils import epath

from paxlike import file_io
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.training import cuda_profiler

FOLDER = "profile"  #: In the run's folder; below it is what TensorBoard's profile plugin reads.


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Profiling:
  """Which steps to profile, and how.

  Attributes:
    steps: The first and the last step, as log lines count, from 0; None: none.
    profiler: xprof: JAX's profiler writes a trace. nsys: the steps are a range that
      `nsys profile --capture-range=cudaProfilerApi` records.
    every_process: Whether all processes of the job are profiled, instead of only process 0.
    port: Port at which xprof may ask process 0 for a trace at any time, and process i at port + i;
      None: none.
  """

  steps: tuple[ranges.NonNegative, ranges.NonNegative] | None = None
  profiler: Literal["xprof", "nsys"] = "xprof"
  every_process: bool = False
  port: ranges.Port | None = None

  def check(self, *, num_steps: int, platform: str):
    """Checks it for a run of `num_steps` on devices of `platform`.

    Raises:
      UserError: The window is empty or beyond the last step, or there is no GPU for nsys.
    """
    if self.steps is None:
      return
    first, last = self.steps
    shown = f"PROFILE_STEPS=[{first},{last}]"
    if last < first:
      raise UserError(f"{shown}: the last step is before the first.")
    if num_steps and first >= num_steps:
      raise UserError(
        f"{shown}: the run has {num_steps:,} steps, of which the last is {num_steps - 1:,}."
      )
    if self.profiler == "nsys":
      if platform not in ("gpu", "cuda"):
        raise UserError(
          f"PROFILER=nsys records NVIDIA GPUs, and this run is on {platform.upper()}:"
          " PROFILER=xprof profiles any device."
        )
      cuda_profiler.check()


class Profiler:
  """Starts and stops the profiler of a run around its window; without a window, does nothing."""

  def __init__(
    self,
    how: Profiling | None,
    folder: epath.Path,
    note: Callable[[str], None],
    *,
    num_steps: int,
  ):
    """`folder` and `num_steps` are the run's; `note` prints a line."""
    how = how or Profiling()
    if how.steps is not None:
      how = dataclasses.replace(how, steps=(how.steps[0], min(how.steps[1], num_steps - 1)))
    self._how = how
    self._is_here = how.every_process or jax.process_index() == 0
    self._folder = trace_folder(folder)
    self._note = note
    self._running = contextlib.ExitStack()
    self._is_on = self._has_begun = False

  def __enter__(self) -> Self:
    if self._is_here and self._how.port is not None:
      _serve(self._how.port + jax.process_index())
      self._note(f"xprof can take a trace at port {self._how.port}")
    return self

  def __exit__(self, *exception: object):
    self._stop()  # A run that ends within the window keeps what was profiled.
    if self._is_here and self._how.port is not None:
      jax.profiler.stop_server()

  def change(self, step: int) -> str | None:
    """Returns whether profiling has a "start" or "end" before `step`, in any process.

    No step may be in flight then.
    """
    if self._how.steps is None:
      return None
    first, last = self._how.steps
    is_within = first <= step <= last
    return None if self._is_on == is_within else "start" if is_within else "end"

  def update(self, step: int):
    """Starts or stops profiling, if that is due before `step`."""
    first, last = self._how.steps or (0, step)
    if step > last and not self._has_begun:
      self._note(f"PROFILE_STEPS=[{first},{last}] is before step {step}: nothing is profiled")
    self._has_begun = True
    if change := self.change(step):
      if change == "start":
        self._start(step)
      else:
        self._stop()

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Context of a step's dispatch: marks the step in the trace, also for other profilers."""
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      if self._is_on and self._is_here and self._how.profiler == "nsys":
        with cuda_profiler.named(f"train {step}"):
          yield
      else:
        yield

  def _start(self, step: int):
    assert self._how.steps is not None
    last = self._how.steps[1]
    if not self._is_here:
      pass
    elif self._how.profiler == "nsys":
      self._note(f"profiling steps {step} to {last} for nsys{cuda_profiler.hint()}")
      self._running.enter_context(cuda_profiler.range_of_capture())
    else:
      self._note(f"profiling steps {step} to {last}")
      self._running.enter_context(trace(self._folder))
    self._is_on = True

  def _stop(self):
    if not self._is_on:
      return
    self._is_on = False
    self._running.close()
    if self._is_here and self._how.profiler == "xprof":
      self._note(f"wrote the profile: xprof --logdir={self._folder} (or TensorBoard) shows it")


def _serve(port: int):
  """Starts JAX's profiler server.

  Raises:
    UserError: The port is in use.
  """
  # The server itself would only log that.
  with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(("", port))
    except (OSError, OverflowError) as error:
      raise UserError(f"PROFILER_PORT={port}: {file_io.reason(error)}.") from None
  jax.profiler.start_server(port)


def trace_folder(folder: epath.PathLike) -> epath.Path:
  """Returns where this process writes its traces, below the folder of a run.

  JAX names a trace after the host, on which there may be several processes.
  """
  process = f"process_{jax.process_index()}" if jax.process_count() > 1 else ""
  return epath.Path(folder) / FOLDER / process


@contextlib.contextmanager
def trace(folder: epath.PathLike) -> Iterator[None]:
  """Context that JAX's profiler traces, into `folder`/plugins/profile/TIME/HOST.xplane.pb.

  Python calls are not traced: they would slow the steps down.

  Raises:
    UserError: The trace cannot be written, or another one is in progress.
  """
  options: Any = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  target = epath.Path(folder)
  with contextlib.ExitStack() as stack:
    local = os.fspath(target)
    if file_io.is_remote(target):
      local = stack.enter_context(tempfile.TemporaryDirectory(prefix="paxlike-profile-"))
    try:
      pathlib.Path(local).mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(local, profiler_options=options)
    except (OSError, RuntimeError) as error:
      raise UserError(f"{target}: cannot profile: {file_io.reason(error)}.") from None
    try:
      yield
    finally:
      try:
        jax.profiler.stop_trace()
      except (OSError, RuntimeError) as error:
        raise _unwritten(target, error) from None
      if local != os.fspath(target):
        copy(pathlib.Path(local), target)


def copy(folder: pathlib.Path, target: epath.Path):
  """Copies the traces in a folder, as to an object store.

  Raises:
    UserError: They cannot be written.
  """
  try:
    for file in folder.rglob("*"):
      if file.is_file():
        copied = target / file.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())
  except file_io.failures() as error:
    raise _unwritten(target, error) from None


def _unwritten(target: epath.Path, error: Exception) -> UserError:
  return UserError(f"{target}: the profile cannot be written: {file_io.reason(error)}.")
