# SPDX-License-Identifier: Apache-2.0
"""Constructors whose `**others` stand for the keyword arguments of the base class."""

import inspect
import typing
from typing import Any

_OTHERS = "others"


def signature(cls: type) -> inspect.Signature:
  """Returns the signature of a class, `**others` replaced by the arguments that it stands for."""
  _, *parameters = inspect.signature(cls.__init__).parameters.values()
  if parameters and parameters[-1].name == _OTHERS:
    own = {one.name for one in parameters}
    inherited = signature(cls.__mro__[1]).parameters.values()
    others = [one for one in inherited if one.kind is one.KEYWORD_ONLY and one.name not in own]
    parameters[-1:] = others
  return inspect.Signature(parameters)


def annotations(cls: type) -> dict[str, Any]:
  """Returns the resolved annotation of each argument of a class, with those of `**others`."""
  found = typing.get_type_hints(cls.__init__, include_extras=True)
  return annotations(cls.__mro__[1]) | found if found.pop(_OTHERS, None) else found
