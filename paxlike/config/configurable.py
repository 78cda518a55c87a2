# SPDX-License-Identifier: Apache-2.0
"""`@configurable` marks a class or function that config files may name."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

_BY_NAME: dict[str, Any] = {}
_NAMES: dict[Any, str] = {}
_Value = TypeVar("_Value", bound=Any)


@overload
def configurable(value: _Value) -> _Value: ...
@overload
def configurable(*, name: str) -> Callable[[_Value], _Value]: ...
def configurable(value: Any = None, *, name: str | None = None) -> Any:
  """Lets config files name a class or function of this package, or the members of an enum.

  Config files are untrusted. A marked callable must be harmless for any arguments: it may compute
  and read files whose paths it is given; it must not write files, import modules that an argument
  names, or start processes other than this package's.

  The public name, such as "paxlike.layers:Linear", is the folder below `paxlike` and the name of
  the class or function, so modules can move within their folder. When a public name changes, the
  old one is added to `old_names`.

  Args:
    value: The class or function.
    name: The name after the colon, if not that of `value`.
  """
  if value is None:
    return lambda value: _marked(value, name)
  return _marked(value, name)


def _marked(value: Any, name: str | None) -> Any:
  module = value.__module__
  if module.startswith("paxlike."):
    module = ".".join(module.split(".")[:2])
  public = f"{module}:{name or value.__qualname__}"
  members: Mapping[str, Any] = getattr(value, "__members__", {})  # Of an enum.
  for key, named in {public: value, **{f"{public}.{k}": v for k, v in members.items()}}.items():
    if key in _BY_NAME and _BY_NAME[key].__module__ != named.__module__:
      raise ValueError(f"the public name {key} is used twice: set another `name`.")
    _BY_NAME[key] = named
    _NAMES[named] = key
  return value


def names() -> frozenset[str]:
  """Returns the public names in all imported modules."""
  return frozenset(_BY_NAME)


def name_of(value: Any) -> str | None:
  """Returns the public name of a marked value, None for any other."""
  try:
    return _NAMES.get(value)
  except TypeError:  # Unhashable.
    return None


def find(name: str) -> Any:
  """Returns the value of a public name, None if there is none."""
  return _BY_NAME.get(name)
