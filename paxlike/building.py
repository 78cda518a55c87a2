# SPDX-License-Identifier: Apache-2.0
"""Builds graphs: the only place that does, so that every graph is checked first, and error messages
carry none of Fiddle's context.
"""

from typing import Any

import fiddle as fdl

from paxlike import graph_types
from paxlike.errors import UserError


def build(graph: Any, *, source: str = "the graph") -> Any:
  """Returns what a graph describes.

  Args:
    graph: Root of the graph.
    source: What it came from, in words.

  Raises:
    UserError: It is no graph; or an argument is not of the type or range of its parameter; or what
      is built says so.
  """
  check_kind(graph, object, source=source)
  graph_types.check(graph)
  try:
    return fdl.build(graph)
  except Exception as error:
    # Fiddle adds where in the graph it was, with all the arguments there.
    raise plain(error) from error.__cause__


def check_kind(graph: Any, kind: type, *, source: str):
  """Raises UserError, that names its source, unless this is a graph that makes a `kind`."""
  expected = graph_types.misfit(kind, graph)
  if not isinstance(graph, fdl.Buildable) or expected is not None:
    of = "" if kind is object else f" of {kind.__name__}"
    raise UserError(f"{source} is {graph_types.shown(graph)}: expected an fdl.Config{of}.")


def plain(error: BaseException) -> BaseException:
  """Returns an exception as it was before Fiddle added to it, with its traceback."""
  return getattr(error, "proxy_base_exception", error)
