# SPDX-License-Identifier: Apache-2.0
"""What `altered_configurations.py` tries: a small model of each family, one of its keys changed."""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from helpers.hf_families import LLAMA3_SCALING, LONGROPE, VISION, YARN
from helpers.hf_models import configuration

ABSENT: Any = ("absent",)
WITH_IMAGES = "gemma3 with images"
# Those of `hf_families` that are altered, and Gemma 3 in its wrapper.
BASES = (
  *("gpt2", "llama", "qwen2", "mistral", "mixtral", "ministral3", "gemma", "gemma2", "gemma3"),
  *(WITH_IMAGES, "gemma4", "gemma4_moe", "gemma4_shared"),
  *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
  *("deepseek_v3", "deepseek_v32", "glm4_moe", "llama4", "gpt_oss", "olmo2", "olmo3", "smollm3"),
  *("phi3", "phi3_long", "granite3", "granite4", "nemotron_h", "falcon_h1"),
)
_ACTIVATIONS = [
  "gelu",
  "gelu_new",
  "gelu_pytorch_tanh",
  "gelu_fast",
  "gelu_accurate",
  "silu",
  "swish",
  "relu",
  "quick_gelu",
]
_ROPES = [
  {"rope_type": "default", "rope_theta": 500.0},
  {"rope_type": "default"},
  {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
  {"type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
  {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
  {**YARN},
  {**YARN, "factor": None},
  {**YARN, "attention_factor": 1.5},
  {**YARN, "beta_fast": 8.0},
  {**YARN, "beta_slow": 2.0},
  {**YARN, "truncate": False},
  {**YARN, "truncate": True, "beta_fast": 32, "beta_slow": 1},
  {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
  {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
  {**YARN, "mscale_all_dim": 1.0},
  {**YARN, "partial_rotary_factor": 0.5},
  {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
  {**LLAMA3_SCALING, "rope_theta": 500_000.0},
  {**LLAMA3_SCALING, "rope_theta": 500_000.0, "low_freq_factor": 2.0},
  {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10_000.0,
  },
  {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10_000.0},
  {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
  {"rope_type": "default", "rope_theta": 10_000.0, "mystery": 3},
  {},
]
_LONG_ROPES = [
  {**LONGROPE, "partial_rotary_factor": 0.75},
  {**LONGROPE, "partial_rotary_factor": 0.75, "factor": 2.0},
  {**LONGROPE, "partial_rotary_factor": 0.75, "attention_factor": 1.5},
  {**LONGROPE, "partial_rotary_factor": 0.75, "type": "su", "rope_type": None},
]
_MORE_ROPES = [*_ROPES, *_LONG_ROPES]
_ROPES_OF = {
  "llama": _ROPES,
  "deepseek_v3": _ROPES,
  "gpt_oss": _ROPES,
  "ministral3": _MORE_ROPES,
  "phi3": _MORE_ROPES,
  "phi3_long": _MORE_ROPES,
}
# Of the same, one of each type, for families that share what reads them.
_SOME_ROPES = [_ROPES[i] for i in (0, 2, 3, 4, 5, 8, 17, 21)]
_FULL, _LOCAL = "full_attention", "sliding_attention"
# Key -> what it is set to; of others the type of the value decides.
_VALUES: dict[str, list[Any]] = {
  "vocab_size": [64, 101],
  "hidden_size": [16, 64],
  "n_embd": [16, 64],
  "intermediate_size": [32],
  "n_inner": [24, 128],
  "moe_intermediate_size": [16],
  "num_hidden_layers": [2, 8],
  "n_layer": [1, 4],
  "num_attention_heads": [2, 8],
  "n_head": [2, 8],
  "num_key_value_heads": [1, 2, 4],
  "head_dim": [8, 32],
  "max_position_embeddings": [32, 128],
  "n_positions": [32, 128],
  "hidden_act": _ACTIVATIONS,
  "hidden_activation": _ACTIVATIONS,
  "activation_function": _ACTIVATIONS,
  "rms_norm_eps": [1e-2, 1e-5],
  "layer_norm_epsilon": [1e-2, 1e-6],
  "rope_theta": [10_000.0, 500.0],
  "rope_parameters": _ROPES,
  "rope_scaling": _SOME_ROPES,
  "sliding_window": [1, 3, 100],
  "layer_types": [[_FULL] * 3, [_LOCAL] * 3, [_FULL, _LOCAL] * 4, [_LOCAL, _FULL] * 4, []],
  "sliding_window_pattern": [1, 2, 3, 6],
  "_sliding_window_pattern": [2, 6],
  "final_logit_softcapping": [1.0, 30.0],
  "attn_logit_softcapping": [0.5, 50.0],
  "query_pre_attn_scalar": [4, 64],
  "use_bidirectional_attention": [True, False, "all", "vision"],
  "per_layer_config": [{}, {"5": {"head_dim": 32}}, {"0": {"head_dim": 32}}],
  "hidden_size_per_layer_input": [8],
  "num_kv_shared_layers": [2],
  "num_global_key_value_heads": [2],
  "global_head_dim": [8],
  "bos_token_id": [5, 2],
  "eos_token_id": [5, [2, 7]],
  "pad_token_id": [5, 3],
  "num_local_experts": [3, 8],
  "num_experts": [3, 8],
  "num_experts_per_tok": [1, 3],
  "n_routed_experts": [4, 16],
  "n_shared_experts": [2],
  "n_group": [1, 2],
  "topk_group": [1, 4],
  "routed_scaling_factor": [1.0, 3.0],
  "first_k_dense_replace": [0, 2, 3],
  "q_lora_rank": [None, 12],
  "kv_lora_rank": [12],
  "qk_rope_head_dim": [4, 16],
  "qk_nope_head_dim": [8],
  "qk_head_dim": [12],
  "index_topk": [4, 1000],
  "index_n_heads": [24],
  "index_head_dim": [8, 16],
  "mlp_layer_types": [["dense"] * 3, ["dense", "sparse", "sparse"], ["sparse"] * 3],
  "v_head_dim": [16],
  "mlp_only_layers": [[1], [0, 1, 2]],
  "decoder_sparse_step": [2, 3],
  "max_window_layers": [0, 1, 28],
  "moe_layers": [[], [0, 1, 2, 3, 4], [1], [0]],
  "no_rope_layers": [
    *([], [1] * 5, [0] * 5, [1, 0, 1, 0, 1], [0, 1, 1, 1, 1]),
    [True, True, True, False, True],
  ],
  "no_rope_layer_interval": [2, 5],
  "interleave_moe_layer_step": [1, 3],
  "attention_chunk_size": [None, 3, 100],
  "original_max_position_embeddings": [8, 24, 32, 4096],
  "swiglu_alpha": [1.0],
  "swiglu_limit": [0.5],
  "router_jitter_noise": [0.5],
  "num_nextn_predict_layers": [1],
  "mamba_n_heads": [4, 16],
  "mamba_num_heads": [4, 16],
  "mamba_d_head": [4, 16, "auto"],
  "mamba_head_dim": [4, 16],
  "mamba_n_groups": [1, 2, 4],
  "n_groups": [1, 4],
  "mamba_d_ssm": [32, 128, None],
  "mamba_expand": [1, 4],
  "time_step_limit": [[0.0, 0.5], [0.7, 100.0], None],
  "time_step_min": [0.1, 2.0],
  "mlp_hidden_act": _ACTIVATIONS,
  "mamba_hidden_act": _ACTIVATIONS,
  "position_embedding_type": ["rope", "nope", "absolute", None],
  "linear_num_key_heads": [1, 4],
  "linear_num_value_heads": [2, 8],
  "id2label": [{"0": "a", "1": "b", "2": "c"}],
  "label2id": [{"a": 0}],
  "architectures": [["SomethingElse"]],
  "problem_type": ["regression"],
  "dtype": ["bfloat16", "float16"],
  "torch_dtype": ["bfloat16"],
  "transformers_version": ["4.30.0"],
  "_name_or_path": ["/somewhere"],
  "initializer_range": [0.05],
  "summary_type": ["mean"],
  "summary_activation": ["tanh"],
  "text_config": [],
  "vision_config": [],
  "model_type": [],
}
# What configurations have beside the keys of the class today: older names, tools' own, and keys
# that nobody knows.
_MORE: dict[str, list[Any]] = {
  "rope_theta": _VALUES["rope_theta"],
  "rope_scaling": _SOME_ROPES,
  "rope_local_base_freq": [500.0],
  "partial_rotary_factor": [0.5, 1.0],
  "original_max_position_embeddings": [16],
  "sliding_window_pattern": _VALUES["sliding_window_pattern"],
  "hidden_activation": _ACTIVATIONS,
  "hidden_act": _ACTIVATIONS,
  "torch_dtype": ["bfloat16"],
  "attention_bias": [True, False],
  "mlp_bias": [True, False],
  "head_dim": [8, 32],
  "num_experts": [3],
  "num_local_experts": [3],
  "use_sliding_window": [True],
  "sliding_window": [3],
  "layer_types": _VALUES["layer_types"],
  "attn_logit_softcapping": [0.5],
  "final_logit_softcapping": [1.0],
  "cache_implementation": ["hybrid"],
  "quantization_config": [{"quant_method": "gptq", "bits": 4}],
  "auto_map": [{"AutoConfig": "configuration_x.XConfig"}],
  "do_sample": [True],
  "temperature": [0.5],
  "unsloth_version": ["2025.1"],
  "per_layer_config": [{"0": {"intermediate_size": 64}}],
  "mystery": [1, None],
}
_HYBRIDS = ("granite4", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5", "qwen3_5_moe")
_MORE_OF_HYBRIDS: dict[str, list[Any]] = {
  **_MORE,
  "hybrid_override_pattern": ["M-*EM", "MM*-E"],
  "full_attention_interval": [2, 4],
  "shared_expert_intermediate_size": [16],
  "attn_layer_indices": [[1]],
  "mamba_use_mlp": [False],
}

# Keys of rotary positions as transformers 4 wrote them: without `rope_parameters`.
_LEGACY = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


class Case(NamedTuple):
  """One altered key; `value` may be `ABSENT`, and `key` "a.b" of the mapping a."""

  family: str
  key: str
  value: Any

  def __str__(self) -> str:
    return f"{self.family}: {self.key} = {'absent' if self.value is ABSENT else self.value}"


@functools.cache
def base(family: str) -> dict[str, Any]:
  """Returns the configuration that is altered, as transformers saves it."""
  import transformers

  if family == WITH_IMAGES:
    text = base("gemma3")
    config = transformers.Gemma3Config(
      text_config=text, vision_config=VISION, mm_tokens_per_image=1
    )
  else:
    config = configuration(family)
  return json.loads(config.to_json_string(use_diff=False))


def cases(family: str) -> Iterator[Case]:
  """Yields the cases of a family: every key of the class, absent, null, and set to others."""
  config = base(family)
  yield Case(family, "", None)
  yield from _cases(family, "", config, _MORE_OF_HYBRIDS if family in _HYBRIDS else _MORE)
  if "text_config" in config:
    yield from _cases(family, "text_config.", config["text_config"], _MORE)
  ropes = config.get("rope_parameters") or {}
  for kind, rope in ropes.items():
    if isinstance(rope, dict):
      for value in [*_SOME_ROPES, {}, None]:
        yield Case(family, f"rope_parameters.{kind}", value)


def _cases(
  family: str, prefix: str, config: Mapping[str, Any], more: Mapping[str, list[Any]]
) -> Iterator[Case]:
  for key, now in config.items():
    if key in ("model_type", "text_config"):
      continue
    others = _VALUES.get(key, _others(now))
    if key == "layer_types" and family in _HYBRIDS:
      others = [*others, *_reordered(now)]
    if key == "rope_parameters":
      others = _ROPES_OF.get(family, _SOME_ROPES)
    for value in [*([] if key in _common() else [ABSENT, None]), *others]:
      if value != now:
        yield Case(family, prefix + key, value)
  for key, values in more.items():
    for value in values if key not in config else ():
      yield Case(family, prefix + key, value)


@functools.cache
def _common() -> frozenset[str]:
  """Returns the keys that every configuration of transformers has."""
  import transformers

  return frozenset(transformers.PretrainedConfig().to_dict())


def _others(now: Any) -> list[Any]:
  if isinstance(now, bool):
    return [not now]
  if isinstance(now, int | float):
    return [now + 1, now * 2 + 0.5] if isinstance(now, float) else [now + 1]
  return [True, 1] if now is None else ["other"] if isinstance(now, str) else _reordered(now)


def _reordered(now: Any) -> list[Any]:
  return [now[::-1], now[:-1]] if isinstance(now, list) else []


def altered(case: Case) -> dict[str, Any]:
  """Returns the configuration of a case."""
  config = json.loads(json.dumps(base(case.family)))
  *outer, last = case.key.split(".")
  place = config
  for part in outer:
    place = place[part]
  if last in _LEGACY and last not in place:
    rope = place.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
      local, rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
      if local != rope["rope_theta"]:
        place["rope_local_base_freq"] = local
    place["rope_theta"] = rope.get("rope_theta", 10_000.0)
    if rope.get("rope_type", "default") != "default":
      place["rope_scaling"] = rope
  if case.value is ABSENT:
    place.pop(last, None)
  elif last:
    place[last] = case.value
  return config
