# SPDX-License-Identifier: Apache-2.0
"""A family is known by its configuration; what is absent counts as transformers has it."""

import pytest

from paxlike.experiments.deepseek import DeepSeek
from paxlike.experiments.gpt_oss import GptOss
from paxlike.experiments.llama import Llama
from paxlike.experiments.qwen import Qwen3Moe


def config(family, **changed):
  """What `family` writes with fixed keys only, changed; None is left out."""
  made = {"model_type": family.model_type} | {k: v for k, v in family.fixed.items() if "." not in k}
  return {key: value for key, value in (made | changed).items() if value is not None}


@pytest.mark.parametrize(
  ("experiment", "changed", "reason"),
  [
    (Llama, {}, ""),
    (Llama, {"model_type": "gpt2"}, "model_type is gpt2"),
    (Llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
    (Llama, {"hidden_act": None}, ""),
    (Llama, {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is dynamic"),
    # Absent, these mean another model than ours.
    (Qwen3Moe, {}, ""),
    (Qwen3Moe, {"norm_topk_prob": None}, "norm_topk_prob is False, not True"),
    (
      GptOss,
      {"rope_scaling": {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}},
      "rope_scaling.truncate is True, not False",
    ),
    (DeepSeek, {}, ""),
    (
      DeepSeek,
      {"rope_scaling": {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}},
      "rope_scaling.mscale is 0.0, not 1.0",
    ),
  ],
)
def test_what_is_absent_counts_as_transformers_has_it(experiment, changed, reason):
  family = experiment.hugging_face()
  assert family.mismatch(config(family, **changed)) == reason
