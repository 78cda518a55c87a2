# SPDX-License-Identifier: Apache-2.0
"""Profiles of steps, and steps that XLA schedules by such profiles."""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

import jax
from etils import epath

from paxlike import file_io
from paxlike.devices import pgle
from paxlike.errors import UserError
from paxlike.processes import host_collectives, phases
from paxlike.profiling import measurement, step_profile
from paxlike.profiling.step_profile import StepProfile
from paxlike.training import profiler
from paxlike.training.trainer import Trainer

# Durations are measured without overlap, which would lengthen them.
_UNOVERLAPPED = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}


def profile(
  trainer: Trainer, *, folder: str | None = None, to: str | None = None, flag: str = "--save"
) -> StepProfile:
  """Returns where the time of a run's step goes, by training a few steps.

  Args:
    trainer: The run; `trainer.check` has passed.
    folder: Keeps the trace, for xprof, in profile/ of this folder; None: it is removed.
    to: The file for the durations of instructions, taken without overlap; None: none is written.
    flag: The flag that names this file.

  Raises:
    UserError: The devices cannot be profiled, or a file cannot be written.
  """
  step_profile.check(trainer.devices)
  if trainer.profile is not None and trainer.profile.profiler == "nsys":
    raise UserError("PROFILER=nsys: --mode=profile reads a trace of xprof: leave it out.")
  if to is not None:
    _check(trainer, to, f"{flag}={to}", writes=True)
    trainer = _with_options(trainer, _UNOVERLAPPED)
  kept = None if folder is None else profiler.trace_folder(file_io.absolute(folder))
  is_remote = kept is not None and file_io.is_remote(kept)
  with contextlib.ExitStack() as stack:
    if kept is None or is_remote:
      place = stack.enter_context(tempfile.TemporaryDirectory(prefix="paxlike-profile-"))
    else:
      place = kept
    found = step_profile.of(measurement.measure(trainer, place), trainer.devices)
    if kept is not None and is_remote:
      profiler.copy(pathlib.Path(place), kept)
  if to is not None and jax.process_index() == 0:
    try:
      file_io.write(file_io.absolute(to), pgle.text(found.microseconds))
    except file_io.failures() as error:
      raise UserError(f"{flag}={to}: {file_io.reason(error)}.") from None
  return found


def scheduled(trainer: Trainer, path: str, *, measures: bool = False) -> Trainer:
  """Returns the trainer with a step that XLA schedules by the profile in a file.

  All processes use what process 0 reads. If there is no file and `measures`, it is made first.

  Raises:
    UserError: The devices are no GPUs, or the file is missing or not a profile.
  """
  flag = f"--pgle_profile={path}"
  _check(trainer, path, flag, writes=measures)
  if measures and not host_collectives.broadcast(lambda: [int(epath.Path(path).exists())])[0]:
    if jax.process_index() == 0:
      print(f"paxlike: {flag}: no such file; profiling the step first", file=sys.stderr)
    profile(dataclasses.replace(trainer, profile=None), to=path, flag="--pgle_profile")
    phases.OWN.count_as_start()  # Its steps are not the run's.
  content = host_collectives.broadcast(lambda: list(pgle.text(pgle.read(path).costs).encode()))
  given = pgle.parse(bytes(content).decode(), source=flag)
  execution = dataclasses.replace(trainer.execution, pgle_profile=given)
  return dataclasses.replace(trainer, execution=execution)


def _with_options(trainer: Trainer, options: dict[str, Any]) -> Trainer:
  given = {**trainer.execution.compiler_options, **options}
  execution = dataclasses.replace(trainer.execution, compiler_options=given)
  return dataclasses.replace(trainer, execution=execution)


def _check(trainer: Trainer, path: str, flag: str, *, writes: bool):
  """Checks devices and file name, and if it may be written, creates its folder."""
  device = trainer.devices.devices.flat[0]
  if device.platform not in ("gpu", "cuda"):
    raise UserError(
      f"{flag} is for GPUs: XLA schedules no programs for {device.device_kind} by such a profile."
    )
  if not path.endswith(pgle.SUFFIX):
    raise UserError(f"{flag}: the name must end in {pgle.SUFFIX}.")
  if not writes:
    return
  file = file_io.absolute(path)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file_io.check_file(file)
  except file_io.failures() as error:
    raise UserError(f"{flag}: {file_io.reason(error)}.") from None
