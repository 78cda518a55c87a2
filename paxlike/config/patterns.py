# SPDX-License-Identifier: Apache-2.0
"""Regular expressions that knobs hold."""

import re

from paxlike.errors import UserError


def check(pattern: str, knob: str):
  """Raises a UserError that names the knob if a pattern is not a regular expression."""
  try:
    re.compile(pattern)
  except re.error as error:
    raise UserError(f"{knob}: {pattern!r} is not a regular expression: {error}.") from None
