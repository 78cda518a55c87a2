# SPDX-License-Identifier: Apache-2.0
"""Campaigns of odd inputs: short and always the same in `make test`, long and new in `make fuzz`.

@campaign.of(strategies.text(), examples=50)
def test_whatever_is_typed(text): ...
"""

import collections
import os
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

# Minutes that `make fuzz` gives each campaign; 0: as part of the other tests.
MINUTES = float(os.environ.get("PAXLIKE_FUZZ_MINUTES") or 0)
# Campaign -> answer -> how many inputs had it.
COUNTS: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def of(inputs: Any, *, examples: int) -> Callable[[Callable[[Any], None]], Any]:
  """Decorates a test of one argument with the strategy of its inputs.

  Args:
    inputs: A strategy of hypothesis.
    examples: How many inputs are tried as part of the other tests.
  """

  def decorate(test: Callable[[Any], None]) -> Any:
    ends: list[float] = []

    def within_time(given: Any):
      if MINUTES and not ends:
        ends.append(time.monotonic() + 60 * MINUTES)
      if not ends or time.monotonic() < ends[0]:
        test(given)

    within_time.__name__ = test.__name__
    within_time.__doc__ = test.__doc__
    settings = hypothesis.settings(
      max_examples=int(1e4 * MINUTES) or examples,
      derandomize=not MINUTES,
      database=None,
      deadline=None,
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    return pytest.mark.fuzz(settings(hypothesis.given(given=inputs)(within_time)))

  return decorate
