# SPDX-License-Identifier: Apache-2.0
"""A configuration is read as transformers reads it, or refused by the name of a key."""

import pytest

from paxlike.checkpoints.hf_layers import LayerKinds
from paxlike.errors import UserError
from paxlike.experiments.deepseek import DeepSeek
from paxlike.experiments.deepseek_v32 import DeepSeekSparse
from paxlike.experiments.falcon import FalconH1
from paxlike.experiments.gemma import Gemma2, Gemma3
from paxlike.experiments.gemma4 import Gemma4
from paxlike.experiments.glm import GlmMoe
from paxlike.experiments.gpt import Gpt
from paxlike.experiments.gpt_oss import GptOss
from paxlike.experiments.granite import Granite3, Granite4
from paxlike.experiments.llama import Llama
from paxlike.experiments.llama4 import Llama4
from paxlike.experiments.mistral import Ministral3, Mistral, Mixtral
from paxlike.experiments.nemotron import NemotronH
from paxlike.experiments.olmo import Olmo3
from paxlike.experiments.phi import Phi3
from paxlike.experiments.qwen import Qwen3, Qwen3Moe
from paxlike.experiments.smollm import SmolLM3

FAMILIES = [
  *(
    DeepSeek,
    DeepSeekSparse,
    FalconH1,
    Gemma2,
    Gemma3,
    Gemma4,
    GlmMoe,
    Gpt,
    GptOss,
    Granite3,
    Granite4,
  ),
  *(Llama, Llama4, Ministral3, Mistral, Mixtral, NemotronH, Olmo3, Phi3, Qwen3, Qwen3Moe, SmolLM3),
]
# Of two layers, both kinds of Gemma 4.
LAYERS_OF_GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS_OF_GEMMA4 = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
TIED = "tie_word_embeddings"
LENGTH = "original_max_position_embeddings"
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def read(experiment, **changed):
  """Reads what `experiment` writes of itself, changed; ... is left out."""
  family = experiment.hugging_face()
  sizes = {name: 8 for name, knob in family.knobs.items() if knob.endswith(("DIMS", "SIZE"))}
  given = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_attention_heads": 4,
    "n_head": 4,
    "mamba_d_head": 4,
    "mamba_n_heads": 4,
    **sizes,
  }
  fixed = {k: v[0] if isinstance(v, tuple) else v for k, v in family.fixed.items()}
  config = {k: v for k, v in given.items() if k in family.knobs} | fixed
  if type(family.layers) is LayerKinds:
    config["layer_types"] = ["mamba", "attention"]
  config |= changed
  return family.read({key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize(
  ("experiment", "changed", "knob", "value"),
  [
    (Llama, {}, "NORM_EPSILON", 1e-6),
    (Llama, {"hidden_act": "swish"}, "ROPE_FACTOR", None),
    (Gpt, {"activation_function": "gelu_pytorch_tanh"}, "HIDDEN_DIMS", 8),
    (Gemma3, {"hidden_activation": "gelu_new"}, "WINDOW", 4096),
    (Gemma3, {"attn_logit_softcapping": ...}, "WINDOW", 4096),
    # Null is not absent.
    (Mistral, {}, "WINDOW", 4096),
    (Mistral, {"sliding_window": None}, "WINDOW", None),
    (Mixtral, {}, "WINDOW", None),
    (Gemma2, {}, "ATTENTION_SOFT_CAP", 50.0),
    (Gemma2, {"attn_logit_softcapping": None}, "ATTENTION_SOFT_CAP", None),
    (Qwen3Moe, {"num_local_experts": 16}, "NUM_EXPERTS", 16),
    # Rotary positions, as transformers 4 and 5 write them.
    (Llama, {"rope_theta": 500.0}, "ROPE_THETA", 500.0),
    (Llama, {"rope_parameters": {"rope_theta": 500.0}}, "ROPE_THETA", 500.0),
    (Llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "ROPE_FACTOR", 2.0),
    (Llama, {"rope_parameters": YARN}, "ROPE_SCALING", "yarn"),
    (Llama, {"rope_scaling": {**YARN, "beta_fast": 32}}, "ROPE_ORIGINAL_LENGTH", 32),
    (Gemma3, {"rope_local_base_freq": 5.0}, "LOCAL_ROPE_THETA", 5.0),
    (Gemma3, {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, "ROPE_THETA", 1e6),
    (GptOss, {}, "ROPE_FACTOR", 32.0),
    (GptOss, {"rope_scaling": {}}, "ROPE_FACTOR", 32.0),
    (GptOss, {"rope_parameters": None}, "ROPE_FACTOR", 32.0),
    (GptOss, {"rope_parameters": {}}, "ROPE_FACTOR", None),
    (GptOss, {"rope_parameters": {}}, "ROPE_THETA", 150_000.0),
    (Llama, {"rope_parameters": {}, "rope_scaling": YARN}, "ROPE_SCALING", "yarn"),
    (Olmo3, {"rope_scaling": {**YARN, "attention_factor": 1.1386294361119891}}, "ROPE_FACTOR", 4.0),
    (Ministral3, {}, "POSITION_SCALE_BETA", 0.1),
    (Granite3, {}, "ATTENTION_SCALE", 1.0),
    (Phi3, {"rope_scaling": LONGROPE}, "ROPE_LONG_FACTORS", [2.0]),
    (Phi3, {"rope_scaling": LONGROPE | {"type": "su"}}, "ROPE_ORIGINAL_LENGTH", 4096),
    (Phi3, {"rope_scaling": LONGROPE, LENGTH: 16}, "ROPE_FACTOR", 4.0),
    (Phi3, {"rope_scaling": LONGROPE | {"factor": 2.0}, LENGTH: 16}, "ROPE_FACTOR", 2.0),
    (SmolLM3, {"no_rope_layers": [1, 1], "no_rope_layer_interval": ...}, "ROPE_THETA", 2e6),
    (DeepSeek, {"q_lora_rank": None}, "QUERY_LATENT_DIMS", None),
    (DeepSeekSparse, {"mlp_layer_types": ["dense"] * 2}, "INDEX_TOP_K", 2048),
    (GlmMoe, {}, "ROPE_SHARE", 0.5),
    (GlmMoe, {"partial_rotary_factor": 0.25}, "ROPE_SHARE", 0.25),
    (GlmMoe, {"rope_parameters": {"partial_rotary_factor": 1.0}}, "ROPE_SHARE", 1.0),
    (Gemma4, {"rope_parameters": None}, "ROPE_SHARE", 0.25),
    (Gemma4, {"num_global_key_value_heads": 2}, "NUM_GLOBAL_KV_HEADS", None),  # Without k = v.
    (Gemma4, {**LAYERS_OF_GEMMA4, "per_layer_config": {"1": {"head_dim": 9}}}, "NUM_LAYERS", 2),
    (Gemma4, LAYERS_OF_GEMMA4, "GLOBAL_EVERY", 2),
    (Gemma4, {"num_kv_shared_layers": 1}, "NUM_KV_LAYERS", 1),
    (Gemma4, {"hidden_size_per_layer_input": ...}, "PER_LAYER_DIMS", 256),
    (Gemma4, {"hidden_size_per_layer_input": None}, "PER_LAYER_DIMS", 0),
    (Gemma4, {**EXPERTS_OF_GEMMA4, "enable_moe_block": True}, "EXPERT_DIMS", 12),
    (Gemma4, EXPERTS_OF_GEMMA4, "NUM_EXPERTS", 0),  # There is no block of experts.
    (Llama4, {"moe_layers": [1]}, "EXPERT_EVERY", 2),
    (Llama4, {"no_rope_layers": [1, 0]}, "GLOBAL_EVERY", 2),
    (Llama4, {"attn_temperature_tuning": 4}, "USE_LONG_CONTEXT_SCALE", True),
    (Granite4, {"position_embedding_type": None, "mamba_expand": 2}, "USE_ROPE", False),
    (Granite4, {"layer_types": ["linear_attention"]}, "LAYER_TYPES", ("mamba",)),
    (
      NemotronH,
      {"layer_types": ..., "hybrid_override_pattern": "M*-E", "rope_theta": 1e4},
      "LAYER_TYPES",
      ("mamba", "attention", "mlp", "moe"),
    ),
    (FalconH1, {"mamba_d_ssm": 16}, "MLP_MULTIPLIERS", (1.0, 1.0)),
    # What is without effect.
    (Llama, {"_name_or_path": "x", "temperature": 0.5, "mystery": None}, "NUM_LAYERS", 2),
    (Gemma3, {"sliding_window_pattern": 6}, "NUM_LAYERS", 2),
  ],
)
def test_what_is_said_is_read(experiment, changed, knob, value):
  assert read(experiment, **changed)[knob] == value


@pytest.mark.parametrize(
  ("experiment", "changed", "reason"),
  [
    (Llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu' or 'swish'"),
    (Llama, {"hidden_size": ...}, "a llama model lacks hidden_size"),
    (Llama, {"hidden_size": None}, "hidden_size is null"),
    (Llama, {"mystery": 1}, "mystery=1 is unknown to paxlike"),
    (Llama, {"mlp_bias": True}, "mlp_bias is True, not False"),
    (Llama, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    (Llama, {"rope_scaling": {**YARN, "beta_fast": 8}}, "beta_fast of rope_parameters is 8"),
    (Llama, {"rope_scaling": {**YARN, "mystery": 8}}, "mystery=8 of rope_parameters"),
    (
      Llama,
      {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1.0}},
      "contradict each",
    ),
    (Qwen3, {"use_sliding_window": True}, "use_sliding_window is True"),
    (Qwen3, {"layer_types": ["sliding_attention"] * 2}, "layer_types is"),
    (Gemma3, {"sliding_window_pattern": 2}, "sliding_window_pattern is 2, not 6"),
    (Gemma3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (Gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (Gemma3, {"rope_parameters": {"sliding_attention": YARN}}, "yarn of local layers"),
    (Gemma3, {"rope_parameters": YARN}, "an unknown kind of attention"),
    (Llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, not None or 1.0"),
    (Gemma4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2, of 2 layers"),
    (Gemma4, {"enable_moe_block": True}, "enable_moe_block is True; by other keys it is False"),
    (Gemma4, {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input is 7; by other keys"),
    (Gemma4, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    (Gemma4, {**LAYERS_OF_GEMMA4, "per_layer_config": {"0": {"head_dim": 9}}}, "per_layer_config"),
    (Gemma4, {"rope_parameters": YARN}, "rope_parameters is"),
    (Llama4, {"moe_layers": [0]}, "moe_layers=[0]: these layers are not at an interval"),
    (Llama4, {"no_rope_layers": [1, 1]}, "no_rope_layers=[1, 1]"),
    (Llama4, {"layer_types": ["full_attention"] * 2}, "layer_types is"),
    (Llama4, {"num_experts_per_tok": 2}, "num_experts_per_tok is 2, not 1"),
    # Absent, these mean another model than ours.
    (Qwen3Moe, {"norm_topk_prob": ...}, "norm_topk_prob is False (its default), not True"),
    (Ministral3, {"rope_parameters": {**YARN, **MSCALE}}, "rope_parameters lacks llama_4_scaling"),
    (Phi3, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "lacks long_factor"),
    (Phi3, {"rope_scaling": LONGROPE | {LENGTH: 8}, LENGTH: 16}, "=16 and 8 of rope_parameters"),
    (Phi3, {"rope_scaling": LONGROPE | {"attention_factor": 3.0}}, "attention_factor of rope_par"),
    (Phi3, {"rope_scaling": LONGROPE, LENGTH: "x"}, f"{LENGTH} is 'x', not a number"),
    (Phi3, {"rope_scaling": LONGROPE | {"mystery": 1}}, "mystery=1 of rope_parameters is unknown"),
    (Phi3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "paxlike supports default, longr"),
    (SmolLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]: paxlike does not support it"),
    (Olmo3, {"rope_theta": 5.0}, "rope_theta is 5.0, but 500000.0 in layers of sliding attention"),
    (Olmo3, {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor of"),
    (GptOss, {"rope_scaling": YARN}, "truncate of rope_parameters is absent, not False"),
    (DeepSeek, {"rope_scaling": YARN}, "mscale of rope_parameters is absent, not 1.0"),
    (DeepSeekSparse, {"q_lora_rank": None}, "q_lora_rank is null"),
    (DeepSeekSparse, {"mlp_layer_types": ["sparse"] * 2}, "mlp_layer_types is ['sparse', 'sparse'"),
    (FalconH1, {"mamba_norm_before_gate": ...}, "mamba_norm_before_gate is True (its default)"),
    (FalconH1, {"mamba_d_ssm": 32}, "mamba_d_ssm is 32; by other keys it is 16"),
    (Granite4, {"mamba_expand": 4}, "mamba_expand is 4; by other keys it is 2"),
    (Granite4, {"position_embedding_type": "alibi"}, "is 'alibi', not 'nope' or 'rope' or None"),
    (Granite4, {"layer_types": ["mamba", "moe"]}, "layer_types has 'moe'; paxlike knows mamba"),
    (Granite4, {"num_hidden_layers": 3}, "num_hidden_layers is 3, but layer_types has 2 layers"),
    (NemotronH, {"layer_types": ...}, "lacks hybrid_override_pattern"),
    (NemotronH, {"hybrid_override_pattern": "MM"}, "contradict each other"),
    (NemotronH, {"moe_latent_size": 64}, "moe_latent_size is 64, not None"),
    (DeepSeek, {"head_dim": 32, "qk_rope_head_dim": 8}, "head_dim=32 is not qk_rope_head_dim=8"),
  ],
)
def test_what_would_be_another_model_is_refused(experiment, changed, reason):
  with pytest.raises(UserError) as refusal:
    read(experiment, **changed)
  assert reason in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("experiment", FAMILIES)
def test_the_templates_of_rules_are_names_of_tensors(experiment):
  """Not of weights, and not empty."""
  for rule in experiment.hugging_face().rules.values():
    assert all(rule.templates)
    assert not any(name.startswith("stack.") for name in rule.templates)


@pytest.mark.parametrize("experiment", FAMILIES)
def test_what_is_written_is_read_again(experiment):
  values = read(experiment) | {"ROPE_ORIGINAL_LENGTH": 64}
  values.setdefault("ROPE_SCALING", "yarn")
  written = experiment.hugging_face().write(values, dtype="float32")
  again = experiment.hugging_face().read(written)
  assert again == {knob: value for knob, value in values.items() if knob in again}


@pytest.mark.parametrize(
  ("experiment", "outer", "inner", "tied"),
  [
    (Gemma3, {}, {}, True),
    (Gemma3, {TIED: False}, {}, None),
    (Mistral, {}, {}, False),
    (Mistral, {TIED: True}, {}, True),
    (Mistral, {}, {TIED: True}, True),
    (Mistral, {TIED: True}, {TIED: False}, None),
  ],
)
def test_a_model_with_images_has_its_head_tied_in_one_way(experiment, outer, inner, tied):
  family = experiment.hugging_face()
  text, config = family.wrapper.text, outer | {"text_config": inner}
  if tied is None:
    with pytest.raises(UserError, match="tie_word_embeddings differs in text_config"):
      text(config)
  else:
    assert text(config).get(TIED, family.defaults[TIED]) is tied
