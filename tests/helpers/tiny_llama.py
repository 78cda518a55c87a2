# SPDX-License-Identifier: Apache-2.0
"""A small random LLaMA in a folder as Hugging Face has it, made without torch."""

import json
import pathlib

import numpy as np

from paxlike.convert import safetensors_files
from paxlike.convert.safetensors_files import TensorSpec

DIM, HIDDEN, VOCAB, LAYERS, HEADS, KV_HEADS = 16, 24, 64, 2, 4, 2
CONFIG = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": VOCAB,
  "max_position_embeddings": 32,
  "num_hidden_layers": LAYERS,
  "hidden_size": DIM,
  "intermediate_size": HIDDEN,
  "num_attention_heads": HEADS,
  "num_key_value_heads": KV_HEADS,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
  "hidden_act": "silu",
}


def shapes() -> dict[str, tuple[int, ...]]:
  """Returns the tensors by name."""
  result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
  for layer in range(LAYERS):
    at = f"model.layers.{layer}"
    result |= {
      f"{at}.input_layernorm.weight": (DIM,),
      f"{at}.self_attn.q_proj.weight": (DIM, DIM),
      f"{at}.self_attn.k_proj.weight": (DIM * KV_HEADS // HEADS, DIM),
      f"{at}.self_attn.v_proj.weight": (DIM * KV_HEADS // HEADS, DIM),
      f"{at}.self_attn.o_proj.weight": (DIM, DIM),
      f"{at}.post_attention_layernorm.weight": (DIM,),
      f"{at}.mlp.gate_proj.weight": (HIDDEN, DIM),
      f"{at}.mlp.up_proj.weight": (HIDDEN, DIM),
      f"{at}.mlp.down_proj.weight": (DIM, HIDDEN),
    }
  return result | {"model.norm.weight": (DIM,), "lm_head.weight": (VOCAB, DIM)}


def values(sizes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  """Returns random numbers."""
  random = np.random.default_rng(0)
  return {name: random.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}


def write(
  folder: pathlib.Path, arrays: dict[str, np.ndarray] | None = None, config: dict | None = None
):
  """Writes a folder; what is not given is as it should be."""
  arrays = values(shapes()) if arrays is None else arrays
  folder.mkdir(parents=True, exist_ok=True)
  specs = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
  safetensors_files.write(folder, specs, arrays.__getitem__)
  (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
