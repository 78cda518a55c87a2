# SPDX-License-Identifier: Apache-2.0
"""Whether devices have memory for what a run holds at the least, before anything is written.

Only what certainly does not fit is refused: the training state and one activation. What a step
takes in all, `--mode=compile` finds.
"""

import math
import os
from typing import Any

import jax

from paxlike import chips, tables, train_state
from paxlike.errors import UserError
from paxlike.layers.module import Definition
from paxlike.optimizers import Optimizer


def check(
  definition: Definition,
  optimizer: Optimizer,
  devices: jax.sharding.Mesh,
  *,
  tokens: int,
  with_reference: bool,
):
  """Checks the memory of one device.

  Args:
    definition: The model.
    optimizer: Of which the state is held.
    devices: That share the state and the tokens.
    tokens: Of a microbatch, over all devices.
    with_reference: Whether a second set of weights is held.

  Raises:
    UserError: It is too small.
  """
  memory = _memory(list(devices.devices.flat))
  if memory is None:
    return
  state = train_state.abstract(definition, optimizer, devices, with_reference=with_reference)
  held = state if not optimizer.on_host else [state.params, state.frozen, state.extra]
  state_bytes = sum(map(_bytes_on_one, jax.tree.leaves(held)))
  width = definition.weights["embedding.table"].shape[-1]
  activation = 2 * tokens * width // devices.size
  if state_bytes + activation > memory:
    raise UserError(
      f"a device has {tables.nbytes(memory)}, but the training state takes"
      f" {tables.nbytes(state_bytes)} of each, and every activation of a batch"
      f" {tables.nbytes(activation)}: make the model (MODEL_DIMS, NUM_LAYERS, VOCAB_SIZE ...) or"
      " the batch (PERCORE_BATCH_SIZE, MAX_SEQ_LEN) smaller, or shard it over more devices."
    )


def _bytes_on_one(leaf: Any) -> int:
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _memory(devices: list[Any]) -> int | None:
  """Returns the bytes of a device; of CPUs, its share of this machine's; None: not known."""
  if (chip := chips.find(devices[0].device_kind)) is not None:
    return chip.memory or None
  if devices[0].platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
    return None
  here = [device for device in devices if device.process_index == jax.process_index()]
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(len(here), 1)
