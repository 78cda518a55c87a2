# SPDX-License-Identifier: Apache-2.0
"""The memory of the training state by kind, from shapes and shardings alone."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.sharding import AbstractMesh

from paxlike.training import train_state

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


class Bytes(NamedTuple):
  """The bytes of a part of the training state."""

  per_device: int
  total: int


def by_kind(trainer: "Trainer", sizes: Mapping[str, int]) -> dict[str, Bytes]:
  """Returns kind -> bytes of what is not empty, for a mesh with these sizes of all its axes."""
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  devices = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)
  state = train_state.abstract(
    trainer.definition, trainer.optimizer, devices, reference=trainer.reference
  )
  parts = {
    "trained parameters": state.params,
    "frozen parameters": state.frozen,
    "reference parameters": state.reference,
    "optimizer state": state.opt_state,
  }
  if trainer.read_only:
    parts = {"parameters": [state.params, state.frozen]}
  return {kind: _bytes(leaves) for kind, part in parts.items() if (leaves := jax.tree.leaves(part))}


def _bytes(leaves: list[jax.ShapeDtypeStruct]) -> Bytes:
  one = whole = 0
  for leaf in leaves:
    assert leaf.sharding is not None
    one += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    whole += math.prod(leaf.shape) * leaf.dtype.itemsize
  return Bytes(one, whole)
