# SPDX-License-Identifier: Apache-2.0
"""Collectives between hosts: whether all have succeeded, and what each or process 0 has found."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlike.errors import UserError


def all_processes(here: bool) -> bool:
  """Returns whether `here` is true in all processes; each must call this."""
  if jax.process_count() == 1:
    return here
  return bool(np.all(multihost_utils.process_allgather(np.array(here))))


def broadcast(find: Callable[[], Sequence[int]]) -> list[int]:
  """Broadcasts the numbers (int32) that `find` returns in process 0; each process must call this.

  Processes might find different steps, since a run may save and delete checkpoints meanwhile.

  Raises:
    UserError: `find` raised it in process 0. Then all processes raise.
  """
  if jax.process_count() == 1:
    return list(find())
  from paxlike.processes import multiprocess

  found, refusal = [], None
  try:
    found = find() if jax.process_index() == 0 else []
  except UserError as error:
    refusal = error
  multiprocess.raise_everywhere(refusal)
  (size,) = multihost_utils.broadcast_one_to_all(np.array([len(found)], np.int32))
  if not size:
    return []
  padded = np.array([*found] or [0] * size, np.int32)
  return [int(step) for step in multihost_utils.broadcast_one_to_all(padded)]


def gathered(value: Any) -> list[Any]:
  """Returns the JSON values of all processes, in order; each process must call this.

  Waits for the slowest process for as long as the watch lets it.
  """
  if jax.process_count() == 1:
    return [value]
  from paxlike.processes import multiprocess

  multiprocess.compare()  # Collectives of devices time out after 30 seconds.
  said = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(said), np.int32))
  room = 1 << int(sizes.max() - 1).bit_length()  # So that few programs are compiled.
  everyone = multihost_utils.process_allgather(np.pad(said, (0, room - len(said))))
  return [json.loads(bytes(one[:size])) for one, size in zip(everyone, sizes, strict=True)]


def fetched(arrays: Any) -> Any:
  """Returns a tree of global arrays as whole host arrays; each process must call this."""

  def whole(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))

  return jax.tree.map(whole, arrays)
