# SPDX-License-Identifier: Apache-2.0
"""Finds silent data corruption: devices whose copy of the state, or whose step, differs.

A faulty device computes or stores wrong numbers without an error (Hochschild et al., 2021, "Cores
that don't count"). Checksums of each shard of the state, computed on its device, are compared.
"""

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from paxlike.checkpoints.array_names import flatten
from paxlike.errors import RunError
from paxlike.training.train_state import TrainState


class Checksums(NamedTuple):
  """Checksums of the arrays of a state.

  Attributes:
    arrays: Their names.
    devices: All devices of the mesh.
    values: uint32 [devices, arrays]: of the shard that each device holds.
    shards: int [devices, arrays]: devices with equal numbers hold the same shard of an array.
  """

  arrays: list[str]
  devices: list[Any]
  values: np.ndarray
  shards: np.ndarray


def checksums(state: TrainState) -> Checksums:
  """Returns the checksums of a state. Arrays in host memory are left out."""
  arrays = {
    name: x for name, x in flatten(state).items() if x.sharding.memory_kind in (None, "device")
  }
  mesh = jax.sharding.get_mesh()
  devices = list(mesh.devices.flat)
  specs = tuple(getattr(x.sharding, "spec", PartitionSpec()) for x in arrays.values())
  values = _program(mesh, specs)(tuple(arrays.values()))
  if jax.process_count() > 1:
    values = multihost_utils.process_allgather(values, tiled=True)
  shards = [_shards(x.sharding, x.shape, tuple(devices)) for x in arrays.values()]
  return Checksums(list(arrays), devices, np.asarray(values), np.stack(shards, axis=1))


def check_replicas(state: TrainState, step: int):
  """Compares the copies of each shard after `step`, counted from 0.

  Raises:
    RunError: They differ; it names the devices that differ from most others, and the arrays.
  """
  found = checksums(state)
  wrong: dict[Any, list[str]] = {}
  for index, name in enumerate(found.arrays):
    values, shards = found.values[:, index], found.shards[:, index]
    for shard in np.unique(shards):
      holders = np.flatnonzero(shards == shard)
      counts = collections.Counter(values[holders].tolist())
      most = max(counts.values())
      usual = [value for value, count in counts.items() if count == most]
      for device in holders:
        if len(counts) > 1 and (len(usual) > 1 or values[device] != usual[0]):
          wrong.setdefault(found.devices[device], []).append(name)
  if wrong:
    raise RunError(
      f"after step {step}, copies of the state differ (CHECK_REPLICAS_EVERY): {_named(wrong)}. A"
      " device computes or stores wrong numbers. Exclude it, and run the same command: it goes on"
      " from the newest checkpoint, whose copies were equal."
    )


def check_repeated(first: Checksums, second: Checksums, step: int):
  """Compares the results of the same step, computed twice.

  Raises:
    RunError: They differ.
  """
  differs = first.values != second.values
  wrong = {
    device: [name for name, differ in zip(first.arrays, row, strict=True) if differ]
    for device, row in zip(first.devices, differs, strict=True)
    if row.any()
  }
  if wrong:
    raise RunError(
      f"step {step} was computed twice, with different results (REPEAT_STEP_EVERY):"
      f" {_named(wrong)}. A device computes wrong numbers. If that is so on every machine, kernels"
      " are not deterministic: XLA_FLAGS=--xla_gpu_deterministic_ops=true makes them so."
    )


def _named(wrong: dict[Any, list[str]]) -> str:
  """Returns the devices with the arrays that are wrong on them."""

  def one(device: Any, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"device {device.id} of process {device.process_index} in {names[0]}{more}"

  listed = [one(device, names) for device, names in wrong.items()]
  return "; ".join(listed[:8]) + (f"; and {len(listed) - 8} more" if listed[8:] else "")


@functools.lru_cache(maxsize=4)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]):
  """Returns arrays -> uint32 [devices, arrays], the checksums of the shards on each device."""

  def local(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in arrays])[None]

  out = PartitionSpec(mesh.axis_names)
  return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False))


def _checksum(x: jax.Array) -> jax.Array:
  """Returns a uint32 that any single flipped bit changes: bits are weighted by odd numbers."""
  if x.dtype == jnp.bool_ or jax.dtypes.itemsize_bits(x.dtype) < 8:  # These cannot be bitcast.
    x = x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  words = bits.astype(jnp.uint32).reshape(-1)
  return (words * (2 * jax.lax.iota(jnp.uint32, words.size) + 1)).sum(dtype=jnp.uint32)


@functools.lru_cache(maxsize=4096)
def _shards(sharding: Any, shape: tuple[int, ...], devices: tuple[Any, ...]) -> np.ndarray:
  """Returns for each device which shard of an array it holds, as a number."""
  held = sharding.devices_indices_map(shape)
  numbers: dict[str, int] = {}
  return np.array([numbers.setdefault(str(held[device]), len(numbers)) for device in devices])
