# SPDX-License-Identifier: Apache-2.0
"""Reads MaxText's configuration (`config.yml`) as a family and its knobs.

MaxText has hundreds of keys, most of them without effect on logits. Those that have one are read,
or must have the value that paxlike implements.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxlike import untrusted_files
from paxlike.checkpoints import hf_keys
from paxlike.config import knob_types, ranges
from paxlike.errors import UserError

FILE = "config.yml"
_BYTES = 1_000_000
# decoder_block -> (experiment family, its activations of the feed-forward layer).
_FAMILIES = {
  "llama2": ("llama", "Llama", ["silu", "linear"]),
  "mistral": ("mistral", "Mistral", ["silu", "linear"]),
  "mixtral": ("mistral", "Mixtral", ["silu", "linear"]),
  "gemma": ("gemma", "Gemma", ["gelu", "linear"]),
  "gemma2": ("gemma", "Gemma2", ["gelu", "linear"]),
  "gemma3": ("gemma", "Gemma3", ["gelu", "linear"]),
  "gpt3": ("gpt", "Gpt", ["gelu"]),
}
# Keys that are read, with their types; those without a default below must be there.
_KINDS: dict[str, Any] = {
  "vocab_size": ranges.Size,
  "head_dim": ranges.Size,
  "global_parameter_scale": ranges.Size,
  "base_emb_dim": ranges.Size,
  "base_mlp_dim": ranges.Size,
  "base_num_decoder_layers": ranges.Depth,
  "base_num_query_heads": ranges.Size,
  "base_num_kv_heads": ranges.Size,
  "max_target_length": ranges.Size,
  "trainable_position_size": int,
  "logits_via_embedding": bool,
  "normalize_embedding_logits": bool,
  "normalization_layer_epsilon": ranges.Epsilon,
  "rope_type": str,
  "rope_use_scale": bool,
  "rope_max_timescale": ranges.Base,
  "local_rope_max_timescale": float,
  "rope_linear_scaling_factor": ranges.Stretch,
  "sliding_window_size": int,
  "attn_logits_soft_cap": float,
  "final_logits_soft_cap": float,
  "num_experts": ranges.Size,
  "num_experts_per_tok": ranges.Size,
  "param_scan_axis": int,
  "model_name": str,
}
_DEFAULTS: dict[str, Any] = {
  "head_dim": 128,
  "logits_via_embedding": False,
  "global_parameter_scale": 1,
  "max_target_length": 2048,
  "trainable_position_size": -1,
  "normalize_embedding_logits": True,
  "normalization_layer_epsilon": 1e-5,
  "rope_type": "default",
  "rope_use_scale": True,
  "rope_max_timescale": 10_000,
  "local_rope_max_timescale": -1,
  "rope_linear_scaling_factor": 1.0,
  "sliding_window_size": 0,
  "attn_logits_soft_cap": 0.0,
  "final_logits_soft_cap": 0.0,
  "num_experts": 1,
  "num_experts_per_tok": 1,
  "param_scan_axis": 1,
  "model_name": "default",
}
# Keys that change the model, and the value that paxlike implements.
_FIXED: dict[str, Any] = {
  "attention_bias": False,
  "attention_type": "global",
  "first_num_dense_layers": 0,
  "mlp_bias": False,
  "partial_rotary_factor": 1.0,
  "rope_min_timescale": 1,
  "routed_bias": False,
  "routed_scaling_factor": 1.0,
  "shared_experts": 0,
  "use_qk_norm": False,
  "use_untrainable_positional_embedding": False,
}


class MaxTextConfig(NamedTuple):
  """What MaxText's configuration says of a model.

  Attributes:
    path: The file.
    family: The experiment family, as `module.Class` in `paxlike.experiments`.
    knobs: Its knobs.
    pairs: Whether rotary pairs are adjacent.
    axis: The dim along which scanned layers are stacked.
  """

  path: pathlib.Path
  family: str
  knobs: dict[str, Any]
  pairs: bool
  axis: int


def find(arrays: pathlib.Path) -> MaxTextConfig | None:
  """Returns the configuration of the run that a folder of arrays belongs to; None without file.

  Raises:
    UserError: It is damaged, or a value is not one that paxlike implements.
  """
  # RUN/checkpoints/STEP/items.
  for folder in (arrays, *arrays.absolute().parents[:3]):
    if untrusted_files.is_there(folder / FILE):
      return read(folder / FILE)
  return None


def read(path: pathlib.Path) -> MaxTextConfig:
  """Returns the configuration in a file.

  Raises:
    UserError: As `find`.
  """
  given = _parse(path)
  block = given.get("decoder_block")
  if not isinstance(block, str) or block not in _FAMILIES:
    known = ", ".join(_FAMILIES)
    raise UserError(f"{path}: decoder_block is {block!r}; paxlike has {known}.")
  module, family, activations = _FAMILIES[block]
  for key, wanted in (_FIXED | {"mlp_activations": activations}).items():
    if key in given and not hf_keys.is_one_of(given[key], wanted):
      raise UserError(f"{path}: {key} is {given[key]!r}; for {block} paxlike has {wanted!r} only.")
  values = {key: _value(path, given, key) for key in _KINDS}
  knobs = _sizes(values) | _of_block(path, block, values)
  pairs = values["rope_type"].startswith("llama3.1") or values["model_name"].startswith("llama3.1")
  if pairs and values["rope_use_scale"] and block != "gpt3":
    knobs |= {"ROPE_SCALING": "llama3", "ROPE_FACTOR": 8.0, "ROPE_ORIGINAL_LENGTH": 8192}
  elif values["rope_type"] != "default" and not pairs:
    raise UserError(f"{path}: rope_type is {values['rope_type']!r}; expected default or llama3.1.")
  return MaxTextConfig(path, f"{module}.{family}", knobs, pairs, values["param_scan_axis"])


def _parse(path: pathlib.Path) -> dict[str, Any]:
  import yaml

  class Loader(yaml.SafeLoader):
    pass

  # MaxText's own dump has enums and dtypes as Python objects: none of them is needed.
  Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
  text = untrusted_files.read_text(path, limit=_BYTES, folder=path.parent)
  try:
    given = yaml.load(text, Loader)
  except (yaml.YAMLError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}.") from None
  if not isinstance(given, dict):
    raise UserError(f"{path} is not a mapping.")
  return given


def _value(path: pathlib.Path, given: Mapping[str, Any], key: str) -> Any:
  if given.get(key) is None:
    if key not in _DEFAULTS:
      raise UserError(f"{path} lacks {key}.")
    return _DEFAULTS[key]
  try:
    return knob_types.convert(_KINDS[key], given[key], text=False)
  except knob_types.RefusedError as error:
    raise UserError(f"{path}: {key}: {error}") from None


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the knobs of sizes, which `global_parameter_scale` multiplies."""
  times, rest = divmod(values["global_parameter_scale"].bit_length() - 1, 3)
  layers, model, ffn = 2**times, 2 ** (times + (rest > 1)), 2 ** (times + (rest > 0))
  return {
    "VOCAB_SIZE": values["vocab_size"],
    "MAX_SEQ_LEN": values["max_target_length"],
    "NUM_LAYERS": layers * values["base_num_decoder_layers"],
    "MODEL_DIMS": model * values["base_emb_dim"],
    "HIDDEN_DIMS": ffn * values["base_mlp_dim"],
    "NUM_HEADS": ffn * values["base_num_query_heads"],
    "DIMS_PER_HEAD": values["head_dim"],
  }


def _of_block(path: pathlib.Path, block: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the knobs of one kind of decoder block."""
  tied = values["logits_via_embedding"]
  if block == "gpt3":
    if not tied or values["normalize_embedding_logits"]:
      raise UserError(
        f"{path}: gpt3 needs logits_via_embedding=true and normalize_embedding_logits=false."
      )
    return {"MAX_SEQ_LEN": values["trainable_position_size"]}
  if tied and not values["normalize_embedding_logits"]:
    raise UserError(f"{path}: paxlike has no {block} with normalize_embedding_logits=false.")
  scale = _sizes(values)["NUM_HEADS"] // values["base_num_query_heads"]
  knobs: dict[str, Any] = {
    "NUM_KV_HEADS": scale * values["base_num_kv_heads"],
    "ROPE_THETA": values["rope_max_timescale"],
    "USE_TIED_EMBEDDING": tied,
  }
  if values["rope_linear_scaling_factor"] != 1:
    knobs |= {"ROPE_SCALING": "linear", "ROPE_FACTOR": values["rope_linear_scaling_factor"]}
  if not block.startswith("gemma"):  # Gemma's layers have RMSNorm's default.
    knobs["NORM_EPSILON"] = values["normalization_layer_epsilon"]
  if block in ("mistral", "mixtral"):
    knobs["WINDOW"] = None
  if block == "mixtral":
    knobs |= {"NUM_EXPERTS": values["num_experts"]}
    knobs |= {"NUM_EXPERTS_PER_TOKEN": values["num_experts_per_tok"]}
  caps = {key: values[key] for key in ("attn_logits_soft_cap", "final_logits_soft_cap")}
  if block not in ("gemma2", "gemma3") and any(caps.values()):
    raise UserError(f"{path}: paxlike has no {block} with soft caps.")
  if block in ("gemma2", "gemma3"):
    knobs |= {
      "WINDOW": values["sliding_window_size"],
      "ATTENTION_SOFT_CAP": values["attn_logits_soft_cap"] or None,
      "LOGITS_SOFT_CAP": values["final_logits_soft_cap"] or None,
    }
  if block == "gemma2":
    knobs["NUM_LAYERS"] = 2 * _sizes(values)["NUM_LAYERS"]
  if block == "gemma3":
    local = values["local_rope_max_timescale"]
    knobs["LOCAL_ROPE_THETA"] = local if local > 0 else values["rope_max_timescale"]
    if values["model_name"].startswith("gemma3-27b"):
      knobs["QUERY_SCALE_DIMS"] = values["base_emb_dim"] // values["base_num_query_heads"]
  return knobs
