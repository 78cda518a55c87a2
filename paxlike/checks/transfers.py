# SPDX-License-Identifier: Apache-2.0
"""Copies between hosts and devices: offloaded arrays and training batches."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from paxlike.checks.check import ABSENT, FAIL, PASS, Check, guarded, is_cpu
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer

OFFLOAD, INPUT = "host offload", "input"
_REPEATS = 5


def offload(devices: jax.sharding.Mesh) -> Iterator[Check]:
  """Yields the check of a copy to pinned host memory and back, in compiled programs."""
  label = "device to pinned host and back"
  if is_cpu(devices):
    detail = "a CPU's memory is the host's"
    yield Check(item=OFFLOAD, name=label, verdict=ABSENT, detail=detail)
    return
  yield guarded(OFFLOAD, label, lambda: _offloaded(label, devices.local_devices[0]))


def _offloaded(label: str, device: Any) -> Check:
  kinds = [memory.kind for memory in device.addressable_memories()]
  if "pinned_host" not in kinds:
    detail = f"the device has {', '.join(kinds)}, no pinned_host"
    return Check(item=OFFLOAD, name=label, verdict=ABSENT, detail=detail)
  here = SingleDeviceSharding(device, memory_kind="device")
  there = SingleDeviceSharding(device, memory_kind="pinned_host")
  to_host = jax.jit(lambda x: jax.device_put(x, there), out_shardings=there)
  to_device = jax.jit(lambda x: jax.device_put(x, here), out_shardings=here)
  numbers = np.random.default_rng(0).normal(size=2**25).astype(np.float32)
  x = jax.device_put(numbers, here)
  rates = {}
  for name, copy in (("GB/s to host", to_host), ("GB/s to device", to_device)):
    y = jax.block_until_ready(copy(x))
    began = time.perf_counter()
    for _ in range(_REPEATS):
      jax.block_until_ready(copy(x))
    rates[name] = _REPEATS * numbers.nbytes / (time.perf_counter() - began) / 1e9
    x = y
  equal = bool(np.array_equal(np.asarray(x), numbers))
  return Check(
    item=OFFLOAD,
    name=label,
    verdict=PASS if equal else FAIL,
    figures=rates,
    detail=formatting.nbytes(numbers.nbytes) + ("" if equal else "; the copy differs"),
  )


def input_rate(trainer: Trainer) -> Iterator[Check]:
  """Yields the check of the transfer of the experiment's batches to the devices."""
  label = f"{trainer.batch_size} sequences of {trainer.data.seq_len}"
  yield guarded(INPUT, label, lambda: _fed(label, trainer))


def _fed(label: str, trainer: Trainer) -> Check:
  placer, random = trainer.placer, np.random.default_rng(0)
  arrays = {
    name: random.integers(0, 2, (len(placer.rows), *x.shape[1:])).astype(x.dtype)
    for name, x in trainer.data.no_rows().items()
  }
  if "segments" in arrays:  # Random ids would exceed the limit on segments per sequence.
    arrays["segments"] = np.ones_like(arrays["segments"])
  put = jax.block_until_ready(placer.put(arrays))
  equal = all(_holds(x, arrays[name], placer.rows) for name, x in put.items())
  began = time.perf_counter()
  for _ in range(_REPEATS):
    jax.block_until_ready(placer.put(arrays))
  seconds = (time.perf_counter() - began) / _REPEATS
  nbytes = sum(x.nbytes for x in arrays.values())
  return Check(
    item=INPUT,
    name=label,
    verdict=PASS if equal else FAIL,
    figures={"GB/s a process": nbytes / seconds / 1e9},
    detail=f"{formatting.nbytes(nbytes)} in {seconds * 1e3:.3g} ms"
    + ("" if equal else "; devices received other numbers"),
  )


def _holds(x: jax.Array, loaded: np.ndarray, indices: np.ndarray) -> bool:
  """Returns whether this process's shards of a batch equal the sequences that it loaded.

  Args:
    x: The global batch.
    loaded: The sequences that this process loaded.
    indices: Their indexes in the global batch, sorted.
  """

  def expected(index: tuple[slice, ...]) -> np.ndarray:
    sequences = np.searchsorted(indices, np.arange(x.shape[0])[index[0]])
    return loaded[sequences][(..., *index[1:])]

  return all(np.array_equal(shard.data, expected(shard.index)) for shard in x.addressable_shards)
