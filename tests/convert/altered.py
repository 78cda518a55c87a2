# SPDX-License-Identifier: Apache-2.0
"""Alters a key of a configuration at a time, and compares transformers' model with the conversion.

    PYTHONPATH=.:tests python tests/convert/altered.py [FAMILY ...]

prints the table of docs/trust.md. A case is a tiny model that transformers makes of the altered
configuration. It matches, is refused in one line, or is silently wrong; where transformers itself
has no such model, there is nothing to compare with.
"""

import collections
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

ABSENT: Any = ("absent",)
TOKENS = np.random.default_rng(0).integers(3, 60, (2, 24)).astype(np.int32)
TOLERANCE = 2e-4
_SMALL = {
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
_DEEPSEEK = {
  "first_k_dense_replace": 1,
  "qk_nope_head_dim": 16,
  "head_dim": 8,
  "num_key_value_heads": 4,
  "qk_rope_head_dim": 8,
  "v_head_dim": 12,
  "kv_lora_rank": 20,
  "q_lora_rank": 24,
  "moe_intermediate_size": 24,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "n_group": 4,
  "topk_group": 2,
}
_YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 16,
  "rope_theta": 10_000.0,
}
_GEMMA3 = {"sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}
_VISION = {
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 16,
  "patch_size": 8,
}
# Family -> (configuration class of transformers, what is small or unlike its defaults).
BASES: dict[str, tuple[str, dict[str, Any]]] = {
  "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
  "llama": ("LlamaConfig", {}),
  "mistral": ("MistralConfig", {"sliding_window": 6}),
  "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
  "gemma": ("GemmaConfig", {"num_key_value_heads": 1}),
  "gemma2": ("Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 24}),
  "gemma3": ("Gemma3TextConfig", _GEMMA3),
  "gemma3 with images": (
    "Gemma3Config",
    {"text_config": _SMALL | _GEMMA3, "vision_config": _VISION, "mm_tokens_per_image": 1},
  ),
  "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
  "qwen3_moe": (
    "Qwen3MoeConfig",
    {
      "num_experts": 6,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 24,
      "norm_topk_prob": True,
    },
  ),
  "deepseek_v3": (
    "DeepseekV3Config",
    {
      **_DEEPSEEK,
      "num_mtp_layers": 0,
      "rope_parameters": {
        **_YARN,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
      },
    },
  ),
  "gpt_oss": (
    "GptOssConfig",
    {
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "sliding_window": 6,
      "intermediate_size": 64,
      "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
  ),
}
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
  {**_YARN},
  {**_YARN, "factor": None},
  {**_YARN, "attention_factor": 1.5},
  {**_YARN, "beta_fast": 8.0},
  {**_YARN, "beta_slow": 2.0},
  {**_YARN, "truncate": False},
  {**_YARN, "truncate": True, "beta_fast": 32, "beta_slow": 1},
  {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
  {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
  {**_YARN, "mscale_all_dim": 1.0},
  {**_YARN, "partial_rotary_factor": 0.5},
  {k: v for k, v in _YARN.items() if k != "original_max_position_embeddings"},
  {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500_000.0,
  },
  {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500_000.0,
  },
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
]
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
  "rope_scaling": _ROPES,
  "sliding_window": [1, 3, 100],
  "layer_types": [[_FULL] * 3, [_LOCAL] * 3, [_FULL, _LOCAL] * 4, [_LOCAL, _FULL] * 4, []],
  "sliding_window_pattern": [1, 2, 3, 6],
  "_sliding_window_pattern": [2, 6],
  "final_logit_softcapping": [1.0, 30.0],
  "attn_logit_softcapping": [0.5, 50.0],
  "query_pre_attn_scalar": [4, 64],
  "use_bidirectional_attention": [True, False],
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
  "v_head_dim": [16],
  "mlp_only_layers": [[1], [0, 1, 2]],
  "decoder_sparse_step": [2, 3],
  "max_window_layers": [0, 1, 28],
  "swiglu_alpha": [1.0],
  "swiglu_limit": [0.5],
  "router_jitter_noise": [0.5],
  "num_nextn_predict_layers": [1],
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
  "rope_scaling": _ROPES,
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


# Keys of rotary positions as transformers 4 wrote them: without `rope_parameters`.
_LEGACY = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


class Case(NamedTuple):
  """One altered key; `value` may be `ABSENT`, and `key` "a.b" of the mapping a."""

  family: str
  key: str
  value: Any

  def __str__(self) -> str:
    return f"{self.family}: {self.key} = {'absent' if self.value is ABSENT else self.value}"


class Verdict(NamedTuple):
  """What came of a case.

  Attributes:
    kind: "match", "refused", "wrong", "crash", or "none": transformers has no such model.
    reason: Of a refusal, or how large the error is.
  """

  kind: str
  reason: str = ""


@functools.cache
def base(family: str) -> dict[str, Any]:
  """Returns the configuration that is altered, as transformers saves it."""
  import transformers

  name, options = BASES[family]
  small = {} if "text_config" in options else _SMALL
  config = getattr(transformers, name)(**{**small, **options})
  return json.loads(json.dumps(config.to_dict()))


def cases(family: str) -> Iterator[Case]:
  """Yields the cases of a family: every key of the class, absent, null, and set to others."""
  config = base(family)
  yield Case(family, "", None)
  yield from _cases(family, "", config, _MORE)
  if "text_config" in config:
    yield from _cases(family, "text_config.", config["text_config"], _MORE)
  ropes = config.get("rope_parameters") or {}
  for kind, rope in ropes.items():
    if isinstance(rope, dict):
      for value in [*_ROPES, {}, None]:
        yield Case(family, f"rope_parameters.{kind}", value)


def _cases(
  family: str, prefix: str, config: Mapping[str, Any], more: Mapping[str, list[Any]]
) -> Iterator[Case]:
  for key, now in config.items():
    if key in ("model_type", "text_config"):
      continue
    others = _VALUES.get(key, _others(now))
    for value in [ABSENT, None, *others]:
      if value != now:
        yield Case(family, prefix + key, value)
  for key, values in more.items():
    for value in values if key not in config else ():
      yield Case(family, prefix + key, value)


def _others(now: Any) -> list[Any]:
  if isinstance(now, bool):
    return [not now]
  if isinstance(now, int | float):
    return [now + 1, now * 2 + 0.5] if isinstance(now, float) else [now + 1]
  return [True, 1] if now is None else ["other"] if isinstance(now, str) else []


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
      place["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
      rope = rope["full_attention"]
    place["rope_theta"] = rope.get("rope_theta", 10_000.0)
    if rope.get("rope_type", "default") != "default":
      place["rope_scaling"] = rope
  if case.value is ABSENT:
    place.pop(last, None)
  elif last:
    place[last] = case.value
  return config


def truth(folder: pathlib.Path, config: Mapping[str, Any]) -> np.ndarray | None:
  """Saves transformers' model of a configuration and returns its logits; None: there is none."""
  import torch
  import transformers

  path = folder / "config.json"
  path.write_text(json.dumps(config))
  torch.manual_seed(0)
  try:
    made = transformers.AutoConfig.from_pretrained(folder)
    made._attn_implementation = "eager"
    for part in (made, getattr(made, "text_config", None)):
      if part is not None:
        part.dtype = torch.float32
        part.return_dict = True
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval().float()
    with torch.no_grad():
      for parameter in model.parameters():
        # As drawn, norms are all the same and biases are nothing.
        parameter.add_(0.1 * torch.randn_like(parameter))
      logits = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model.save_pretrained(folder)
  except Exception:
    return None
  path.write_text(json.dumps(config))
  return logits if np.isfinite(logits).all() else None


@functools.cache
def _forward(text: str) -> Any:
  """Returns the definition and compiled forward pass of a graph's text."""
  import fiddle as fdl
  import jax

  from paxlike import config_file, fiddlers
  from paxlike.layers.decoder import forward
  from paxlike.layers.module import Definition

  model: Any = config_file.load(text)
  fiddlers.precision(model, "float32")
  definition = Definition(cast(Any, fdl.build(model)))
  return jax.jit(functools.partial(forward, definition))


def conversion(folder: pathlib.Path) -> np.ndarray:
  """Returns the logits of the converted model.

  Raises:
    UserError: It is refused.
  """
  from paxlike import config_file
  from paxlike.convert.importing import Source

  source = Source.hugging_face(folder)
  params = {
    name.removeprefix("params."): np.asarray(value, np.float32) for name, value in source._weights()
  }
  run = _forward(config_file.dump(source._with_data(None).trainer().model))
  return np.asarray(run(params, {"inputs": TOKENS})[0])


def judge(case: Case) -> Verdict:
  """Returns what comes of a case."""
  from paxlike.errors import UserError

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    config = altered(case)
    expected = truth(folder, config)
    if expected is None:
      return Verdict("none")
    try:
      got = conversion(folder)
    except UserError as error:
      reason = str(error)
      return Verdict("refused" if "\n" not in reason else "crash", reason)
    except Exception as error:
      return Verdict("crash", repr(error)[:300])
  if got.shape != expected.shape:
    return Verdict("wrong", f"{got.shape} {expected.shape}")
  error = float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
  return Verdict("match" if error < TOLERANCE else "wrong", f"{error:.1e}")


def main(families: list[str]) -> int:
  """Prints the table. Returns 1 if anything is silently wrong."""
  import logging

  import transformers

  transformers.logging.set_verbosity(logging.CRITICAL)
  transformers.utils.logging.disable_progress_bar()
  counts: dict[str, collections.Counter[str]] = {}
  for family in families or list(BASES):
    counts[family] = collections.Counter()
    began = time.perf_counter()
    for case in cases(family):
      verdict = judge(case)
      counts[family][verdict.kind] += 1
      if verdict.kind in ("wrong", "crash") or "-v" in sys.argv:
        print(f"{verdict.kind}: {case}: {verdict.reason}", flush=True)
    print(f"{family}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
  kinds = ("match", "refused", "wrong", "crash", "none")
  print("| family | cases | match | refused | silently wrong | crash | not in transformers |")
  print("|---|---:|---:|---:|---:|---:|---:|")
  for family, count in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
    print(f"| {family} | {count.total()} | {' | '.join(str(count[kind]) for kind in kinds)} |")
  return int(any(count["wrong"] + count["crash"] for count in counts.values()))


if __name__ == "__main__":
  sys.exit(main([arg for arg in sys.argv[1:] if not arg.startswith("-")]))
