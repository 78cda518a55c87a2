# SPDX-License-Identifier: Apache-2.0
"""Rematerialization policies: which activations are saved for the backward pass."""

import enum
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from paxlike.config.configurable import configurable

_QKV = ("query", "key", "value")
_TO_HOST = ("device", "pinned_host")


Policy = Literal[
  "SAVE_EVERYTHING",
  "SAVE_NOTHING",
  "SAVE_DOT_ONLY",
  "SAVE_DOT_WITH_NO_BATCH_DIM",
  "SAVE_QKV_PROJ",
  "SAVE_QKV_OUT_PROJ",
  "OFFLOAD_QKV_PROJ",
  "OFFLOAD_DOT_WITH_NO_BATCH_DIM",
]


@configurable
class Remat(enum.Enum):
  """Remat policies (Chen et al., 2016) by their Pax names.

  ..._PROJ policies save outputs of linear maps, selected by role; OFFLOAD_... saves to host memory.
  """

  SAVE_EVERYTHING = "everything_saveable"
  SAVE_NOTHING = "nothing_saveable"
  SAVE_DOT_ONLY = "dots_saveable"
  SAVE_DOT_WITH_NO_BATCH_DIM = "dots_with_no_batch_dims_saveable"
  SAVE_QKV_PROJ = "q, k and v"
  SAVE_QKV_OUT_PROJ = "q, k, v and the output of attention"
  OFFLOAD_QKV_PROJ = "q, k and v, on the host"
  OFFLOAD_DOT_WITH_NO_BATCH_DIM = "dots with no batch dims, on the host"

  @property
  def policy(self) -> Any:
    """The `policy` argument of `jax.checkpoint`."""
    policies = jax.checkpoint_policies
    match self:
      case Remat.SAVE_QKV_PROJ:
        return policies.save_only_these_names(*_QKV)
      case Remat.SAVE_QKV_OUT_PROJ:
        return policies.save_only_these_names(*_QKV, "output")
      case Remat.OFFLOAD_QKV_PROJ:
        source, target = _TO_HOST
        return policies.save_and_offload_only_these_names(
          names_which_can_be_saved=[],
          names_which_can_be_offloaded=list(_QKV),
          offload_src=source,
          offload_dst=target,
        )
      case Remat.OFFLOAD_DOT_WITH_NO_BATCH_DIM:
        return policies.offload_dot_with_no_batch_dims(*_TO_HOST)
      case _:
        return getattr(policies, self.value)

  @property
  def on_host(self) -> bool:
    """Whether it saves to host memory."""
    return self in (Remat.OFFLOAD_QKV_PROJ, Remat.OFFLOAD_DOT_WITH_NO_BATCH_DIM)

  def saves(self, role: str) -> bool:
    """Returns whether the output of a linear map with this role is saved, and not recomputed."""
    match self:
      case Remat.SAVE_NOTHING:
        return False
      case Remat.SAVE_QKV_PROJ | Remat.OFFLOAD_QKV_PROJ:
        return role in _QKV
      case Remat.SAVE_QKV_OUT_PROJ:
        return role in (*_QKV, "output")
      case _:
        return True


def named(x: jax.Array, role: str) -> jax.Array:
  """Returns x, named `role` for the remat policies."""
  return checkpoint_name(x, role)
