# SPDX-License-Identifier: Apache-2.0
"""The configuration files of a run's folder: the folder is all that evaluation and decoding need.

Relative paths are made absolute; the tokenizer and the modules of the user are copied into the
folder, so that it can be moved.
"""

import copy
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

import fiddle as fdl
from etils import epath

from paxlike import file_io, registry, run_folder, untrusted_files
from paxlike.config import allowed_symbols, graph_file, graph_types, paths
from paxlike.data.chat import templates
from paxlike.data.tokenizers import token_settings
from paxlike.data.tokenizers.file_tokenizer import FileTokenizer
from paxlike.experiment import Experiment

_TOKENIZER = "tokenizer"
_LIBRARIES = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})


def of(experiment: Experiment | None, graph: Any) -> dict[str, str | bytes]:
  """Returns name -> content of the files that describe a run."""
  saved = portable(graph)
  files: dict[str, str | bytes] = {
    "config.json": graph_file.dump(saved),
    "config.txt": graph_file.describe(graph),
  }
  if experiment is not None:
    files["experiment.json"] = registry.dump(_portable_experiment(experiment, graph))
  if (path := _tokenizer(graph)) is not None:
    files |= {f"{_TOKENIZER}/{name}": content for name, content in _tokenizer_files(path)}
  classes = [] if experiment is None else type(experiment).__mro__
  named = {name.partition(":")[0] for name in graph_file.names(files["config.json"])}
  files |= _code({*named, *(cls.__module__ for cls in classes)})
  return files


def portable(graph: Any, *, own: str = run_folder.OWN) -> Any:
  """Returns a graph whose paths do not depend on the working directory.

  Args:
    graph: The graph of a run.
    own: Prefix for the run's folder in the path of the tokenizer's copy.
  """
  graph = copy.deepcopy(graph, {id(leaf): leaf for leaf in _leaves(graph)})
  change = _Change(graph, own)
  for _, node in graph_types.nodes(graph):
    hints = graph_types.annotations(fdl.get_callable(node))
    for name, value in list(node.__arguments__.items()):
      if isinstance(name, str) and not isinstance(value, fdl.Buildable):
        new = paths.changed(hints.get(name), value, change)
        if new != value:
          setattr(node, name, new)
  return graph


def _leaves(graph: Any) -> Iterator[Any]:
  """Yields the functions and leaves of a graph; a copy shares them, as some compare by identity."""
  for _, node in graph_types.nodes(graph):
    yield fdl.get_callable(node)
    left = list(node.__arguments__.values())
    while left:
      value = left.pop()
      if isinstance(value, list | tuple):
        left += value
      elif isinstance(value, dict):
        left += value.values()
      elif not isinstance(value, fdl.Buildable):
        yield value


def changes(before: Any, graph: Any, *, folder: epath.Path) -> str:
  """Returns the changes of a graph since its run began; "" if there are none.

  Args:
    before: The graph in the run's folder, as data; older versions saved paths as given.
    graph: The current graph.
    folder: The run's folder.
  """
  saved = portable(graph, own=f"{file_io.absolute(folder)}/")
  found = [graph_file.difference(before, one) for one in (saved, graph)]
  return min(found, key=len)


def _portable_experiment(experiment: Experiment, graph: Any) -> Experiment:
  change = _Change(graph, run_folder.OWN)
  saved = copy.deepcopy(experiment)
  knobs = experiment.knobs()
  for name, setting in experiment.values().items():
    new = paths.changed(knobs[name].type, setting.value, change)
    if new != setting.value:
      saved.set(name, new, source=setting.source)
  return saved


class _Change:
  """Makes paths absolute, and replaces the tokenizer's path by that of its copy."""

  def __init__(self, graph: Any, own: str):
    self._tokenizer = _tokenizer(graph)
    self._own = own

  def __call__(self, path: str) -> str:
    if self._tokenizer is not None and paths.absolute(path) == os.fspath(self._tokenizer):
      return f"{self._own}{_TOKENIZER}/{self._tokenizer.name}"
    return path if path.startswith(run_folder.OWN) else paths.absolute(path)


def _tokenizer(graph: Any) -> pathlib.Path | None:
  """Returns the file of the first tokenizer in a graph that reads one; None if none does."""
  for _, node in graph_types.nodes(graph):
    target = fdl.get_callable(node)
    if isinstance(target, type) and issubclass(target, FileTokenizer):
      path = node.__arguments__.get("path")
      if isinstance(path, str):
        return pathlib.Path(paths.absolute(path))
  return None


def _tokenizer_files(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of a tokenizer's file, and of its settings and chat templates."""
  beside = [path.parent / name for name in (*templates.FILES, *token_settings.FILES)]
  beside += sorted((path.parent / templates.MORE_TEMPLATES).glob("*.jinja"))
  for file in dict.fromkeys((path, *beside)):
    if untrusted_files.is_there(file):
      # Untrusted neighbours: a link out of the folder must not get private files into an export.
      folder = None if file == path else path.parent
      content = untrusted_files.read(file, limit=token_settings.TOKENIZER_BYTES, folder=folder)
      yield os.fspath(file.relative_to(path.parent)), content


def _code(modules: Iterable[str]) -> dict[str, bytes]:
  """Returns path -> source of the user's modules and of the user's modules that they import."""
  files: dict[str, bytes] = {}
  seen, left = set(), [name for name in modules if not allowed_symbols.within(name, ["paxlike"])]
  while left:
    name = left.pop()
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name in seen or name == "__main__" or not file or not file.endswith(".py"):
      continue
    seen.add(name)
    path = pathlib.Path(os.path.abspath(file))
    if path.is_relative_to(registry.PACKAGE) or os.fspath(path).startswith(_LIBRARIES):
      continue
    depth = name.count(".") + 1 + (path.name == "__init__.py")
    within = pathlib.Path(*path.parts[-depth:])
    files[f"{allowed_symbols.CODE}/{within}"] = path.read_bytes()
    left += [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)]
    left += {
      getattr(value, "__name__", "")
      if isinstance(value, type(sys))
      else getattr(value, "__module__", None) or ""
      for value in vars(module).values()
    }
  return files
