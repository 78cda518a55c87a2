# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes does with the commands of pods."""

import re


def expanded(command: str, variables: dict[str, str] | None = None) -> str:
  """Returns a pod's command as its container gets it.

  `$(NAME)` is the value of a variable of the container, or itself without one; `$$` is `$`.
  """
  known = variables or {}

  def value(match: re.Match[str]) -> str:
    return "$" if match[0] == "$$" else known.get(match[1], match[0])

  return re.sub(r"\$\$|\$\(([^)]*)\)", value, command)
