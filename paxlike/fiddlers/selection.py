# SPDX-License-Identifier: Apache-2.0
"""Finds the nodes of a graph by type and role."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import fiddle as fdl

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
  for node in nodes(graph):
    if _makes(node, kind) and (not roles or getattr(node, "role", None) in roles):
      yield node


def nodes(graph: fdl.Buildable) -> Iterator[fdl.Buildable]:
  """Yields every node of `graph` once, after those that it is made of."""
  # Fiddle's own traversals make the path to each value too, which takes ten times as long.
  yield from _nodes(graph, set())


def _nodes(value: Any, seen: set[int]) -> Iterator[fdl.Buildable]:
  if isinstance(value, fdl.Buildable):
    if id(value) in seen:
      return
    seen.add(id(value))
    inner: Collection[Any] = value.__arguments__.values()
  elif isinstance(value, dict):
    inner = value.values()
  elif isinstance(value, list | tuple):
    inner = value
  else:
    return
  for one in tuple(inner):
    yield from _nodes(one, seen)
  if isinstance(value, fdl.Buildable):
    yield value


def _makes(node: fdl.Buildable, kind: Callable[..., Any]) -> bool:
  made = fdl.get_callable(node)
  return made == kind or (
    isinstance(made, type) and isinstance(kind, type) and issubclass(made, kind)
  )


def matrices(graph: fdl.Buildable) -> Iterator[Any]:
  """Yields the linear maps and experts of the blocks of `graph`."""
  for kind in (layers.Linear, layers.ExpertLinear):
    yield from select(graph, kind, *BLOCK)


def having(graph: fdl.Buildable, argument: str) -> Iterator[Any]:
  """Yields every node of `graph` that sets `argument`."""
  for node in nodes(graph):
    if argument in node.__arguments__:
      yield node
