# SPDX-License-Identifier: Apache-2.0
"""Paths in the values of knobs and arguments, recognized by the annotation `ranges.Path`."""

import os
import typing
from collections.abc import Callable
from typing import Any

from paxlike.config import ranges

(_, _PATH) = typing.get_args(ranges.Path)


def changed(annotation: Any, value: Any, change: Callable[[str], str]) -> Any:
  """Returns a value with `change` applied to every path in it, according to its annotation."""
  if not _holds_paths(annotation):
    return value
  if isinstance(value, dict):
    return {key: changed(annotation, item, change) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(changed(annotation, item, change) for item in value)
  return change(value) if isinstance(value, str) else value


def absolute(path: str) -> str:
  """Returns a path, or a glob, that means the same from every working directory."""
  return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _holds_paths(annotation: Any) -> bool:
  if _PATH in getattr(annotation, "__metadata__", ()):
    return True
  arguments = typing.get_args(annotation)
  if typing.get_origin(annotation) is dict:
    arguments = arguments[1:]  # Keys are names.
  return any(map(_holds_paths, arguments))
