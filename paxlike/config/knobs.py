# SPDX-License-Identifier: Apache-2.0
"""Knobs: typed literals of an experiment, declared on its class and overridable.

An annotated UPPER_CASE attribute declares a knob, a plain assignment in a subclass overrides it,
and an assignment without a declaration is an error at class creation:

    class Gpt(Knobs):
      NUM_LAYERS: int = 12  #: Transformer blocks.

    class Gpt5B(Gpt):
      NUM_LAYERS = 24

    Gpt5B(NUM_LAYERS=4).NUM_LAYERS  # 4, and NUM_LAYERS now counts as read

Class access (`Gpt5B.NUM_LAYERS`) returns the class's value and does not count as reading.
"""

import ast
import builtins
import contextlib
import dataclasses
import enum
import functools
import inspect
import io
import re
import textwrap
import tokenize
import typing
from typing import Any, Self

from paxlike.config import knob_types, type_words
from paxlike.config.knob_text import spell
from paxlike.config.ranges import Dtype
from paxlike.errors import UserError, did_you_mean

__all__ = ["UNSET", "Dtype", "Knob", "Knobs", "Setting", "spell"]

_UPPER = re.compile(r"[A-Z][A-Z0-9_]*")


class _Unset:
  """The value of a knob without a default: a subclass or the command line must set it."""

  def __repr__(self) -> str:
    return "(unset)"


UNSET: Any = _Unset()
_PLACEHOLDERS = ("...", [1, 2])
_IMMUTABLE = bool | int | float | str | enum.Enum | None


class Setting(typing.NamedTuple):
  """The value of a knob in one experiment and who set it.

  Attributes:
    value: Of the knob's type, or UNSET.
    source: "class Gpt" if declared there, "subclass Gpt5B" if overridden there, or the `source`
      argument of `set`, such as "command line".
  """

  value: Any
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
  """A knob of a class.

  Attributes:
    name: UPPER_CASE.
    type: The resolved annotation.
    default: The class's value, or UNSET.
    declared_in: The class that declares it.
    set_in: The class that sets its value.
  """

  name: str
  type: Any
  default: Any
  declared_in: builtins.type
  set_in: builtins.type

  @property
  def type_name(self) -> str:
    """The type as it is written in an annotation."""
    return type_words.name(self.type)

  @property
  def group(self) -> builtins.type:
    """The class that declares it first, whose docstring is the heading of its knobs."""
    bases = reversed(self.declared_in.__mro__)
    return next(base for base in bases if self.name in inspect.get_annotations(base))

  @property
  def doc(self) -> str:
    """The text after `#:` beside or above the declaration, or "" if there is none."""
    for base in self.declared_in.__mro__:
      if doc := _docs(base).get(self.name):
        return doc
    return ""

  def trials(self, value: Any) -> list[Any]:
    """Returns values to try instead of `value`, to find out whether the knob has an effect.

    For bools and Literals, all values; for other types only if `value` is None: the class's value,
    or a placeholder, for texts and for pairs of numbers.
    """
    found = type_words.choices(self.type)
    if found or value is not None:
      return found
    for default in _PLACEHOLDERS if self.default is None else [self.default]:
      with contextlib.suppress(knob_types.RefusedError):
        return [knob_types.convert(self.type, default, text=False)]
    return []


class Knobs:
  """Base of classes that have knobs.

  Args:
    **overrides: Values of knobs, as for `set`.

  Raises:
    UserError: There is no such knob, or a value is not of its type.
  """

  # Name -> (type, class that declares it), in order of declaration: bases first, as listed.
  _declared: typing.ClassVar[dict[str, tuple[Any, type]]] = {}
  # Name -> value in the class statement, converted. Subclasses need not convert it again.
  _converted: typing.ClassVar[dict[str, Any]] = {}

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    cls._declared = _in_order(cls.__bases__)
    for base in reversed(cls.__mro__):
      own = base.__dict__["_declared"] if base is not cls and issubclass(base, Knobs) else None
      for name, kind in _annotations(base).items() if own is None else ():
        cls._declared[name] = (kind, base)
      for name, (kind, owner) in (own or {}).items():
        if owner is base:
          cls._declared[name] = (kind, owner)
    for base in reversed(cls.__mro__):
      if base is cls or not issubclass(base, Knobs):
        _check_names(base, cls._declared)
    cls._converted = {}
    for name in cls._declared:
      value = _class_value(cls, name)
      if name in cls.__dict__:
        setattr(cls, name, value)
        cls._converted[name] = value

  def __init__(self, **overrides: Any):
    for name, value in overrides.items():
      self.set(name, value, source="constructor")

  def __getattribute__(self, name: str) -> Any:
    cls = type(self)
    if name not in cls._declared:
      return super().__getattribute__(name)
    self._state("_read", set).add(name)
    setting = self._state("_settings", dict).get(name)
    value = _class_value(cls, name) if setting is None else setting.value
    if value is UNSET:
      raise UserError(f"{cls.__name__} has no {name}: set it in a subclass or by --fdl.{name}=...")
    return value.copy() if isinstance(value, dict | list) else value

  def __setattr__(self, name: str, value: Any):
    if _UPPER.fullmatch(name):
      self.set(name, value, source="assignment")
    else:
      super().__setattr__(name, value)

  def __repr__(self) -> str:
    settings = self._state("_settings", dict).items()
    return f"{type(self).__name__}({', '.join(f'{n}={s.value!r}' for n, s in settings)})"

  def set(self, name: str, value: Any, *, source: str) -> Self:
    """Sets a knob of this experiment.

    Args:
      name: UPPER_CASE.
      value: A Python value of the knob's type, or its text as on the command line.
      source: Who sets it, for messages, such as "command line".

    Raises:
      UserError: There is no such knob, or the value is not of its type.
    """
    cls = type(self)
    if name not in cls._declared:
      hint = did_you_mean(name.upper(), cls._declared) or " --fdl_help lists its knobs."
      raise UserError(f"no knob {name} in {cls.__name__}.{hint}")
    kind, _ = cls._declared[name]
    given = f"--fdl.{name}={value}" if source == "command line" else f"{name}={value!r}"
    converted = _convert(kind, value, text=isinstance(value, str), given=given)
    self._state("_settings", dict)[name] = Setting(converted, source)
    return self

  @classmethod
  def knobs(cls) -> dict[str, Knob]:
    """Returns every knob by name, in order of declaration: bases first, as listed."""
    return {
      name: Knob(
        name=name,
        type=kind,
        default=_class_value(cls, name),
        declared_in=declared_in,
        set_in=_owner(cls, name) or declared_in,
      )
      for name, (kind, declared_in) in cls._declared.items()
    }

  @classmethod
  def declares(cls, name: str) -> bool:
    """Returns whether there is a knob of this name."""
    return name in cls._declared

  def values(self) -> dict[str, Setting]:
    """Returns the value of every knob and who set it; does not count as reading."""
    settings = self._state("_settings", dict)
    values = {}
    for name, knob in type(self).knobs().items():
      word = "class" if knob.set_in in knob.declared_in.__mro__ else "subclass"
      values[name] = settings.get(name, Setting(knob.default, f"{word} {knob.set_in.__name__}"))
    return values

  def settings(self) -> dict[str, Setting]:
    """Returns the knobs that were set on this instance."""
    return dict(self._state("_settings", dict))

  def read_names(self) -> frozenset[str]:
    """Returns the knobs read from this instance since its creation or `reset_reads`."""
    return frozenset(self._state("_read", set))

  def unread(self) -> list[str]:
    """Returns the knobs that were set on this instance and never read: they had no effect."""
    read = self._state("_read", set)
    return [name for name in self._state("_settings", dict) if name not in read]

  def reset_reads(self):
    """Forgets which knobs were read."""
    self._state("_read", set).clear()

  def _state(self, name: str, empty: type) -> Any:
    # Created on first use, so that subclasses need not call this constructor.
    return self.__dict__.setdefault(name, empty())


def _in_order(bases: tuple[type, ...]) -> dict[str, Any]:
  """Returns the knobs of a class's bases as the keys of a dict, in the order of the bases.

  A knob that a base inherits from another of the bases is placed with the latter.
  """
  return {
    name: None
    for base in bases
    if issubclass(base, Knobs)
    for name, (_, owner) in base._declared.items()
    if owner is base or owner not in bases
  }


def _annotations(cls: type) -> dict[str, Any]:
  """Returns name -> type of the knobs that `cls` itself annotates."""
  upper = {n: t for n, t in inspect.get_annotations(cls).items() if _UPPER.fullmatch(n)}
  if not upper:
    return {}
  # Only knobs are resolved: other annotations may need imports under TYPE_CHECKING.
  probe = type(cls.__name__, (), {"__annotations__": upper, "__module__": cls.__module__})
  try:
    kinds = typing.get_type_hints(probe, localns=dict(vars(cls)), include_extras=True)
  except (NameError, TypeError, SyntaxError) as error:
    raise UserError(f"class {cls.__name__}: unknown type of a knob: {error}.") from error
  for name, kind in kinds.items():
    if not knob_types.is_supported(kind):
      raise UserError(
        f"class {cls.__name__} declares {name}: {type_words.name(kind)}, but a knob is an int,"
        " float, bool, str, Dtype, enum, Literal, tuple, list or dict, or a union of these."
      )
  return kinds


def _check_names(cls: type, declared: dict[str, Any]):
  for name in vars(cls):
    if _UPPER.fullmatch(name) and name not in declared:
      hint = did_you_mean(name, declared) or f" Annotate it to declare it: {name}: int = ..."
      raise UserError(f"class {cls.__name__} assigns {name}, a knob that no base declares.{hint}")


def _owner(cls: type, name: str) -> type | None:
  return next((base for base in cls.__mro__ if name in vars(base)), None)


def _class_value(cls: type[Knobs], name: str) -> Any:
  """Returns the current value of a knob in `cls`, converted to the knob's type."""
  owner = _owner(cls, name)
  if owner is None:
    return UNSET
  value = vars(owner)[name]
  if value is UNSET:
    return UNSET
  kind = cls._declared[name][0]
  # A mutable value may have changed since, and must not be shared.
  may_be_converted = issubclass(owner, Knobs) and _is_immutable(value)
  is_converted = may_be_converted and value is owner._converted.get(name, UNSET)
  if is_converted and kind is owner._declared[name][0]:
    return value
  return _convert(kind, value, text=False, given=f"class {cls.__name__}: {name} = {value!r}")


def _is_immutable(value: Any) -> bool:
  if isinstance(value, tuple):
    return all(isinstance(item, _IMMUTABLE) for item in value)
  return isinstance(value, _IMMUTABLE)


def _convert(kind: Any, value: Any, *, text: bool, given: str) -> Any:
  try:
    return knob_types.convert(kind, value, text=text)
  except knob_types.RefusedError as refusal:
    raise UserError(f"{given}: {refusal}") from None


@functools.cache
def _docs(cls: type) -> dict[str, str]:
  """Returns knob -> text of the `#:` comments at its declaration in the source of `cls`."""
  try:
    source = textwrap.dedent(inspect.getsource(cls))
    (body,) = ast.parse(source).body
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
  except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
    return {}
  comments = {
    token.start[0]: (token.string[2:].strip(), token.line.lstrip().startswith("#"))
    for token in tokens
    if token.type == tokenize.COMMENT and token.string.startswith("#:")
  }
  docs = {}
  for node in body.body if isinstance(body, ast.ClassDef) else ():
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
      continue
    first = node.lineno
    while comments.get(first - 1, ("", False))[1]:
      first -= 1
    last = node.end_lineno or node.lineno
    lines = [comments[line][0] for line in range(first, last + 1) if line in comments]
    if lines:
      docs[node.target.id] = " ".join(lines)
  return docs
