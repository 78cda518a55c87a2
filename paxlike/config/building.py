# SPDX-License-Identifier: Apache-2.0
"""Builds graphs. No other code calls `fdl.build`, so every graph is checked before it is built, and
errors come without the graph that Fiddle appends to their messages.
"""

from typing import Any

import fiddle as fdl

from paxlike.config import graph_types
from paxlike.errors import UserError


def build(graph: Any, *, source: str = "the graph") -> Any:
  """Returns the object that a graph describes.

  Args:
    graph: Root of the graph.
    source: Its origin, for errors.

  Raises:
    UserError: It is not a graph, an argument does not have the type or range of its parameter, or a
      constructor rejects its arguments.
  """
  check_kind(graph, object, source=source)
  graph_types.check(graph)
  try:
    return fdl.build(graph)
  except Exception as error:
    # Fiddle appends the node and all its arguments to the message.
    raise plain(error) from error.__cause__


def part(value: Any, *, source: str) -> Any:
  """Returns what `build` returns of a graph; an argument that is none, as it is."""
  return build(value, source=source) if isinstance(value, fdl.Buildable) else value


def check_kind(graph: Any, kind: type, *, source: str):
  """Raises a UserError that names `source` unless `graph` builds a `kind`."""
  expected = graph_types.misfit(kind, graph)
  if not isinstance(graph, fdl.Buildable) or expected is not None:
    of = "" if kind is object else f" of {kind.__name__}"
    raise UserError(f"{source} is {graph_types.shown(graph)}: expected an fdl.Config{of}.")


def plain(error: BaseException) -> BaseException:
  """Returns an exception as it was raised, without the graph that Fiddle appends to its message."""
  return getattr(error, "proxy_base_exception", error)
