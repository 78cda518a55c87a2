# SPDX-License-Identifier: Apache-2.0
"""Optimizers make the updates of independent implementations."""

import optimizer_parity
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("comparison", optimizer_parity.COMPARISONS, ids=lambda one: one.optimizer)
def test_updates_are_those_of_another_implementation(comparison):
  assert comparison.difference() < optimizer_parity.TOLERANCE
