# SPDX-License-Identifier: Apache-2.0
"""Saves and loads a graph as JSON (`graph_json`), which may name only `allowed_symbols`."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import fiddle as fdl
from etils import epath
from fiddle import history

from paxlike import file_io, run_folder
from paxlike.config import allowed_symbols, graph_json
from paxlike.config.graph_edits import call_fiddler, set_path
from paxlike.config.graph_text import describe, difference, values
from paxlike.errors import UserError

__all__ = [
  "call_fiddler",
  "describe",
  "difference",
  "dump",
  "load",
  "names",
  "read",
  "read_data",
  "read_parts",
  "set_path",
  "values",
]

_VERSION = 1
_ROOT = "paxlike.training:Trainer"


def dump(graph: Any) -> str:
  """Returns the JSON of a graph.

  Raises:
    UserError: A value has neither a name nor a literal form; the message has its path.
  """
  saved = {"paxlike_graph": _VERSION, "graph": graph_json.dump(graph)}
  return json.dumps(saved, indent=1, allow_nan=False) + "\n"


def read(path: epath.PathLike, *, allow_modules: Iterable[str] = ()) -> Any:
  """Returns the graph of a run from a file, local or on a bucket; see `load`.

  Raises:
    UserError: As in `load`, or the root is neither a Trainer nor defined in `allow_modules`.
  """
  text = _text(path)
  allow_modules = tuple(filter(None, allow_modules))
  with _named_in_errors(path), allowed_symbols.copies(epath.Path(path).parent):
    graph = load(text, allow_modules=allow_modules)
    name = allowed_symbols.name_of(fdl.get_callable(graph)) if isinstance(graph, fdl.Config) else ""
    if name != _ROOT and not allowed_symbols.within(name.partition(":")[0], allow_modules):
      found = allowed_symbols.shortened(name) if name else type(graph).__name__
      raise UserError(f"the root is a {found}, not a Trainer.")
    return graph


def read_parts(path: epath.PathLike, names: Iterable[str] = ("model",)) -> dict[str, Any]:
  """Returns arguments in the graph of a run, by name, which may use paxlike's symbols only.

  The model is among them. The other parts of the graph are neither checked nor built.

  Raises:
    UserError: As in `load`.
  """
  text = _text(path)
  with _named_in_errors(path):
    saved = _parsed(text)
    try:
      arguments = saved["graph"]["arguments"]
      nodes = {name: arguments[name] for name in arguments if name in {"model", *names}}
      nodes["model"]
    except (KeyError, TypeError):
      raise UserError("it is not the graph of a run: it has no model.") from None
    allowed_symbols.check_all(graph_json.names(nodes))
    # Loaded together, since they may share values.
    return graph_json.load({"dict": [*map(list, nodes.items())]}, allow_modules=())


def load(text: str, *, allow_modules: Iterable[str] = ()) -> Any:
  """Returns the graph that `dump` wrote as JSON.

  Args:
    text: JSON.
    allow_modules: Modules whose symbols it may use, besides the allowed ones.

  Raises:
    UserError: It is no such JSON, or names a symbol that is not allowed; then no modules other than
      paxlike's have been imported.
  """
  saved = _parsed(text)
  allow_modules = tuple(filter(None, allow_modules))
  allowed_symbols.check_all(graph_json.names(saved), allow_modules=allow_modules)
  with history.custom_location(lambda: history.Location("config file", 0, None)):
    return graph_json.load(saved.get("graph"), allow_modules=allow_modules)


def names(text: str | bytes) -> set[str]:
  """Returns the names of functions and classes in the JSON of a graph."""
  return set(graph_json.names(json.loads(text)))


def read_data(path: epath.PathLike) -> Any:
  """Returns the graph in a file as `graph_data`, for inspection: its names are not checked.

  Raises:
    UserError: It cannot be read, or was not saved by paxlike.
  """
  text = _text(path)
  with _named_in_errors(path):
    return graph_json.load_data(_parsed(text).get("graph"))


@contextlib.contextmanager
def _named_in_errors(path: epath.PathLike) -> Iterator[None]:
  try:
    yield
  except UserError as error:
    raise UserError(f"{path}: {error}") from error


def _text(path: epath.PathLike) -> str:
  try:
    text = file_io.read_bytes(path).decode()
    return run_folder.with_own_paths(text, epath.Path(path).parent)
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"the config file {path} cannot be read: {reason}.") from None


def _parsed(text: str) -> dict[str, Any]:
  try:
    saved = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f"the config file is not JSON: {error}.") from None
  if not isinstance(saved, dict) or saved.get("paxlike_graph") != _VERSION:
    raise UserError(
      f"the config file is not a graph saved by paxlike (no 'paxlike_graph': {_VERSION})."
    )
  return saved
