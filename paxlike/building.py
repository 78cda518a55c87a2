# SPDX-License-Identifier: Apache-2.0
"""Builds graphs: the only place that does, so that every graph is checked first, and error messages
carry none of Fiddle's context.
"""

from typing import Any

import fiddle as fdl

from paxlike import graph_types
from paxlike.errors import UserError


def build(graph: Any) -> Any:
  """Returns what a graph describes.

  Raises:
    UserError: An argument is not of the type or range of its parameter; or what is built says so.
  """
  if not isinstance(graph, fdl.Buildable):
    raise UserError(f"there is {graph!r} where a graph should be.")
  graph_types.check(graph)
  try:
    return fdl.build(graph)
  except Exception as error:
    # Fiddle adds where in the graph it was, with all the arguments there.
    raise plain(error) from error.__cause__


def plain(error: BaseException) -> BaseException:
  """Returns an exception as it was before Fiddle added to it, with its traceback."""
  return getattr(error, "proxy_base_exception", error)
