# SPDX-License-Identifier: Apache-2.0
"""Finds the nodes of a graph by type and role."""

from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
from fiddle import daglish

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
  # `fiddle.selectors` finds the same, but makes the path to each value: three times the work.
  for node in _nodes(graph, set()):
    if _makes(node, kind) and (not roles or getattr(node, "role", None) in roles):
      yield node


def _nodes(value: Any, seen: set[int]) -> Iterator[fdl.Buildable]:
  """Yields every node of a graph once, after those that it is made of."""
  traverser = daglish.find_node_traverser(type(value))
  if traverser is None or id(value) in seen:
    return
  seen.add(id(value))
  is_node = isinstance(value, fdl.Buildable)
  # The traverser of nodes returns their metadata too, which would take most of the time.
  inner = fdl.ordered_arguments(value).values() if is_node else traverser.flatten(value)[0]
  for one in inner:
    yield from _nodes(one, seen)
  if is_node:
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
  for node, _ in daglish.iterate(graph):
    if isinstance(node, fdl.Buildable) and argument in node.__arguments__:
      yield node
