# SPDX-License-Identifier: Apache-2.0
from typing import Any

import fiddle as fdl
import pytest

from paxlike import registry
from paxlike.layers import flops
from paxlike.layers.module import Definition


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
  ("name", "causal", "full"),
  [
    ("Synthetic126M", 0.8547e9, 0.9679e9),
    ("Synthetic5B", 31.44e9, 32.64e9),
    ("Synthetic175B", 1061.9e9, 1076.4e9),
  ],
)
def test_published_gflops_a_token(name, causal, full, scan):
  graph = registry.find(name)(USE_REPEATED_LAYER=scan).trainer()
  model: Any = fdl.build(graph.model)
  counted = flops.per_token(Definition(model), 2048)
  assert counted.causal == pytest.approx(causal, rel=2e-4)
  assert counted.full == pytest.approx(full, rel=2e-4)


@pytest.mark.parametrize(
  ("name", "active"),
  [
    ("LLaMA7B", 6_738_415_616),
    ("Mixtral8x7B", 12_879_925_248),
    # Published as 3.61 billion, which leaves out the 579,133,440 of the embedding's table.
    ("GptOss20B", 4_187_440_704),
  ],
)
@pytest.mark.parametrize("scan", [False, True])
def test_of_experts_only_the_chosen_are_active(name, active, scan):
  graph = registry.find(name)(USE_REPEATED_LAYER=scan).trainer()
  assert flops.active_params(fdl.build(graph).definition) == active
