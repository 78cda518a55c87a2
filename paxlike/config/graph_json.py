# SPDX-License-Identifier: Apache-2.0
"""The JSON of a graph.

JSON values are themselves; everything else is a mapping with one of these keys:

    {"config" | "partial" | "arg_factory": "module:symbol", "positional": [...], "arguments": {...}}
    {"symbol": "module:symbol"}                  a function, class or enum member
    {"dtype": "bfloat16"}                        a NumPy dtype
    {"list" | "tuple" | "set" | "frozenset": [...]}
    {"dict": [[key, value], ...]}
    {"float": "inf"}                             a float that JSON cannot represent
    {"list": [...], "id": 1}                     a value that the graph shares has an id ...
    {"same_as": 1}                               ... which refers to it elsewhere

Fiddle's tags and the history of values are not saved.
"""

import abc
import math
from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
import ml_dtypes
import numpy as np

from paxlike.config import allowed_symbols, dtypes, graph_text, old_names
from paxlike.config.graph_data import Part, Symbol
from paxlike.errors import UserError, one_line

_MAX_VALUES = 100_000  # In a graph; the package's graphs have fewer than 2,000.
_BUILDABLES: dict[str, type[fdl.Buildable]] = {
  "config": fdl.Config,
  "partial": fdl.Partial,
  "arg_factory": fdl.ArgFactory,
}


def dump(graph: Any) -> Any:
  """Returns the JSON of a graph.

  Raises:
    UserError: A value has neither a name nor a literal form; the message has its path.
  """
  return _Dump(graph).root


def load(node: Any, *, allow_modules: tuple[str, ...]) -> Any:
  """Returns the graph of JSON whose names have been checked.

  Raises:
    UserError: It is damaged, or does not match this version.
  """
  return _root(_Load(allow_modules), node)


def load_data(node: Any) -> Any:
  """Returns any JSON as `graph_data`; its names are not checked.

  Raises:
    UserError: It is damaged.
  """
  return _root(_LoadData(), node)


def names(node: Any) -> Iterator[str]:
  """Yields the names of functions and classes in the JSON."""
  stack = [node]
  while stack:
    node = stack.pop()
    if isinstance(node, dict):
      for key, value in node.items():
        if key in (*_BUILDABLES, "symbol") and isinstance(value, str):
          yield value
      stack += node.values()
    elif isinstance(node, list):
      stack += node


def _root(reader: "_Read", node: Any) -> Any:
  try:
    return reader.value(node, "graph")
  except RecursionError:
    raise UserError("the config file is nested too deeply.") from None


class _Dump:
  """One pass over a graph; `root` is the result."""

  def __init__(self, graph: Any):
    self._seen: dict[int, dict[str, Any]] = {}
    self._num_ids = 0
    self.root = self._value(graph, "graph")

  def _value(self, value: Any, path: str) -> Any:
    if not isinstance(value, fdl.Buildable | list | dict) and not graph_text.can_be_shared(value):
      return self._leaf(value, path)
    if id(value) in self._seen:
      first = self._seen[id(value)]
      if "id" not in first:
        self._num_ids += 1
        first["id"] = self._num_ids
      return {"same_as": first["id"]}
    node: dict[str, Any] = {}
    self._seen[id(value)] = node
    if isinstance(value, list):
      node["list"] = [self._value(v, f"{path}[{i}]") for i, v in enumerate(value)]
    elif isinstance(value, dict):
      node["dict"] = [
        [self._leaf(key, path), self._value(item, f"{path}[{key!r}]")]
        for key, item in value.items()
      ]
    elif isinstance(value, fdl.Buildable):
      self._buildable(node, value, path)
    else:
      node.update(self._leaf(value, path))
    return node

  def _buildable(self, node: dict[str, Any], value: fdl.Buildable, path: str):
    kinds = [kind for kind, cls in _BUILDABLES.items() if type(value) is cls]
    if not kinds:
      raise UserError(f"{path} cannot be saved: it is a {type(value).__name__}.")
    node[kinds[0]] = _named(fdl.get_callable(value), path)
    for name, item in value.__arguments__.items():
      if isinstance(name, int):
        node.setdefault("positional", []).append(self._value(item, f"{path}[{name}]"))
      else:
        node.setdefault("arguments", {})[name] = self._value(item, f"{path}.{name}")

  def _leaf(self, value: Any, path: str) -> Any:
    if value is None or type(value) in (bool, int, str):
      return value
    if type(value) is float:
      return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.dtype):
      return {"dtype": value.name}
    if type(value) is tuple:
      return {"tuple": [self._value(v, f"{path}[{i}]") for i, v in enumerate(value)]}
    if type(value) in (set, frozenset):
      return {type(value).__name__: [self._leaf(v, path) for v in sorted(value, key=repr)]}
    if allowed_symbols.is_symbol(value):
      return {"symbol": _named(value, path)}
    raise UserError(f"{path} cannot be saved: it is a {type(value).__name__}.")


def _corrupt(path: str) -> UserError:
  return UserError(f"the config file is damaged: {path} is not a value that paxlike saves.")


def _hashed(collection: Callable[[Any], Any], items: list[Any], path: str) -> Any:
  """Returns a collection of items; raises UserError if they must be hashable and are not."""
  try:
    return collection(items)
  except TypeError:
    raise _corrupt(path) from None


def _dtype(name: str) -> np.dtype:
  try:
    return np.dtype(name)
  except TypeError:
    # NumPy knows ml_dtypes by their types only.
    return np.dtype(getattr(ml_dtypes, name))


def _named(value: Any, path: str) -> str:
  try:
    name = allowed_symbols.name_of(value)
    if name.startswith("paxlike."):
      allowed_symbols.check(name)
    return name
  except UserError as error:
    raise UserError(f"{path}: {error}") from None


class _Read(abc.ABC):
  """One pass over JSON.

  A shared value counts at every reference, because comparing, hashing and printing visit it each
  time: a few lines can reference one list 2**40 times.
  """

  def __init__(self):
    self._by_id: dict[int, tuple[Any, int]] = {}  # id -> (value, number of values in it).
    self._count = 0

  @abc.abstractmethod
  def _symbol(self, name: str, path: str) -> Any:
    """Returns the value of a name."""

  @abc.abstractmethod
  def _part(self, kind: str, name: str, args: list[Any], kwargs: dict[str, Any], path: str) -> Any:
    """Returns the value of a `Buildable` of this kind."""

  def value(self, node: Any, path: str) -> Any:
    before = self._count
    self._add(1 + (len(node) // 64 if isinstance(node, str) else 0))
    if node is None or isinstance(node, bool | int | float | str):
      return node
    if not isinstance(node, dict):
      raise _corrupt(path)
    match node:
      case {"same_as": int(number), **rest} if number in self._by_id and not rest:
        value, count = self._by_id[number]
        self._add(count)
        return value
      case {"float": str(text), **rest} if text in ("inf", "-inf", "nan") and not rest:
        return float(text)
      case {"dtype": str(name), **rest} if name in dtypes.NAMES and not rest:
        return _dtype(name)
      case {"symbol": str(name), **rest} if not rest:
        return self._symbol(name, path)
      case {"list": list(items), **rest} if rest.keys() <= {"id"}:
        return self._keep(rest, self._list(items, path), before)
      case {"tuple": list(items), **rest} if rest.keys() <= {"id"}:
        return self._keep(rest, tuple(self._list(items, path)), before)
      case {"set": list(items), **rest} if rest.keys() <= {"id"}:
        return self._keep(rest, _hashed(set, self._list(items, path), path), before)
      case {"frozenset": list(items), **rest} if rest.keys() <= {"id"}:
        return self._keep(rest, _hashed(frozenset, self._list(items, path), path), before)
      case {"dict": list(items), **rest} if rest.keys() <= {"id"}:
        return self._keep(rest, self._dict(items, path), before)
    for kind in _BUILDABLES:
      if kind in node and node.keys() <= {kind, "positional", "arguments", "id"}:
        return self._keep(node, self._buildable(kind, node, path), before)
    raise _corrupt(path)

  def _list(self, items: list[Any], path: str) -> list[Any]:
    return [self.value(item, f"{path}[{index}]") for index, item in enumerate(items)]

  def _dict(self, items: list[Any], path: str) -> dict[Any, Any]:
    if not all(isinstance(item, list) and len(item) == 2 for item in items):
      raise _corrupt(path)
    pairs = [
      (self.value(key, path), self.value(item, f"{path}[{one_line(repr(key), limit=100)}]"))
      for key, item in items
    ]
    return _hashed(dict, pairs, path)

  def _buildable(self, kind: str, node: dict[str, Any], path: str) -> Any:
    positional, named = node.get("positional", []), node.get("arguments", {})
    shapes = {str: node[kind], list: positional, dict: named}
    if not all(isinstance(part, shape) for shape, part in shapes.items()):
      raise _corrupt(path)
    args = self._list(positional, path)
    kwargs = {
      name: self.value(v, f"{path}.{one_line(name, limit=100)}") for name, v in named.items()
    }
    return self._part(kind, node[kind], args, kwargs, path)

  def _add(self, count: int):
    self._count += count
    if self._count > _MAX_VALUES:
      raise UserError(
        f"the config file has more than {_MAX_VALUES:,} values, counting shared ones at every"
        " reference."
      )

  def _keep(self, node: dict[str, Any], value: Any, before: int) -> Any:
    if isinstance(node.get("id"), int):
      self._by_id[node["id"]] = value, self._count - before
    return value


class _Load(_Read):
  """Reads JSON whose names have been checked into a graph."""

  def __init__(self, allow_modules: tuple[str, ...]):
    super().__init__()
    self._allow_modules = allow_modules

  def _symbol(self, name: str, path: str) -> Any:
    try:
      return allowed_symbols.resolve(name, allow_modules=self._allow_modules)
    except UserError as error:
      raise UserError(f"{path}: {error}") from None

  def _part(
    self, kind: str, name: str, args: list[Any], kwargs: dict[str, Any], path: str
  ) -> fdl.Buildable:
    target = self._symbol(name, path)
    try:
      graph = _BUILDABLES[kind](target, *args, **kwargs)
    except (TypeError, ValueError) as error:
      raise UserError(
        f"the config file does not match this version of paxlike: {path}: {error}."
      ) from None
    for default in [n for n in graph.__arguments__ if isinstance(n, str) and n not in kwargs]:
      delattr(graph, default)
    return graph


class _LoadData(_Read):
  """Reads any JSON into data."""

  def _symbol(self, name: str, path: str) -> Symbol:
    if not allowed_symbols.is_name(name):
      raise _corrupt(path)
    return Symbol(old_names.current(name))

  def _part(self, kind: str, name: str, args: list[Any], kwargs: dict[str, Any], path: str) -> Part:
    arguments: dict[str | int, Any] = {**dict(enumerate(args)), **kwargs}
    return Part(_BUILDABLES[kind].__name__, self._symbol(name, path), arguments)
