# SPDX-License-Identifier: Apache-2.0
"""Collectives between hosts: whether all have succeeded, and what process 0 has found."""

from collections.abc import Callable, Sequence

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
