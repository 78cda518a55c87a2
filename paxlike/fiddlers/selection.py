# SPDX-License-Identifier: Apache-2.0
"""Finds the nodes of a graph by type and role."""

from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
from fiddle import daglish, selectors

from paxlike import layers

ATTENTION = (
  *("query", "key", "value", "output", "query_down", "latent", "key_value", "output_gate"),
  *("index_query", "index_key"),
)
FLOAT32 = ("router", "index_weights", "value_head")  # Small maps, whose outputs decide.
MLP = ("up", "gate", "down")
BLOCK = ATTENTION + MLP


def select(graph: fdl.Buildable, kind: Callable[..., Any], *roles: str) -> Iterator[Any]:
  """Yields every node of `graph` that builds a `kind`, with one of `roles` if any are given.

  If `kind` is a function, yields the nodes that call it.
  """
  for node in selectors.select(graph, kind, check_nonempty=False):
    if not roles or getattr(node, "role", None) in roles:
      yield node


def matrices(graph: fdl.Buildable) -> Iterator[Any]:
  """Yields the linear maps and experts of the blocks of `graph`."""
  for kind in (layers.Linear, layers.ExpertLinear):
    yield from select(graph, kind, *BLOCK)


def having(graph: fdl.Buildable, argument: str) -> Iterator[Any]:
  """Yields every node of `graph` that sets `argument`."""
  for node, _ in daglish.iterate(graph):
    if isinstance(node, fdl.Buildable) and argument in node.__arguments__:
      yield node
