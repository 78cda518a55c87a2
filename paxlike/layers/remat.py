# SPDX-License-Identifier: Apache-2.0
"""What the backward pass of a layer finds saved; the rest it computes again (Chen et al., 2016)."""

import enum
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from paxlike.configurable import configurable

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
  """Policies, by the names of Pax. Those of projections save what linear maps of a role give.

  What OFFLOAD_... saves goes to the memory of the host, and comes back.
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
    """What `jax.checkpoint` takes."""
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


def named(x: jax.Array, role: str) -> jax.Array:
  """Returns x under a name that policies know it by."""
  return checkpoint_name(x, role)
