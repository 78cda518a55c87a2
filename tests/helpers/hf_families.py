# SPDX-License-Identifier: Apache-2.0
"""Configurations of a tiny model of Hugging Face for every family."""

from typing import Any

COMMON = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 64,
  "pad_token_id": 0,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 16,
  "rope_theta": 10_000.0,
}
DEEPSEEK_YARN = {
  **YARN,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
}
LONGROPE = {
  "rope_type": "longrope",
  "short_factor": [1.0, 1.1, 1.2],
  "long_factor": [1.5, 2.0, 4.0],
  "rope_theta": 10_000.0,
}
GEMMA4_LARGE = {
  "sliding_window": 6,
  "global_head_dim": 32,
  "num_global_key_value_heads": 1,
  "attention_k_eq_v": True,
  "hidden_size_per_layer_input": 0,
}
GRANITE = {
  "embedding_multiplier": 3.0,
  "residual_multiplier": 0.5,
  "attention_multiplier": 0.1,
  "logits_scaling": 2.0,
}
LLAMA3_SCALING = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2}
FALCON_MULTIPLIERS = {
  "embedding_multiplier": 3.0,
  "lm_head_multiplier": 0.5,
  "mlp_multipliers": [0.9, 0.6],
  "key_multiplier": 0.4,
  "attention_out_multiplier": 0.9,
  "attention_in_multiplier": 1.1,
  "ssm_multipliers": [0.7, 0.6, 0.5, 0.8, 1.2],
  "ssm_in_multiplier": 1.25,
  "ssm_out_multiplier": 0.3,
}
QWEN_LINEAR = {
  "num_hidden_layers": 5,
  "linear_key_head_dim": 8,
  "linear_value_head_dim": 12,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN_ALL_EXPERTS = {**QWEN_EXPERTS, "shared_expert_intermediate_size": 20}
DEEPSEEK_EXPERTS = {
  "moe_intermediate_size": 24,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "num_mtp_layers": 0,
}
DEEPSEEK = {
  **DEEPSEEK_EXPERTS,
  "first_k_dense_replace": 1,
  "qk_nope_head_dim": 16,
  "head_dim": 8,  # transformers derives its rotary waves from it.
  "num_key_value_heads": 4,
  "qk_rope_head_dim": 8,
  "v_head_dim": 16,
  "kv_lora_rank": 20,
  "q_lora_rank": 24,
  "n_group": 1,
  "topk_group": 1,
}
# The tower of a model with images, of which the text is taken.
VISION = {
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 16,
  "patch_size": 8,
}
# Name -> (configuration class of transformers, what differs from COMMON). Windows are shorter than
# the texts that they are tried on.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
  "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
  "llama": ("LlamaConfig", {}),
  "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
  "llama_one_head_each": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 8}),
  "llama31": (
    "LlamaConfig",
    {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500_000.0}},
  ),
  "llama_with_biases": (
    "LlamaConfig",
    {
      "attention_bias": True,
      "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    },
  ),
  "qwen2": ("Qwen2Config", {"head_dim": 8}),
  "qwen2_tied": ("Qwen2Config", {"head_dim": 8, "tie_word_embeddings": True}),
  "mistral": ("MistralConfig", {"sliding_window": 6}),
  "mistral_without_window": ("MistralConfig", {"sliding_window": None}),
  "ministral3": (
    "Ministral3Config",
    {
      "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
  ),
  "gemma": ("GemmaConfig", {"num_key_value_heads": 1}),
  "gemma2": ("Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 24}),
  "gemma3": (
    "Gemma3TextConfig",
    {
      "sliding_window": 6,
      "query_pre_attn_scalar": 24,
      "num_hidden_layers": 8,
      "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
      },
    },
  ),
  "gemma4": (
    "Gemma4TextConfig",
    {**GEMMA4_LARGE, "num_hidden_layers": 8, "final_logit_softcapping": 30.0},
  ),
  "gemma4_unified": (
    "Gemma4UnifiedTextConfig",
    {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
  ),
  "gemma4_moe": (
    "Gemma4TextConfig",
    {
      **GEMMA4_LARGE,
      "layer_types": ["sliding_attention", "full_attention", "full_attention"],
      "enable_moe_block": True,
      "num_experts": 6,
      "top_k_experts": 3,
      "moe_intermediate_size": 24,
    },
  ),
  "gemma4_shared": (
    "Gemma4TextConfig",
    {
      "sliding_window": 6,
      "num_hidden_layers": 6,
      "layer_types": 3 * ["sliding_attention", "full_attention"],
      "global_head_dim": 32,
      "num_kv_shared_layers": 3,
      "use_double_wide_mlp": True,
      "hidden_size_per_layer_input": 8,
      "vocab_size_per_layer_input": 96,
    },
  ),
  "phi3": ("Phi3Config", {"sliding_window": 6}),
  "phi3_long": (
    "Phi3Config",
    {
      "head_dim": 8,
      "original_max_position_embeddings": 16,
      "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
    },
  ),
  "phi3_short": (
    "Phi3Config",
    {
      "head_dim": 8,
      "tie_word_embeddings": True,
      "max_position_embeddings": 32,
      "original_max_position_embeddings": 32,
      "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "factor": 4.0},
    },
  ),
  "granite3": ("GraniteConfig", GRANITE | {"attention_bias": True}),
  "granite3_tied": ("GraniteConfig", GRANITE | {"tie_word_embeddings": True}),
  "olmo2": ("Olmo2Config", {}),
  "olmo3": (
    "Olmo3Config",
    {
      "sliding_window": 6,
      "num_hidden_layers": 6,
      "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
      },
    },
  ),
  "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5}),
  "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
  "qwen3_moe": ("Qwen3MoeConfig", {**QWEN_EXPERTS, "norm_topk_prob": True}),
  "deepseek_v3": (
    "DeepseekV3Config",
    {
      **DEEPSEEK,
      "v_head_dim": 12,
      "n_group": 4,
      "topk_group": 2,
      "rope_parameters": DEEPSEEK_YARN,
    },
  ),
  "deepseek_v32": (
    "DeepseekV32Config",
    {
      **DEEPSEEK,
      "n_group": 4,
      "topk_group": 2,
      "index_n_heads": 16,  # Of few heads, scores are equal at 0, and torch selects any of them.
      "index_head_dim": 12,
      "index_topk": 6,
      "rope_parameters": DEEPSEEK_YARN,
    },
  ),
  "deepseek_v3_without_yarn": (
    "DeepseekV3Config",
    {**DEEPSEEK, "first_k_dense_replace": 2, "n_shared_experts": 2},
  ),
  "deepseek_v3_without_query_latent": (
    "DeepseekV3Config",
    {**DEEPSEEK, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2},
  ),
  "kimi_k2": (
    "DeepseekV3Config",
    {
      **DEEPSEEK,
      "max_position_embeddings": 2048,
      "rope_parameters": {
        **DEEPSEEK_YARN,
        "rope_theta": 50.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 1.0,
      },
    },
  ),
  "glm4_moe": (
    "Glm4MoeConfig",
    {
      **DEEPSEEK_EXPERTS,
      "attention_bias": True,
      "use_qk_norm": True,
      "routed_scaling_factor": 2.5,
    },
  ),
  "glm4_moe_without_norms": (
    "Glm4MoeConfig",
    {
      **DEEPSEEK_EXPERTS,
      "n_group": 4,
      "topk_group": 2,
      "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
    },
  ),
  "llama4": (
    "Llama4TextConfig",
    {
      "intermediate_size_mlp": 40,
      "num_hidden_layers": 5,
      "num_local_experts": 4,
      "interleave_moe_layer_step": 2,
      "attention_chunk_size": 6,
      "floor_scale": 4,
      "attn_scale": 0.5,
      "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 50.0, "high_freq_factor": 1.0},
    },
  ),
  "llama4_without_norms": (
    "Llama4TextConfig",
    {
      "intermediate_size_mlp": 40,
      "num_hidden_layers": 4,
      "num_local_experts": 4,
      "no_rope_layer_interval": 2,
      "use_qk_norm": False,
      "attn_temperature_tuning": False,
      "attention_chunk_size": None,
    },
  ),
  "gpt_oss": (
    "GptOssConfig",
    {
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "sliding_window": 6,
      "intermediate_size": 64,
      "rope_parameters": {
        **YARN,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "rope_theta": 150_000.0,
      },
    },
  ),
  "granite4_dense": (
    "GraniteMoeHybridConfig",
    {
      **MAMBA,
      "layer_types": ["mamba", "attention", "mamba"],
      "num_local_experts": 0,
      "num_experts_per_tok": 0,
      "shared_intermediate_size": 48,
      "embedding_multiplier": 12.0,
      "residual_multiplier": 0.22,
      "attention_multiplier": 0.3,
      "logits_scaling": 2.0,
      "position_embedding_type": "nope",
    },
  ),
  "granite4": (
    "GraniteMoeHybridConfig",
    {
      **MAMBA,
      "mamba_n_groups": 1,
      "mamba_conv_bias": False,
      "layer_types": ["mamba", "attention", "mamba"],
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "intermediate_size": 24,
      "shared_intermediate_size": 40,
      "attention_multiplier": 0.3,
      "logits_scaling": 2.0,
      "tie_word_embeddings": True,
      "position_embedding_type": "rope",
      "attention_bias": True,
    },
  ),
  "nemotron_h": (
    "NemotronHConfig",
    {
      "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
      "mamba_num_heads": 8,
      "mamba_head_dim": 8,
      "n_groups": 2,
      "ssm_state_size": 6,
      "time_step_min": 0.5,
      "n_routed_experts": 4,
      "num_experts_per_tok": 2,
      "moe_intermediate_size": 24,
      "moe_shared_expert_intermediate_size": 40,
      "routed_scaling_factor": 2.5,
    },
  ),
  "falcon_h1": (
    "FalconH1Config",
    {
      **MAMBA,
      **FALCON_MULTIPLIERS,
      "mamba_d_ssm": 64,
      "mamba_norm_before_gate": False,
      "mamba_rms_norm": True,
    },
  ),
  "falcon_h1_tied": (
    "FalconH1Config",
    {
      **MAMBA,
      "mamba_d_ssm": 64,
      "mamba_norm_before_gate": False,
      "lm_head_multiplier": 0.5,
      "tie_word_embeddings": True,
    },
  ),
  "qwen3_next": ("Qwen3NextConfig", {**QWEN_LINEAR, **QWEN_ALL_EXPERTS}),
  "qwen3_5": ("Qwen3_5TextConfig", {**QWEN_LINEAR, "tie_word_embeddings": True}),
  "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**QWEN_LINEAR, **QWEN_ALL_EXPERTS}),
  "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
  "qwen3_with_biases": ("Qwen3Config", {"attention_bias": True, "rope_parameters": YARN}),
}
