# SPDX-License-Identifier: Apache-2.0
"""Keys of Hugging Face's `config.json` for all families: to ignore, or required to have a value."""

from typing import Any

# Origin of the model and how to load it.
_DESCRIPTION = """
  _commit_hash _name_or_path architectures auto_map custom_pipelines dtype finetuning_task id2label
  label2id language model_type name_or_path num_labels problem_type quantization_config
  task_specific_params tokenizer_class torch_dtype transformers_version unsloth_fixed
  unsloth_version
"""
# How a forward pass is computed, or what it returns besides logits.
_COMPUTATION = """
  _attn_implementation _attn_implementation_autoset _attn_implementation_internal
  _experts_implementation _experts_implementation_internal _flash_attn_2_enabled
  attn_implementation cache_implementation chunk_size_feed_forward experts_implementation
  output_attentions output_hidden_states output_router_logits pretraining_tp return_dict torchscript
  use_cache use_return_dict
"""
# Used by training only; experiments have their own knobs for it.
_TRAINING = """
  attention_dropout classifier_dropout gradient_checkpointing hidden_dropout initializer_range
  neftune_noise_alpha use_bfloat16
"""
# Token ids, which are also in the generation configuration and the tokenizer.
_TOKENS = """
  bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id
"""
# Generation settings, which older versions of transformers also saved here.
_GENERATION = """
  assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
  diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
  encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
  forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
  no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
  num_return_sequences output_scores remove_invalid_values repetition_penalty
  return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
"""
NEUTRAL = frozenset(
  f"{_DESCRIPTION} {_COMPUTATION} {_TRAINING} {_TOKENS} {_GENERATION}".split()
)  #: Without effect on logits.

# Keys that change the model, and the value that paxlike implements, or a tuple of such values.
FIXED: dict[str, Any] = {
  "add_cross_attention": False,
  "attention_bias": False,
  "is_decoder": (False, True),  # The models are decoders anyway.
  "is_encoder_decoder": (False, None),
  "mlp_bias": False,
  "partial_rotary_factor": (None, 1.0),
  "tie_encoder_decoder": False,
  "use_bidirectional_attention": (None, False),
  "use_sliding_window": False,
}

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")


def is_one_of(value: Any, wanted: Any) -> bool:
  """Returns whether a value equals `wanted`, or one of a tuple; True is not 1."""
  choices = wanted if isinstance(wanted, tuple) else (wanted,)
  return any(
    value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices
  )


def is_set(value: Any) -> bool:
  """Returns whether a value is set: not null and not an empty mapping or list."""
  return value is not None and value != {} and value != []


def spell(wanted: Any) -> str:
  """Returns the wanted values as text for messages."""
  choices = wanted if isinstance(wanted, tuple) else (wanted,)
  return " or ".join(map(repr, choices))
