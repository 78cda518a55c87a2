# SPDX-License-Identifier: Apache-2.0
"""A graph as text: its values, who set them, and the difference of two graphs."""

import inspect
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import fiddle as fdl
import numpy as np
from fiddle import daglish

from paxlike.config import allowed_symbols, graph_data
from paxlike.config.graph_data import Part, Symbol

# Stands for a missing value.
_NOTHING = object()


class _Line(NamedTuple):
  path: str
  text: str
  source: str


def describe(graph: fdl.Buildable) -> str:
  """Returns every value of a graph, one `path = value  # source` per line, in signature order.

  The source is the line of code that set it, "default" if none did, or the name given to
  `fiddle.history.custom_location` ("command line").
  """
  lines = list(_lines(graph, "", "", {}))
  texts = [f"{line.path or '(graph)'} = {line.text}" for line in lines]
  # Sources are aligned, except after very long values.
  width = min(max(map(len, texts)), 70)
  return "\n".join(
    f"{text:<{width}}  # {line.source}" if line.source else text
    for text, line in zip(texts, lines, strict=True)
  )


def values(graph: fdl.Buildable) -> dict[str, str]:
  """Returns path -> value as text, without file names, which may differ between machines."""
  found = {line.path or "(graph)": line.text for line in _lines(graph, "", "", {})}
  return {
    name: re.sub(r" at 0x[0-9a-f]+", "", text)
    for name, text in found.items()
    if not _is_of_files(name, text)
  }


def _is_of_files(name: str, text: str) -> bool:
  return name.rpartition(".")[2] == "path" or (text[:1] in "'\"[(" and "/" in text)


def difference(a: Any, b: Any) -> str:
  """Returns the assignments that turn graph `a` into `b`, one per line; "" if they are equal.

  For example `graph.optimizer.b2 = 0.99  # was 0.95`. Either may be a graph as data.
  """
  return "\n".join(_differences(graph_data.of(a), graph_data.of(b), "graph", {}, {}))


def value_text(value: Any) -> str:
  """Returns a value in one line, as in code."""
  value = graph_data.of(value)
  if isinstance(value, Part):
    arguments = [
      value_text(item) if isinstance(name, int) else f"{_spelt(name)}={value_text(item)}"
      for name, item in value.arguments.items()
    ]
    return f"{value.kind}({', '.join([value_text(value.target), *arguments])})"
  if isinstance(value, Symbol):
    return allowed_symbols.shortened(value)
  if isinstance(value, np.dtype):
    return value.name
  if type(value) is dict:
    return f"{{{', '.join(f'{value_text(k)}: {value_text(v)}' for k, v in value.items())}}}"
  if type(value) is list:
    return f"[{', '.join(map(value_text, value))}]"
  if type(value) is tuple:
    return f"({', '.join(map(value_text, value))}{',' * (len(value) == 1)})"
  if type(value) in (set, frozenset) and value:  # Their order differs between processes.
    items = f"{{{', '.join(sorted(map(value_text, value)))}}}"
    return items if type(value) is set else f"frozenset({items})"
  return allowed_symbols.short_name(value) if allowed_symbols.is_symbol(value) else repr(value)


def _children(value: Any) -> list[tuple[str, Any]]:
  """Returns (path from `value`, child) of each value set in a node, also of a graph as data."""
  if isinstance(value, fdl.Buildable):
    arguments: dict[Any, Any] = value.__arguments__
    return [(_step(name), arguments[name]) for name in _in_order(value) if name in arguments]
  if isinstance(value, Part):
    return [(_step(name), item) for name, item in value.arguments.items()]
  if isinstance(value, dict):
    return [(f"[{key!r}]", item) for key, item in value.items()]
  return [(f"[{index}]", item) for index, item in enumerate(value)]


def _step(name: str | int) -> str:
  return f"[{name}]" if isinstance(name, int) else f".{_spelt(name)}"


def _spelt(name: str) -> str:
  """Returns an argument's name without control characters, which a file may contain."""
  return name if name.isprintable() else repr(name)


def _in_order(value: fdl.Buildable) -> list[str | int]:
  """Returns the names of all arguments, in the order of the signature."""
  return [*dict.fromkeys([*value.__signature_info__.parameters, *value.__arguments__])]


def can_be_shared(value: Any) -> bool:
  """Returns whether it matters if two places of a graph hold one value or equal copies of it."""
  return (
    isinstance(value, fdl.Buildable | Part | dict | list | tuple | set | frozenset)
    and daglish.is_memoizable(value)
    and not daglish.is_internable(value)
  )


def holds_graph(value: Any) -> bool:
  """Returns whether a value is or contains a `Buildable`."""
  if isinstance(value, fdl.Buildable):
    return True
  return isinstance(value, dict | list | tuple) and any(holds_graph(v) for _, v in _children(value))


def _lines(value: Any, path: str, source: str, seen: dict[int, str]) -> Iterator[_Line]:
  shown = path.removeprefix(".")
  if not holds_graph(value):
    yield _Line(shown, value_text(value), source)
  elif not isinstance(value, fdl.Buildable):
    for step, child in _children(value):
      yield from _lines(child, path + step, source, seen)
  elif id(value) in seen:
    yield _Line(shown, f"the same as {seen[id(value)]}", source)
  else:
    seen[id(value)] = shown
    target = allowed_symbols.short_name(fdl.get_callable(value))
    yield _Line(shown, f"{type(value).__name__}({target})", source)
    arguments: dict[Any, Any] = value.__arguments__
    defaults = _defaults(value)
    for name in _in_order(value):
      child_path = path + _step(name)
      if name in arguments:
        yield from _lines(arguments[name], child_path, _source(value, name), seen)
      elif name in defaults:
        yield _Line(child_path.removeprefix("."), value_text(defaults[str(name)]), "default")


def _defaults(value: fdl.Buildable) -> dict[str, Any]:
  """Returns the defaults of the arguments that are not set, but for those that a factory makes."""
  return {
    name: parameter.default
    for name, parameter in value.__signature_info__.parameters.items()
    if name not in value.__arguments__
    and parameter.default is not inspect.Parameter.empty
    and repr(parameter.default) != "<factory>"  # Of a dataclass.
  }


def _source(value: fdl.Buildable, name: str | int) -> str:
  history: dict[Any, Any] = value.__argument_history__
  entries = history.get(name)
  if not entries:
    return ""
  location = entries[-1].location
  if not location.line_number:
    return location.filename
  return f"{os.path.basename(location.filename)}:{location.line_number}"


def _differences(
  a: Any, b: Any, path: str, seen_a: dict[int, str], seen_b: dict[int, str]
) -> Iterator[str]:
  if not _same_container(a, b):
    if a is not b and a != b:
      yield f"{path} = {value_text(b)}  # was {_was(a)}"
      yield from _shared(b, path, seen_b)
    return
  if can_be_shared(b):
    first_a, first_b = seen_a.setdefault(id(a), path), seen_b.setdefault(id(b), path)
    if first_b not in (first_a, path):
      yield f"{path} = {first_b}  # was {'a separate copy' if first_a == path else first_a}"
      return
    if first_a != first_b:
      yield f"{path} = copy.deepcopy({path})  # was {first_a}"
    elif first_a != path:
      return
  children_a, children_b = dict(_children(a)), dict(_children(b))
  # Both have the same target; a graph read from a file has no defaults.
  defaults: dict[str, Any] = (isinstance(a, Part) and (a.defaults or b.defaults)) or {}
  for step, child in children_b.items():
    default = defaults.get(step[1:], _NOTHING)
    yield from _differences(children_a.get(step, default), child, path + step, seen_a, seen_b)
  for step, child in children_a.items():
    if step not in children_b:
      default = defaults.get(step[1:], _NOTHING)
      if child != default:
        to = "" if default is _NOTHING else f", becomes {value_text(default)}"
        yield f"del {path}{step}  # was {_was(child)}{to}"


def _shared(b: Any, path: str, seen_b: dict[int, str]) -> Iterator[str]:
  """Yields assignments that restore sharing between `b` and values seen before."""
  if can_be_shared(b):
    first = seen_b.setdefault(id(b), path)
    if first != path:
      yield f"{path} = {first}  # was a separate copy"
      return
  for step, child in _children(b) if isinstance(b, Part | dict | list | tuple) else ():
    yield from _shared(child, path + step, seen_b)


def _same_container(a: Any, b: Any) -> bool:
  """Returns whether a and b can only differ in their children."""
  if isinstance(a, Part):
    return isinstance(b, Part) and (a.kind, a.target) == (b.kind, b.target)
  if isinstance(a, list | tuple):
    same = type(a) is type(b) and len(a) == len(b)
    # A tuple's elements cannot be assigned, only the values within them.
    return same and (isinstance(a, list) or all(map(_same_container, a, b)))
  return isinstance(a, dict) and isinstance(b, dict)


def _was(value: Any) -> str:
  if value is _NOTHING:
    return "not set"
  if isinstance(value, Part):
    return f"{value.kind}({value_text(value.target)})"
  return value_text(value)
