# SPDX-License-Identifier: Apache-2.0
"""Finds the experiments in modules of the working directory by parsing: nothing is imported."""

import ast
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

_MOST_FILES, _MOST_BYTES = 300, 2_000_000
# Prefixes of the names of the package's experiments, and the name of their exported base class.
_PREFIXES = ("paxlike.experiment.", "paxlike.experiments.", "paxlike.scripts_gpu.")
_BASE = "paxlike.Experiment"


class Found(NamedTuple):
  """An experiment.

  Attributes:
    name: Its dotted path, a value of --fdl_config.
    doc: The first line of its docstring.
  """

  name: str
  doc: str


def find(folder: str | os.PathLike[str] = ".") -> list[Found]:
  """Returns the experiments in the modules and packages of a folder, sorted by name."""
  modules = dict(_modules(pathlib.Path(folder)))
  names = {name: _imported(tree, name) for name, tree in modules.items()}
  classes = {
    f"{module}.{node.name}": (module, node)
    for module, tree in modules.items()
    for node in tree.body
    if isinstance(node, ast.ClassDef)
  }

  def is_experiment(path: str, seen: frozenset[str]) -> bool:
    if path.startswith(_PREFIXES) or path == _BASE:
      return True
    if path not in classes or path in seen:
      module, _, name = path.rpartition(".")
      real = names.get(module, {}).get(name)  # The module imports it.
      return real is not None and real != path and is_experiment(real, seen | {path})
    module, node = classes[path]
    bases = [_resolved(base, names[module], module) for base in node.bases]
    return any(is_experiment(base, seen | {path}) for base in bases)

  return [
    Found(path, (ast.get_docstring(node) or "").split("\n")[0])
    for path, (_, node) in sorted(classes.items())
    if not node.name.startswith("_") and is_experiment(path, frozenset())
  ]


def _modules(folder: pathlib.Path) -> Iterator[tuple[str, ast.Module]]:
  """Yields (name, syntax tree) of each module that can be read and parsed."""
  files = sorted(folder.glob("*.py"))
  for package in sorted(folder.glob("*/__init__.py")):
    if package.parent.name != "paxlike":
      files += sorted(package.parent.rglob("*.py"))
  for file in files[:_MOST_FILES]:
    parts = file.relative_to(folder).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if not parts or not all(part.isidentifier() for part in parts):
      continue
    try:
      if file.is_file() and file.stat().st_size <= _MOST_BYTES:
        yield ".".join(parts), ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
      continue


def _imported(tree: ast.Module, module: str) -> dict[str, str]:
  """Returns local name -> full name of the imports and classes of a module."""
  classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
  found = {name: f"{module}.{name}" for name in classes}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        top = alias.name.partition(".")[0]
        found[alias.asname or top] = alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
      above = module.split(".")[: -node.level] if node.level else []
      source = ".".join([*above, *([node.module] if node.module else [])])
      for alias in node.names:
        found[alias.asname or alias.name] = f"{source}.{alias.name}"
  return found


def _resolved(base: ast.expr, names: dict[str, str], module: str) -> str:
  """Returns the full name of a base class."""
  text = ast.unparse(base)
  first, dot, rest = text.partition(".")
  return f"{names.get(first, f'{module}.{first}')}{dot}{rest}"
