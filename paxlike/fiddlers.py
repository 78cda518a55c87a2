# SPDX-License-Identifier: Apache-2.0
"""Edits of a whole graph, by type and by role, never by path.

Each takes the root graph and changes it in place; `--fiddler=precision(dtype="float32")` applies
one from the command line. Experiments apply theirs in a fixed order: precision, remat, stack.
"""

from collections.abc import Iterator
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from fiddle import selectors

from paxlike import layers
from paxlike.errors import UserError, did_you_mean


def select(graph: fdl.Buildable, kind: type, *roles: str) -> Iterator[Any]:
  """Yields every node of `graph` that makes a `kind`, with one of `roles` if any are given."""
  for node in selectors.select(graph, kind, check_nonempty=False):
    if not roles or getattr(node, "role", None) in roles:
      yield node


def precision(graph: fdl.Buildable, dtype: str = "bfloat16"):
  """Makes every layer but routers compute in `dtype`. Weights, statistics, loss stay float32."""
  computing = (
    layers.Linear,
    layers.ExpertLinear,
    layers.Embedding,
    layers.PositionEmbedding,
    layers.LayerNorm,
    layers.RmsNorm,
  )
  for kind in computing:
    for node in select(graph, kind):
      if getattr(node, "role", None) != "router":
        node.dtype = jnp.dtype(dtype)


def remat(graph: fdl.Buildable, policy: str = "SAVE_NOTHING"):
  """Sets what the backward pass of a block finds saved: a name of `layers.Remat`."""
  if policy not in layers.Remat.__members__:
    hint = did_you_mean(policy, layers.Remat.__members__)
    raise UserError(
      f"no remat policy {policy}.{hint or f' One of {list(layers.Remat.__members__)}.'}"
    )
  for node in select(graph, layers.Stack):
    node.remat = layers.Remat[policy]


def stack(graph: fdl.Buildable, scan: bool = True):
  """Scans over repeated blocks, or unrolls them."""
  for node in select(graph, layers.Stack):
    node.scan = scan


FIDDLERS = {"precision": precision, "remat": remat, "stack": stack}
