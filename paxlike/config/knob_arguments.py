# SPDX-License-Identifier: Apache-2.0
"""The knobs behind the arguments of a graph, so that errors of layers can name them.

They are read from the source of an experiment's methods: in `num_chosen=self.NUM_EXPERTS_PER_TOKEN`
and in `moe.num_chosen = self.NUM_EXPERTS_PER_TOKEN` the knob sets the argument.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from paxlike.config.knobs import Knobs, spell
from paxlike.errors import ArgumentError

# As in "num_chosen=9 is more than num_experts=8."
_ARGUMENT = re.compile(r"(?<![\w.-])([a-z]\w*)=(-?\w+(?:\.\w+)*)")
_DEEPEST = 4  # Variables and methods between a knob and an argument.


def named(experiment: Knobs, error: ArgumentError) -> str:
  """Returns an error's message with the knobs of its arguments.

  `num_heads=32` becomes `NUM_HEADS=32` if that is or may be the value of the knob; otherwise
  `num_heads=32 (NUM_HEADS=16)`.
  """
  settings = experiment.values()

  def shown(match: re.Match[str]) -> str:
    argument, text = match.groups()
    found = {knob: settings[knob].value for knob in knobs_of(type(experiment), argument)}
    for expected in (text, "None"):
      for knob, value in found.items():
        if expected in (spell(value), str(value)):
          return f"{knob}={text}"
    others = ", ".join(f"{knob}={spell(value)}" for knob, value in found.items())
    return f"{match[0]} ({others})" if others else match[0]

  return _ARGUMENT.sub(shown, str(error))


@functools.cache
def knobs_of(cls: type[Knobs], argument: str) -> list[str]:
  """Returns the knobs that set an argument of this name in the methods of `cls`.

  If the argument is calculated, they are the knobs of the calculation.
  """
  found = [
    (tree, value)
    for base in cls.__mro__
    for method in vars(base).values()
    if isinstance(method, types.FunctionType) and (tree := _tree(method)) is not None
    for name, value in _arguments(tree, method.__globals__)
    if name == argument
  ]
  for read in (_read, _calculated):
    knobs = [knob for tree, value in found for knob in read(cls, tree, value, _DEEPEST)]
    if knobs:
      return list(dict.fromkeys(knobs))
  return []


def _tree(method: types.FunctionType) -> ast.Module | None:
  """Returns the parsed source of a method; None if there is none."""
  try:
    return ast.parse(textwrap.dedent(inspect.getsource(method)))
  except (OSError, TypeError, SyntaxError):
    return None


def _arguments(tree: ast.Module, names: dict[str, Any]) -> Iterator[tuple[str, ast.expr]]:
  """Yields (name, value) of the arguments of calls and of the attributes that are set."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      yield from ((one.arg, one.value) for one in node.keywords if one.arg is not None)
      yield from zip(_parameters(node.func, names), node.args, strict=False)
    elif isinstance(node, ast.Assign):
      yield from ((to.attr, node.value) for to in node.targets if isinstance(to, ast.Attribute))


def _parameters(called: ast.expr, names: dict[str, Any]) -> list[str]:
  """Returns the names of the parameters of a function of a module, such as `fiddlers.remat`."""
  if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)):
    return []
  function = getattr(names.get(called.value.id), called.attr, None)
  return [*inspect.signature(function).parameters] if inspect.isfunction(function) else []


def _read(cls: type[Knobs], tree: ast.Module, value: ast.expr, depth: int) -> Iterator[str]:
  """Yields the knobs whose unchanged value an expression may have."""
  own = value.attr if isinstance(value, ast.Attribute) and _is_self(value.value) else None
  if own is not None and cls.declares(own):
    yield own
  elif isinstance(value, ast.IfExp):
    yield from _read(cls, tree, value.body, depth)
    yield from _read(cls, tree, value.orelse, depth)
  elif isinstance(value, ast.Name) and depth:
    for given in _assigned(tree, value.id):
      yield from _read(cls, tree, given, depth - 1)
  elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and depth:
    method = getattr(cls, value.func.attr, None) if _is_self(value.func.value) else None
    inner = _tree(method) if isinstance(method, types.FunctionType) else None
    for node in ast.walk(inner) if inner else ():
      if isinstance(node, ast.Return) and inner and node.value:
        yield from _read(cls, inner, node.value, depth - 1)


def _calculated(cls: type[Knobs], tree: ast.Module, value: ast.expr, depth: int) -> Iterator[str]:
  """Yields the knobs in an expression and in the values of its variables."""
  for node in ast.walk(value):
    if isinstance(node, ast.Attribute) and _is_self(node.value) and cls.declares(node.attr):
      yield node.attr
    elif isinstance(node, ast.Name) and depth:
      for given in _assigned(tree, node.id):
        yield from _calculated(cls, tree, given, depth - 1)


def _assigned(tree: ast.Module, name: str) -> Iterator[ast.expr]:
  """Yields the values that a method assigns to a variable, also by unpacking."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Assign):
      names = [one for to in node.targets for one in ast.walk(to) if isinstance(one, ast.Name)]
      if any(one.id == name and isinstance(one.ctx, ast.Store) for one in names):
        yield node.value


def _is_self(value: ast.expr) -> bool:
  return isinstance(value, ast.Name) and value.id == "self"
