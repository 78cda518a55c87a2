# SPDX-License-Identifier: Apache-2.0
"""The program that computes rewards, in a process of its own.

The first line of stdin is the reward, pickled by `pool`, in hexadecimal digits, and is answered by
an empty line. Each later line is JSON, [answer, record], and is answered by a line of JSON:
{"parts": {name: number}} or {"error": text}.
"""

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any


def main():
  """Answers requests until stdin ends."""
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # What a reward prints is no answer.
  requests = os.fdopen(os.dup(0), encoding="utf-8")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # What it starts reads no request.
  reward: Callable[..., Any] = pickle.loads(bytes.fromhex(requests.readline()))
  print(file=answers, flush=True)
  for line in requests:
    try:
      said: dict[str, Any] = {"parts": parts_of(reward(*json.loads(line)))}
    except BaseException as error:  # A reward can fail in any way.
      said = {"error": _summary(error)}
    print(json.dumps(said), file=answers, flush=True)


def parts_of(value: Any) -> dict[str, float]:
  """Returns the named parts of what a reward returned; that of a single number is "reward".

  Raises:
    ValueError: It is neither a finite number nor a mapping of names to such numbers.
  """
  parts = value if isinstance(value, Mapping) else {"reward": value}
  try:
    found = {str(name): float(part) for name, part in parts.items()}
  except (TypeError, ValueError):
    found = {}
  if not found or not all(map(math.isfinite, found.values())):
    raise ValueError(f"a reward must be a finite number or a mapping to such, not {value!r:.100}")
  return found


def _summary(error: BaseException) -> str:
  from paxlike import user_code

  where = user_code.line_of(error, entry=False)
  return f"{f'{where}: ' if where else ''}{user_code.summary(error)}"


if __name__ == "__main__":
  main()
