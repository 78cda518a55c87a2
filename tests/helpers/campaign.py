# SPDX-License-Identifier: Apache-2.0
"""Campaigns of odd inputs: short and always the same in `make test`, long and new in `make fuzz`.

@campaign.of(strategies.text(), examples=50)
def test_whatever_is_typed(text): ...
"""

import collections
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

# Inputs that `make fuzz` gives each campaign; 0: as part of the other tests.
EXAMPLES = int(os.environ.get("PAXLIKE_FUZZ_EXAMPLES") or 0)
# Campaign -> answer -> how many inputs had it.
COUNTS: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def of(inputs: Any, *, examples: int) -> Callable[[Callable[[Any], None]], Any]:
  """Decorates a test of one argument with the strategy of its inputs.

  Args:
    inputs: A strategy of hypothesis.
    examples: How many inputs are tried as part of the other tests.
  """
  settings = hypothesis.settings(
    max_examples=EXAMPLES or examples,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=(
      hypothesis.HealthCheck.too_slow,
      hypothesis.HealthCheck.data_too_large,
    ),
  )

  def decorate(test: Callable[[Any], None]) -> Any:
    tried = settings(hypothesis.given(given=inputs)(test))
    return pytest.mark.slow(pytest.mark.fuzz(tried))

  return decorate
