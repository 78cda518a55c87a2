# SPDX-License-Identifier: Apache-2.0
"""Edits of a graph from the command line: a value by its path, or a fiddler."""

import ast
import difflib
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl
import ml_dtypes
import numpy as np
from fiddle import history

from paxlike.config import (
  allowed_symbols,
  dtypes,
  graph_text,
  graph_types,
  knob_types,
  ranges,
  type_words,
)
from paxlike.errors import UserError, did_you_mean

_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[(-?\d+)\]|\[(?:'([^']*)'|"([^"]*)"|([^\]'"]+))\]""")
_NOTHING = object()


def set_path(graph: fdl.Buildable, path: str, text: str):
  """Sets one value of a graph: `--fdl.optimizer.b2=0.99`.

  Args:
    graph: Edited in place.
    path: Dotted names with `[0]` and `['key']`: "model.stack.pattern[0].mlp.dropout".
    text: The value, parsed by its annotation, else by the type of the current value.

  Raises:
    UserError: There is no such path, the value is of another type, or it would replace a node of
      the graph (only `none` may).
  """
  given = f"--fdl.{path}={text}"
  steps = _parse_path(path, given)
  owner, shown = graph, ""
  # Tuples on the path cannot be changed in place: they are replaced, innermost first.
  trail: list[tuple[Any, str | int]] = []
  for step in steps[:-1]:
    trail.append((owner, _check_step(owner, step, shown, given)))
    owner = _get(owner, trail[-1][1])
    shown += _spell_step(step, shown)
  key = _check_step(owner, steps[-1], shown, given)
  value = _read(text, _get(owner, key, None), _annotation(owner, key), given)
  if isinstance(owner, fdl.Buildable):
    declared = graph_types.annotations(fdl.get_callable(owner)).get(str(key), Any)
    if (expected := graph_types.misfit(declared, value)) is not None:
      raise UserError(f"{given}: expected {expected}.")
  with history.custom_location(lambda: history.Location("command line", 0, None)):
    for part, part_key in [(owner, key), *reversed(trail)]:
      if isinstance(part, tuple):
        value = tuple(value if i == part_key else item for i, item in enumerate(part))
      elif isinstance(part, fdl.Buildable):
        # Set again even if changed in place, to record the history.
        if isinstance(part_key, str):
          setattr(part, part_key, value)
        else:
          part[part_key] = value
        return
      else:
        part[part_key] = value
        value = part


def call_fiddler(
  graph: fdl.Buildable, text: str, registry: Mapping[str, Callable[..., Any]]
) -> fdl.Buildable:
  """Applies a fiddler: `--fiddler=name(args)`.

  Args:
    graph: May be edited in place.
    text: "name", "name(1, key=x)" or "module.name(...)"; the working directory is importable.
      Arguments are literals; strings need no quotes.
    registry: Fiddlers by short name.

  Returns:
    The graph that the fiddler returns, or `graph` if it returns None.

  Raises:
    UserError: There is no such fiddler, or it does not accept these arguments.
  """
  given = f"--fiddler={text}"
  name, args, kwargs = _parse_call(text, given)
  fiddler = registry.get(name) or _import_fiddler(name, registry, given)
  signature = inspect.signature(fiddler)
  try:
    bound = signature.bind(graph, *args, **kwargs)
    _check_types(signature, bound.arguments)
  except (TypeError, knob_types.RefusedError) as error:
    reason = str(error).removesuffix(".")
    raise UserError(f"{given}: {reason}; its signature is {name}{_spelt(signature)}.") from None
  result = fiddler(graph, *args, **kwargs)
  if result is not None and not isinstance(result, fdl.Buildable):
    raise UserError(f"{given}: returned a {type(result).__name__}, neither a graph nor None.")
  return graph if result is None else result


class _Spelt:
  """An annotation that is printed with its range."""

  def __init__(self, kind: Any):
    self._text = type_words.name(kind)

  def __repr__(self) -> str:
    return self._text


def _spelt(signature: inspect.Signature) -> inspect.Signature:
  """Returns a fiddler's signature without the graph, for messages."""
  parameters = list(signature.parameters.values())[1:]
  return signature.replace(
    parameters=[
      one.replace(annotation=_Spelt(one.annotation))
      if knob_types.is_supported(one.annotation)
      else one
      for one in parameters
    ]
  )


def _check_types(signature: inspect.Signature, values: Mapping[str, Any]):
  for name, value in values.items():
    parameter = signature.parameters[name]
    is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if is_one and knob_types.is_supported(parameter.annotation):
      try:
        knob_types.convert(parameter.annotation, value, text=False)
      except knob_types.RefusedError as error:
        raise knob_types.RefusedError(f"{name}: {error}") from None


def _parse_path(path: str, given: str) -> list[str | int]:
  steps: list[str | int] = []
  end = 0
  while match := _STEP.match(path, end):
    attribute, index, *keys = match.groups()
    steps.append(int(index) if index else attribute or next(key for key in keys if key))
    end = match.end()
  if end != len(path) or not steps:
    raise UserError(f"{given}: {path!r} is not a path such as model.stack.pattern[0].mlp.")
  return steps


def _spell_step(step: str | int, shown: str) -> str:
  return f"[{step}]" if isinstance(step, int) else f".{step}" if shown else step


def _check_step(owner: Any, step: str | int, shown: str, given: str) -> str | int:
  """Returns the key of `step` in `owner`; raises UserError if there is none."""
  place = shown or "the graph"
  if isinstance(owner, fdl.Buildable):
    parameters = owner.__signature_info__.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    keys = [*dict.fromkeys([*owner.__arguments__, *named])]
    open_ended = isinstance(step, str) and inspect.Parameter.VAR_KEYWORD in kinds
  elif isinstance(owner, dict):
    keys, open_ended = list(owner), False
  elif isinstance(owner, list | tuple):
    keys, open_ended = list(range(len(owner))), False
    step = step + len(owner) if isinstance(step, int) and step < 0 else step
  else:
    raise UserError(f"{given}: {place} is {graph_text.value_text(owner)}, which has no elements.")
  if step in keys or open_ended:
    return step
  # A low cutoff, for names of two letters such as Adam's b1.
  near = difflib.get_close_matches(str(step), map(str, keys), n=1, cutoff=0.5)
  hint = f" Did you mean {near[0]}?" if near else f" It has {', '.join(map(str, keys))}."
  raise UserError(f"{given}: {place} has no {step}.{hint}")


def _get(owner: Any, key: str | int, *default: Any) -> Any:
  """Returns a child; for an unset argument of a `Buildable`, the signature's default."""
  if not isinstance(owner, fdl.Buildable):
    return owner[key]
  if key in owner.__arguments__:
    return owner.__arguments__[key]
  parameter = owner.__signature_info__.parameters.get(str(key))
  if parameter is None or parameter.default is inspect.Parameter.empty:
    return _NOTHING if default else None
  return parameter.default


def _annotation(owner: Any, key: str | int) -> Any:
  """Returns the part of an argument's annotation that text can express; None if there is none."""
  if not isinstance(owner, fdl.Buildable):
    return None
  hints = graph_types.annotations(fdl.get_callable(owner))
  parameter = owner.__signature_info__.parameters.get(str(key))
  annotation = hints.get(str(key), getattr(parameter, "annotation", None))
  if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
    return annotation if knob_types.is_supported(annotation) else None
  members = [kind for kind in typing.get_args(annotation) if knob_types.is_supported(kind)]
  if bool in members and float in members:
    # jax.typing.ArrayLike: the text 1 is a number.
    members.remove(bool)
  return None if members in ([], [types.NoneType]) else typing.Union[tuple(members)]  # noqa: UP007


def _read(text: str, present: Any, annotation: Any, given: str) -> Any:
  """Returns the value of `text`, to replace `present` (_NOTHING if there is none)."""
  is_none = text.strip().lower() == "none"
  if graph_text.holds_graph(present):
    if is_none:
      return None
    shown = graph_text.value_text(present).partition("(")[2].rstrip(")").partition(",")[0]
    raise UserError(
      f"{given}: this is a node of the graph ({shown}), which cannot be set from text (only none,"
      " which removes it). Set a value within it, or use --fiddler."
    )
  if (dtype := _dtype_like(present)) is not None:
    return dtype(_convert(ranges.Dtype, text, given))
  if annotation is not None:
    return _convert(annotation, text, given)
  if isinstance(present, enum.Enum):
    return _convert(type(present), text, given)
  for kind in (bool, int, float):
    if isinstance(present, kind):
      return _convert(kind, text, given)
  if is_none:
    return None
  if isinstance(present, str | tuple | list | dict):
    return _convert(_kind_of(present), text, given)
  if callable(present):
    shown = graph_text.value_text(present)
    raise UserError(f"{given}: this is {shown}, which cannot be set from text; use --fiddler.")
  try:
    return knob_types.guess(text)
  except knob_types.RefusedError as refusal:
    raise UserError(f"{given}: {refusal}") from None


def _kind_of(present: Any) -> Any:
  """Returns the type of text that replaces a str or collection, which may become a mapping."""
  if isinstance(present, str):
    return str
  items = list(present.values() if isinstance(present, dict) else present)
  kinds = {type(item) for item in items}
  if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
    return (list if isinstance(present, list) else tuple) | dict
  (kind,) = kinds
  return (list[kind] if isinstance(present, list) else tuple[kind, ...]) | dict[str, kind]


def _convert(kind: Any, text: str, given: str) -> Any:
  try:
    return knob_types.convert(kind, text, text=True)
  except knob_types.RefusedError as refusal:
    raise UserError(f"{given}: {refusal}") from None


def _dtype_like(value: Any) -> Callable[[str], Any] | None:
  """Returns a function from a dtype's name to that dtype in the form of `value` (a str, a NumPy
  dtype or a scalar type); None if `value` is no dtype.
  """
  if isinstance(value, str):
    return str if value in dtypes.NAMES else None
  try:
    knob_types.convert(ranges.Dtype, value, text=False)
  except knob_types.RefusedError:
    return None
  if isinstance(value, np.dtype):
    return lambda name: np.dtype(getattr(ml_dtypes, name, name))
  module = sys.modules[value.__module__]
  return lambda name: getattr(module if hasattr(module, name) else ml_dtypes, name)


def _parse_call(text: str, given: str) -> tuple[str, list[Any], dict[str, Any]]:
  try:
    call = ast.parse(text.strip(), mode="eval").body
  except (SyntaxError, ValueError):
    raise UserError(f"{given}: expected name or name(arguments).") from None
  args: list[Any] = []
  kwargs: dict[Any, Any] = {}
  if isinstance(call, ast.Call):
    args = [_literal(arg, given) for arg in call.args]
    kwargs = {keyword.arg: _literal(keyword.value, given) for keyword in call.keywords}
    call = call.func
  name = ast.unparse(call)
  if not re.fullmatch(r"\w+(\.\w+)*", name) or None in kwargs:
    raise UserError(f"{given}: expected name or name(arguments).")
  return name, args, kwargs


def _literal(node: ast.expr, given: str) -> Any:
  if isinstance(node, ast.Name):
    return knob_types.guess(node.id)
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError):
    raise UserError(f"{given}: {ast.unparse(node)} is not a literal.") from None


def _import_fiddler(
  name: str, registry: Mapping[str, Callable[..., Any]], given: str
) -> Callable[..., Any]:
  module_name, _, attribute = name.rpartition(".")
  if not module_name:
    hint = did_you_mean(name, registry) or f" Available: {', '.join(sorted(registry)) or 'none'}."
    raise UserError(f"{given}: no fiddler {name}.{hint}")
  try:
    module = allowed_symbols.import_module(module_name)
  except ModuleNotFoundError as error:
    if not f"{module_name}.".startswith(f"{error.name}."):
      raise
    raise UserError(f"{given}: no module {error.name}.") from None
  fiddler = getattr(module, attribute, None)
  if not callable(fiddler):
    names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
    raise UserError(f"{given}: {module_name} has no {attribute}.{did_you_mean(attribute, names)}")
  return fiddler
