# SPDX-License-Identifier: Apache-2.0
"""A checkpoint saved in the folder of a run and restored, bit by bit."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from paxlike import run_folder, tables
from paxlike.checkpoint import Checkpoints, flatten
from paxlike.checks import step
from paxlike.checks.check import ABSENT, FAIL, PASS, Check, guarded
from paxlike.layers.stack import layout_of
from paxlike.trainer import Trainer

ITEM = "checkpoint"


@contextlib.contextmanager
def folder(path: str | None) -> Iterator[epath.Path | None]:
  """Context of a new folder within that of a run, which is removed at the end, whatever happens.

  A run's folder that was made for it is removed too.

  Raises:
    UserError: It cannot be made or written.
  """
  if path is None:
    yield None
    return
  parent = run_folder.absolute(path)
  missing = [place for place in (parent, *parent.parents) if not place.exists()]
  run_folder.create(path)
  number = np.int64(time.time_ns())
  if jax.process_count() > 1:
    number = multihost_utils.broadcast_one_to_all(number)
  own = parent / f"check_{number}"
  try:
    yield own
  finally:
    if jax.process_index() == 0:
      with contextlib.suppress(FileNotFoundError):
        own.rmtree()
      for place in missing:
        with contextlib.suppress(OSError):
          place.rmdir()


def saved(trainer: Trainer, own: epath.Path | None) -> Iterator[Check]:
  """Yields the check of the training state of the experiment, after its first initialization."""
  label = "saved and restored"
  if own is None:
    detail = "give --job_log_dir=DIR to try its disk"
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
      checkpoints.save(0, arrays, layout=layout, train_input={})
      checkpoints.wait()
      saving = time.perf_counter() - began
      target = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
      }
      began = time.perf_counter()
      restored = jax.block_until_ready(checkpoints.restore(0, target, layout=layout).state)
      reading = time.perf_counter() - began
  wrong = [name for name, x in arrays.items() if not _same_bits(x, restored[name])]
  nbytes = sum(x.nbytes for x in arrays.values())
  detail = f"{len(arrays)} arrays, {tables.nbytes(nbytes)}"
  if wrong:
    detail += f"; {len(wrong)} differ, as {wrong[0]}"
  return Check(
    item=ITEM,
    name=label,
    verdict=FAIL if wrong else PASS,
    figures={"GB/s saved": nbytes / saving / 1e9, "GB/s restored": nbytes / reading / 1e9},
    detail=detail,
  )


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
  shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
  return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in shards)
