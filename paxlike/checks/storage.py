# SPDX-License-Identifier: Apache-2.0
"""A checkpoint saved to a run's folder, restored, and compared bit by bit."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from paxlike import file_io, run_folder
from paxlike.checkpoints.array_names import flatten
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checks import step
from paxlike.checks.check import ABSENT, FAIL, PASS, Check, guarded
from paxlike.errors import UserError
from paxlike.layers.stack import layout_of
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer

ITEM = "checkpoint"
# Below this size, opening and renaming files dominates the time to save.
_SMALL = 2**26


@contextlib.contextmanager
def folder(path: str | None) -> Iterator[epath.Path | None]:
  """Context of a temporary folder within a run's folder, always removed at the end.

  The run's folder is removed too if it did not exist before. SIGTERM interrupts like Ctrl-C.

  Raises:
    UserError: It cannot be created or written, or is not shared by all processes.
  """
  if path is None:
    yield None
    return
  parent, made = file_io.absolute(path), []
  own = parent / f"check_{_drawn_number()}"
  removes = jax.process_index() == 0
  if file_io.is_remote(path):
    run_folder.create(path)
  elif removes:
    made = [place for place in (parent, *parent.parents) if not place.exists()]
    run_folder.create(path)
  try:
    with _handled(signal.default_int_handler, signal.SIGTERM):
      if jax.process_count() > 1:
        from paxlike.processes import (
          multiprocess,  # Imported only if there are several processes: `main` tests for that.
        )

        multiprocess.check_shared(parent)
      yield own
  finally:
    if removes:
      with _handled(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT):
        _remove(own, made)


def _drawn_number() -> int:
  """Returns a number that is the same in all processes."""
  number = np.random.default_rng().integers(2**31)
  if jax.process_count() > 1:
    number = multihost_utils.broadcast_one_to_all(number)
  return int(number)


@contextlib.contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
  """Context in which signals have another handler."""
  before = {number: signal.signal(number, handler) for number in numbers}
  try:
    yield
  finally:
    for number, previous in before.items():
      signal.signal(number, previous)


def _remove(own: epath.Path, made: list[epath.Path]):
  """Removes a folder, and the empty parent folders that were created for it.

  After a failed save, Orbax's threads may still write, so it retries.
  """
  for seconds in (0, 0.2, 0.5, 1, 3):
    time.sleep(seconds)
    with contextlib.suppress(*file_io.failures()):
      if not own.exists():
        break
      own.rmtree()
  else:
    print(f"paxlike: {own} may still be there: remove it.", file=sys.stderr)
  for place in made:
    with contextlib.suppress(OSError):
      os.rmdir(place)


def saved(trainer: Trainer, own: epath.Path | None) -> Iterator[Check]:
  """Yields the check of a checkpoint of the experiment's initial training state."""
  label = "saved and restored"
  if own is None:
    detail = "give --job_log_dir=DIR, with checkpoint saving enabled, to check its disk"
    yield Check(item=ITEM, name=label, verdict=ABSENT, detail=detail)
    return
  yield guarded(ITEM, label, lambda: _saved(label, trainer, own))


def _saved(label: str, trainer: Trainer, own: epath.Path) -> Check:
  with jax.set_mesh(trainer.devices):
    state = step.first_state(trainer, trainer.devices)
    arrays: dict[str, Any] = flatten(state)
    layout = layout_of(trainer.model)
    with Checkpoints(own, keep=None) as checkpoints:
      began = time.perf_counter()
      try:
        checkpoints.save(0, arrays, layout=layout, train_input={})
        checkpoints.wait()
      except UserError as error:
        # The original message's advice is about resuming a run.
        reason = file_io.reason(error.__cause__ or error)
        raise UserError(f"{own.parent} cannot be written: {reason}.") from error
      saving = time.perf_counter() - began
      target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
      }
      began = time.perf_counter()
      restored = jax.block_until_ready(checkpoints.at(0).restore(target, layout=layout).state)
      reading = time.perf_counter() - began
  wrong = [name for name, x in arrays.items() if not _same_bits(x, restored[name])]
  nbytes = sum(x.nbytes for x in arrays.values())
  detail = f"{len(arrays)} arrays, {formatting.nbytes(nbytes)}"
  if wrong:
    detail += f"; {len(wrong)} differ, such as {wrong[0]}"
  rates = {"GB/s saved": nbytes / saving / 1e9, "GB/s restored": nbytes / reading / 1e9}
  if nbytes < _SMALL:
    detail += f", in {saving:.2g} s and {reading:.2g} s: too few bytes to measure the disk"
  verdict = FAIL if wrong else PASS
  return Check(
    item=ITEM, name=label, verdict=verdict, figures=rates if nbytes >= _SMALL else {}, detail=detail
  )


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
  shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
  return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in shards)
