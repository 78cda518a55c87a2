# SPDX-License-Identifier: Apache-2.0
"""Placement of host batches on devices as sharded global arrays."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from paxlike.devices import mesh
from paxlike.errors import UserError


class BatchPlacer:
  """Places batches on a mesh; has the sequences of a global batch that this host loads.

  Attributes:
    batch_size: Sequences of a global batch.
    max_segments: The largest number of segments per sequence; None: any.
  """

  def __init__(
    self,
    devices: jax.sharding.Mesh,
    *,
    batch_size: int,
    seq_len: int,
    max_segments: int | None = None,
  ):
    """Places batches of `batch_size` x `seq_len` tokens on the mesh `devices`."""
    self._devices = devices
    self.batch_size = batch_size
    self.max_segments = max_segments
    self._shape = (batch_size, seq_len)

  @functools.cached_property
  def rows(self) -> np.ndarray:
    """The sorted indexes, in the global batch, of the sequences that this host loads."""
    where = mesh.sharding(self._devices, ("batch", "time"), self._shape)
    indexes = where.addressable_devices_indices_map(self._shape).values()
    every = np.arange(self._shape[0])
    return np.unique(np.concatenate([every[index[0]] for index in indexes if index is not None]))

  @property
  def steps_in_flight(self) -> int:
    """The number of steps that may be in flight when another is dispatched."""
    # One CPU device computes as it is called, unless JAX had started before (`jax_setup`). Several
    # share one thread pool: two concurrent steps with collectives can deadlock.
    return 0 if self._devices.devices.flat[0].platform == "cpu" else 2

  def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns global arrays, given this host's sequences; other hosts contribute theirs.

    Raises:
      UserError: A sequence has too many segments.
    """
    if self.max_segments is not None and "segments" in arrays:
      segments = arrays["segments"]
      most = 1 + (segments[:, 1:] != segments[:, :-1]).sum(1).max(initial=0)
      if most > self.max_segments:
        raise UserError(
          f"a sequence has {most} documents, but MAX_SEGMENTS_PER_ROW={self.max_segments}. Raise"
          " it, or set ATTENTION_KERNEL=xla_chunked."
        )
    return {name: self._put(array) for name, array in arrays.items()}

  def put_whole(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns global arrays, given all sequences, which are equal in all processes; see `put`."""
    is_all = len(self.rows) == self.batch_size
    return self.put(arrays if is_all else {name: x[self.rows] for name, x in arrays.items()})

  def abstract(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the arrays that `put` would return."""

    def one(array: np.ndarray) -> jax.ShapeDtypeStruct:
      shape = (self._shape[0], *array.shape[1:])
      return jax.ShapeDtypeStruct(shape, array.dtype, sharding=self._sharding(shape))

    return {name: one(array) for name, array in arrays.items()}

  def _sharding(self, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
    """Returns the sharding of an array [B, T, ...]."""
    dims = ("batch", "time", *[None] * (len(shape) - 2))
    return mesh.sharding(self._devices, dims, shape)

  def _put(self, array: np.ndarray) -> jax.Array:
    shape = (self._shape[0], *array.shape[1:])
    where = self._sharding(shape)
    if jax.process_count() == 1:
      return jax.device_put(array, where)

    def part(index: Any) -> np.ndarray:
      wanted = np.arange(shape[0])[index[0]]
      return array[np.searchsorted(self.rows, wanted)][(slice(None), *index[1:])]

    return jax.make_array_from_callback(shape, where, part)
