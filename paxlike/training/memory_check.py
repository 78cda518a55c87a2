# SPDX-License-Identifier: Apache-2.0
"""Refuses runs that cannot fit into device memory, before anything is written.

Only a lower bound is checked: the training state and one activation. `--mode=compile` finds the
memory of a whole step.
"""

import math
import os
from typing import Any

import jax

from paxlike.devices import chips
from paxlike.errors import UserError
from paxlike.telemetry import formatting


def check(devices: jax.sharding.Mesh, state: Any, batch: Any, *, parts: int):
  """Checks the memory of one device.

  Args:
    devices: The mesh.
    state: A `TrainState` of shapes and shardings.
    batch: A batch of shapes and shardings.
    parts: Number of gradient-accumulation microbatches.

  Raises:
    UserError: A device has too little memory.
  """
  memory = _memory(list(devices.devices.flat))
  if memory is None:
    return
  on_device = [leaf for leaf in jax.tree.leaves(state) if _is_on_device(leaf)]
  state_bytes = sum(map(_bytes_on_one, on_device))
  table = {**state.params, **state.frozen}.get("embedding.table")
  width = getattr(table, "shape", (0,))[-1]
  activation = 2 * math.prod(batch["inputs"].shape) * width // parts // devices.size
  if state_bytes + activation > memory:
    weights = {**state.params, **state.frozen}
    largest = max(weights, key=lambda name: math.prod(weights[name].shape))
    raise UserError(
      f"a device has {formatting.nbytes(memory)}, but the training state takes"
      f" {formatting.nbytes(state_bytes)} per device, and one activation of a batch"
      f" {formatting.nbytes(activation)}: make the model (MODEL_DIMS, NUM_LAYERS, VOCAB_SIZE"
      f" ...; its largest weight is {largest}, {' x '.join(map(str, weights[largest].shape))}) or"
      " the batch (PERCORE_BATCH_SIZE, MAX_SEQ_LEN) smaller, or shard it over more devices."
    )


def _is_on_device(leaf: Any) -> bool:
  return leaf.sharding.memory_kind in (None, "device")


def _bytes_on_one(leaf: Any) -> int:
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _memory(devices: list[Any]) -> int | None:
  """Returns the memory of a device in bytes, for CPUs its share of the host's; None: unknown."""
  if (chip := chips.find(devices[0].device_kind)) is not None:
    return chip.memory or None
  if devices[0].platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
    return None
  here = [device for device in devices if device.process_index == jax.process_index()]
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(len(here), 1)
