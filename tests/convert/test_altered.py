# SPDX-License-Identifier: Apache-2.0
"""A key of a configuration that is altered changes the conversion alike, or is refused.

All cases: `PYTHONPATH=tests python -m helpers.altered_configurations`.
"""

import json

import pytest
from helpers import altered_cases as cases
from helpers import altered_configurations

from paxlike import registry
from paxlike.checkpoints.hf_family import Family

ABSENT = cases.ABSENT

# What was silently another model once, and what is near to it.
SELECTED = [
  ("gpt2", "activation_function", "gelu_pytorch_tanh"),
  ("llama", "attention_bias", True),
  ("llama", "mlp_bias", True),
  ("mistral", "sliding_window", ABSENT),
  ("mistral", "sliding_window", None),
  ("mistral", "layer_types", ["full_attention"] * 3),
  ("mixtral", "rms_norm_eps", ABSENT),
  ("gemma", "hidden_act", "gelu"),
  ("gemma2", "attn_logit_softcapping", ABSENT),
  ("gemma2", "attn_logit_softcapping", None),
  ("gemma3", "sliding_window_pattern", 3),
  ("gemma3", "use_bidirectional_attention", True),
  ("gemma3", "attn_logit_softcapping", 0.5),
  ("gemma3", "rope_parameters.sliding_attention", {"rope_type": "linear", "factor": 4.0}),
  ("gemma3 with images", "text_config.final_logit_softcapping", 1.0),
  ("gemma3 with images", "quantization_config", {"quant_method": "gptq", "bits": 4}),
  ("qwen3", "use_sliding_window", True),
  ("qwen3_moe", "mlp_only_layers", [1]),
  ("deepseek_v3", "topk_group", 1),
  ("deepseek_v3", "q_lora_rank", None),
  ("gpt_oss", "swiglu_limit", 0.5),
  ("gpt_oss", "rope_parameters", None),
  ("gpt_oss", "rope_parameters", {}),
  ("olmo3", "rope_theta", 500.0),
  ("smollm3", "no_rope_layers", [1, 0, 1, 0, 1]),
  ("smollm3", "no_rope_layer_interval", 2),
  ("phi3_long", "original_max_position_embeddings", 32),
  ("granite3", "attention_multiplier", ABSENT),
  ("granite4", "mamba_d_head", "auto"),
  ("nemotron_h", "n_group", 2),
  ("falcon_h1", "mamba_norm_before_gate", ABSENT),
  ("qwen3_next", "full_attention_interval", 2),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Those of transformers.
@pytest.mark.parametrize("case", SELECTED, ids=lambda case: ".".join(map(str, case))[:60])
def test_an_altered_configuration_is_converted_rightly_or_refused(case):
  verdict = altered_configurations.judge(cases.Case(*case))
  assert verdict.kind in ("match", "refused"), verdict


def families() -> dict[str, Family]:
  found = {}
  for cls in registry.registered().values():
    family = cls.hugging_face()
    if family is not None:
      found[family.model_type] = family
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.BASES)
def test_every_key_of_transformers_is_known(name):
  """As transformers writes them: what is said by a new version is not refused as unknown."""
  config = json.loads(json.dumps(cases.base(name)))
  known = families()
  if "text_config" in config:
    wrapper = known[config["text_config"]["model_type"]].wrapper
    assert wrapper is not None
    config = wrapper.text(config)
  assert known[config["model_type"]].read(config)["NUM_LAYERS"] > 2


@pytest.mark.slow
def test_there_are_hundreds_of_cases():
  assert all(sum(1 for _ in cases.cases(name)) > 100 for name in cases.BASES)
  absent = cases.altered(cases.Case("llama", "rms_norm_eps", ABSENT))
  assert "rms_norm_eps" not in absent and "rms_norm_eps" in cases.base("llama")
