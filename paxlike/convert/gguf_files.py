# SPDX-License-Identifier: Apache-2.0
"""Exports models as GGUF, the format of llama.cpp.

Names, metadata and changes of weights are those of llama.cpp's `convert_hf_to_gguf.py`.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from paxlike.convert import gguf_tokenizer, safetensors_files
from paxlike.convert.exported_form import write_config
from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

FILE = "model.gguf"
_KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
_FILE_TYPES = {
  Kind.F32: gguf.LlamaFileType.ALL_F32,
  Kind.F16: gguf.LlamaFileType.MOSTLY_F16,
  Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
  Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROTATED = re.compile(r".*\.self_attn\.(q|k)_proj\.(weight|bias)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Architecture:
  """An architecture of llama.cpp.

  Attributes:
    arch: Its identifier.
    rotates_pairs: Whether rotary pairs are adjacent, and so queries and keys are permuted.
    shifts_norms: Whether 1 is added to the scales of norms.
    biases: The linear maps that may have a bias.
    scaled_rope: The kinds of scaled rotary positions.
    large: Number of layers of the size whose query scale is that of MODEL_DIMS / NUM_HEADS.
  """

  arch: gguf.MODEL_ARCH
  rotates_pairs: bool = False
  shifts_norms: bool = False
  biases: frozenset[str] = frozenset()
  scaled_rope: frozenset[str] = frozenset({"linear", "yarn"})
  large: int | None = None


_LLAMA = _Architecture(
  arch=gguf.MODEL_ARCH.LLAMA,
  rotates_pairs=True,
  biases=frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
  scaled_rope=frozenset({"linear", "yarn", "llama3"}),
)
# `model_type` of Hugging Face -> architecture.
_ARCHITECTURES = {
  "llama": _LLAMA,
  "mistral": _LLAMA,
  "qwen2": _Architecture(
    arch=gguf.MODEL_ARCH.QWEN2, biases=frozenset({"q_proj", "k_proj", "v_proj"})
  ),
  "qwen3": _Architecture(arch=gguf.MODEL_ARCH.QWEN3),
  "gemma2": _Architecture(
    arch=gguf.MODEL_ARCH.GEMMA2, shifts_norms=True, scaled_rope=frozenset(), large=46
  ),
  "gemma3_text": _Architecture(
    arch=gguf.MODEL_ARCH.GEMMA3, shifts_norms=True, scaled_rope=frozenset({"linear"}), large=62
  ),
}


class Gguf:
  """The format, with matrices in the dtype of the export, or quantized.

  Vectors are stored in F32. `model.gguf` holds configuration and tokenizer too; `config.json` and
  the tokenizer's files are written beside it.
  """

  reads_compute_dtype = False

  def __init__(self, quantization: str | None = None):
    """`quantization`: a block format of ggml, such as "Q8_0"; None: no quantization."""
    self._quantization = None if quantization is None else Kind[quantization]

  def check(self, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]):
    architecture = _architecture(config)
    _check_config(config, architecture)
    names = _names(specs, config, architecture)
    for name in names:
      if name.endswith(".bias") and name.split(".")[-2] not in architecture.biases:
        raise UserError(f"{_title(config)} of llama.cpp has no place for {name}.")
    if self._quantization is None:
      return
    block, _ = gguf.GGML_QUANT_SIZES[self._quantization]
    for name in names:
      shape = specs[name].shape
      if len(shape) > 1 and shape[-1] % block:
        raise UserError(
          f"{self._quantization.name} of GGUF has blocks of {block}, but {name} is {list(shape)}:"
          " use --to_format=gguf."
        )

  def write(self, folder: pathlib.Path, tensors: Tensors, config: Mapping[str, Any]):
    architecture = _architecture(config)
    dtype = str(next(iter(tensors.specs.values())).dtype)
    kind = self._quantization or _KINDS[dtype]
    names = _names(tensors.specs, config, architecture)
    factors = _rope_factors(config)
    with _writer(folder / FILE, architecture) as writer:
      _add_configuration(writer, config, architecture)
      writer.add_file_type(_FILE_TYPES[kind])
      gguf_tokenizer.add(writer, folder, config)
      if self._quantization is not None:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
      for theirs, name in names.items():
        _add_tensor(writer, name, tensors.specs[theirs].shape, kind)
      if factors is not None:
        _add_tensor(writer, "rope_freqs.weight", factors.shape, Kind.F32)
      writer.write_header_to_file()
      writer.write_kv_data_to_file()
      writer.write_ti_data_to_file()
      for theirs in names:
        value = _changed(theirs, tensors.read(theirs), config, architecture)
        writer.write_tensor_data(_encoded(theirs, value, kind))
      if factors is not None:
        writer.write_tensor_data(_encoded("rope_freqs", factors, Kind.F32))
    write_config(folder, config)


def _architecture(config: Mapping[str, Any]) -> _Architecture:
  kind = config["model_type"]
  if kind not in _ARCHITECTURES:
    raise UserError(
      f"--to_format=gguf is for {', '.join(_ARCHITECTURES)}, not for {kind}: use --to_format=hf."
    )
  return _ARCHITECTURES[kind]


def _title(config: Mapping[str, Any]) -> str:
  return gguf.MODEL_ARCH_NAMES[_architecture(config).arch]


def _check_config(config: Mapping[str, Any], architecture: _Architecture):
  """Raises a UserError if a configuration has what llama.cpp's architecture does not compute."""
  title = _title(config)
  if config["model_type"] == "mistral" and config.get("sliding_window") is not None:
    raise UserError(
      f"{title} of llama.cpp has full attention, not sliding_window={config['sliding_window']}."
    )
  if (rope := _scaling(config)) and rope["rope_type"] not in architecture.scaled_rope:
    raise UserError(f"{title} of llama.cpp has no rotary positions of {rope['rope_type']}.")
  scale = config.get("query_pre_attn_scalar")
  wanted = config["head_dim"]
  if config["num_hidden_layers"] == architecture.large:
    wanted = config["hidden_size"] / config["num_attention_heads"]
  if scale is not None and scale != wanted:
    raise UserError(
      f"{title} of llama.cpp scales queries by that of {wanted:g}, not by"
      f" query_pre_attn_scalar={scale} (QUERY_SCALE_DIMS)."
    )
  if architecture.arch == gguf.MODEL_ARCH.GEMMA3 and config["rope_local_base_freq"] != 10_000.0:
    raise UserError(
      f"{title} of llama.cpp has a base of local rotary positions of 10000, not"
      f" rope_local_base_freq={config['rope_local_base_freq']} (LOCAL_ROPE_THETA)."
    )


def _names(
  specs: Mapping[str, TensorSpec], config: Mapping[str, Any], architecture: _Architecture
) -> dict[str, str]:
  """Returns Hugging Face's name -> llama.cpp's name of each tensor that is written."""
  table = gguf.get_tensor_name_map(architecture.arch, config["num_hidden_layers"])
  names = {}
  for theirs in specs:
    if theirs == _HEAD and config.get("tie_word_embeddings"):
      continue
    name = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
    if name is None:
      raise UserError(f"{_title(config)} of llama.cpp has no place for {theirs}.")
    names[theirs] = name
  return names


def _changed(
  name: str, value: np.ndarray, config: Mapping[str, Any], architecture: _Architecture
) -> np.ndarray:
  """Returns a tensor as llama.cpp stores it."""
  if architecture.shifts_norms and name.endswith("norm.weight"):
    return value.astype(np.float32) + 1
  if architecture.rotates_pairs and (match := _ROTATED.fullmatch(name)):
    heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
  return value


@contextlib.contextmanager
def _writer(file: pathlib.Path, architecture: _Architecture) -> Iterator[gguf.GGUFWriter]:
  writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture.arch])
  try:
    yield writer
  finally:
    writer.close()


def _add_configuration(
  writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: _Architecture
):
  writer.add_name(config["architectures"][0])
  writer.add_vocab_size(config["vocab_size"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_key_length(config["head_dim"])
  writer.add_value_length(config["head_dim"])
  writer.add_rope_dimension_count(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_theta"])
  if architecture.shifts_norms:
    writer.add_sliding_window(config["sliding_window"])
  for key, add in (
    ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
    ("final_logit_softcapping", writer.add_final_logit_softcapping),
  ):
    if config.get(key) is not None:
      add(config[key])
  rope = _scaling(config)
  if rope and rope["rope_type"] != "llama3":  # For that, there is a tensor of factors.
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
      writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """Returns the scaling of rotary positions; None: there is none."""
  rope = config.get("rope_scaling")
  return None if rope is None or rope["rope_type"] == "default" else rope


def _rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
  """Returns the divisors of Llama 3.1's rotary frequencies, float32 [head_dim / 2]; None: none."""
  rope = _scaling(config)
  if rope is None or rope["rope_type"] != "llama3":
    return None
  dims: int = config["head_dim"]
  waves = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dims, 2) / dims)
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  length = rope["original_max_position_embeddings"]
  smooth = np.clip((length / waves - low) / (high - low), 0, 1)
  return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _kind(shape: tuple[int, ...], kind: Kind) -> Kind:
  return kind if len(shape) > 1 else Kind.F32


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Kind):
  kind = _kind(shape, kind)
  size = gguf.quant_shape_to_byte_shape(shape, kind)
  writer.add_tensor_info(name, size, np.dtype(np.uint8), math.prod(size), raw_dtype=kind)


def _encoded(name: str, value: np.ndarray, kind: Kind) -> np.ndarray:
  """Returns the bytes of a tensor."""
  kind = _kind(value.shape, kind)
  if kind == Kind.Q8_0:
    return gguf.quantize(np.ascontiguousarray(value, np.float32), kind)
  dtype = next(np.dtype(dtype) for dtype, one in _KINDS.items() if one == kind)
  return np.ascontiguousarray(safetensors_files.cast(name, value, dtype)).view(np.uint8)
