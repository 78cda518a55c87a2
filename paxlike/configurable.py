# SPDX-License-Identifier: Apache-2.0
"""Marks what a config file may name: `@configurable` on the definition of a class or function."""

from collections.abc import Mapping
from typing import Any, TypeVar

_NAMES: set[str] = set()
_Value = TypeVar("_Value", bound=Any)


def configurable(value: _Value) -> _Value:
  """Lets config files name a class or function of this package, or the members of an enum.

  A config file may come from anybody. A marked callable must be harmless for any arguments: it
  computes, or reads files whose paths it is given; it writes no file and imports no module that an
  argument names, and starts no process but one that runs this package.
  """
  name = f"{value.__module__}:{value.__qualname__}"
  _NAMES.add(name)
  members: Mapping[str, Any] = getattr(value, "__members__", {})  # Of an enum.
  _NAMES.update(f"{name}.{member}" for member in members)
  return value


def names() -> frozenset[str]:
  """Returns "module:qualified.name" of what is marked in the modules that are imported."""
  return frozenset(_NAMES)
