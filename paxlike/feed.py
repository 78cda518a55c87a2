# SPDX-License-Identifier: Apache-2.0
"""Brings batches from a host onto its devices, and steps with them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from paxlike import mesh
from paxlike.errors import UserError


class Feed:
  """Which rows of each global batch this host loads, and where they go."""

  def __init__(
    self,
    devices: jax.sharding.Mesh,
    *,
    batch_size: int,
    seq_len: int,
    max_segments: int | None = None,
  ):
    """For batches of `batch_size` x `seq_len` tokens on the mesh `devices`.

    `max_segments` is the most that a row may have.
    """
    self._devices = devices
    self._max_segments = max_segments
    self._shape = (batch_size, seq_len)

  @functools.cached_property
  def rows(self) -> np.ndarray:
    """The rows that this host's devices hold, sorted: it follows from the batch's sharding."""
    where = mesh.sharding(self._devices, ("batch", "time"), self._shape)
    indexes = where.addressable_devices_indices_map(self._shape).values()
    every = np.arange(self._shape[0])
    return np.unique(np.concatenate([every[index[0]] for index in indexes if index is not None]))

  @property
  def steps_in_flight(self) -> int:
    """How many steps may run while another is dispatched."""
    devices = self._devices.devices
    # CPU devices share one pool of threads: of two steps that communicate, each can hold the
    # threads that the other waits for.
    return 0 if devices.size > 1 and devices.flat[0].platform == "cpu" else 2

  def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns global arrays made of this host's rows and, unseen, those of the others.

    Raises:
      UserError: A row has too many segments.
    """
    if self._max_segments is not None and "segments" in arrays:
      segments = arrays["segments"]
      most = 1 + (segments[:, 1:] != segments[:, :-1]).sum(1).max(initial=0)
      if most > self._max_segments:
        raise UserError(
          f"a row has {most} documents, but MAX_SEGMENTS_PER_ROW={self._max_segments}. Raise it, or"
          " set ATTENTION_KERNEL=xla_chunked."
        )
    return {name: self._put(array) for name, array in arrays.items()}

  def abstract(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `put` makes of arrays of so many rows as a host loads: shapes and shardings."""

    def one(array: np.ndarray) -> jax.ShapeDtypeStruct:
      shape = (self._shape[0], *array.shape[1:])
      where = mesh.sharding(self._devices, ("batch", "time"), shape)
      return jax.ShapeDtypeStruct(shape, array.dtype, sharding=where)

    return {name: one(array) for name, array in arrays.items()}

  def _put(self, array: np.ndarray) -> jax.Array:
    shape = (self._shape[0], *array.shape[1:])
    where = mesh.sharding(self._devices, ("batch", "time"), shape)
    if jax.process_count() == 1:
      return jax.device_put(array, where)

    def part(index: Any) -> np.ndarray:
      wanted = np.arange(shape[0])[index[0]]
      return array[np.searchsorted(self.rows, wanted)][(slice(None), *index[1:])]

    return jax.make_array_from_callback(shape, where, part)
