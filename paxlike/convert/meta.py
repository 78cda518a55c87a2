# SPDX-License-Identifier: Apache-2.0
"""Reads Meta's LLaMA checkpoints (`consolidated.*.pth`) under Hugging Face's names."""

import pathlib
import re
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.convert.known_keys import Declared
from paxlike.convert.safetensors_files import TensorSpec, read_json
from paxlike.convert.torch_files import TorchFile
from paxlike.errors import UserError

# Meta's name -> (Hugging Face's name, the dim along which the files shard it; None: replicated).
_OUTER = {
  "tok_embeddings.weight": ("model.embed_tokens.weight", 1),
  "norm.weight": ("model.norm.weight", None),
  "output.weight": ("lm_head.weight", 0),
}
_INNER = {
  "attention.wq": ("self_attn.q_proj", 0),
  "attention.wk": ("self_attn.k_proj", 0),
  "attention.wv": ("self_attn.v_proj", 0),
  "attention.wo": ("self_attn.o_proj", 1),
  "feed_forward.w1": ("mlp.gate_proj", 0),
  "feed_forward.w2": ("mlp.down_proj", 1),
  "feed_forward.w3": ("mlp.up_proj", 0),
  "attention_norm": ("input_layernorm", None),
  "ffn_norm": ("post_attention_layernorm", None),
}
# The keys of `params.json`.
_DECLARED = Declared(
  kinds={
    "dim": ranges.Size,
    "n_layers": ranges.Depth,
    "n_heads": ranges.Size,
    "n_kv_heads": ranges.Size,
    "norm_eps": ranges.Epsilon,
    "vocab_size": int,
    "rope_theta": ranges.Base,
    "use_scaled_rope": bool,
    "rope_scale_factor": ranges.Stretch,
    "rope_scaling_factor": ranges.Stretch,  # The same in some versions of Meta's code.
  },
  defaults={
    "n_kv_heads": None,
    "vocab_size": -1,  # The tokenizer's.
    "rope_theta": 10_000.0,
    "use_scaled_rope": False,
    "rope_scale_factor": None,
    "rope_scaling_factor": None,
  },
  fixed={"rope_high_freq_factor": 4.0, "use_qk_norm": False},
  # The tensors give the width of the feed-forward layer; the rest is for Meta's own program.
  neutral=frozenset({"ffn_dim_multiplier", "multiple_of", "max_batch_size", "max_seq_len"}),
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")


class MetaFolder:
  """A folder of Meta's LLaMA.

  Attributes:
    config: The equivalent `config.json` of Hugging Face.
    specs: Hugging Face's name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads names and shapes, but no weights.

    Raises:
      UserError: A file is missing or damaged, or the files are not shards of one model.
    """
    files = sorted(path.glob("consolidated.*.pth"))
    if not files:
      raise UserError(f"--path={path} holds no consolidated.*.pth.")
    params = read_json(path / "params.json")
    self._shards = [TorchFile(file) for file in files]
    names = self._shards[0].specs.keys()
    for file, shard in zip(files, self._shards, strict=True):
      # All shards of a tensor have the same shape.
      if shard.specs != self._shards[0].specs:
        raise UserError(f"{file} and {files[0]} do not hold the same weights.")
    declared = _DECLARED.read(params, place=str(path / "params.json"))
    self._dim, self._heads = declared["dim"], declared["n_heads"]
    self._kv_heads: int = declared["n_kv_heads"] or self._heads
    positions = _positions(declared)
    self._theirs: dict[str, tuple[str, int | None]] = {}
    self.specs: dict[str, TensorSpec] = {}
    for name in names:
      if name != "rope.freqs":
        ours, dim = self._place(name)
        self._theirs[ours] = (name, dim)
        self.specs[ours] = self._full_spec(name, dim)
    self.config = {
      "model_type": "llama",
      "hidden_size": self._dim,
      "num_hidden_layers": declared["n_layers"],
      "num_attention_heads": self._heads,
      "num_key_value_heads": self._kv_heads,
      "rms_norm_eps": declared["norm_eps"],
      "vocab_size": self._rows("model.embed_tokens.weight"),
      "intermediate_size": self._rows("model.layers.0.mlp.gate_proj.weight"),
      "tie_word_embeddings": "lm_head.weight" not in self.specs,
      **positions,
    }
    if declared["vocab_size"] not in (-1, self.config["vocab_size"]):
      raise UserError(
        f"{path / 'params.json'}: vocab_size is {declared['vocab_size']}, but the embedding has"
        f" {self.config['vocab_size']} ids."
      )
    for name, heads in (("q", self._heads), ("k", self._kv_heads)):
      for ours, spec in self.specs.items():
        if ours.endswith(f"{name}_proj.weight") and spec.shape[0] % (2 * heads):
          raise UserError(
            f"wrong shape: {ours} has {spec.shape[0]} rows, not a multiple of 2 x {heads} heads."
          )

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor in Hugging Face's layout."""
    theirs, dim = self._theirs[name]
    shards = [shard.read(theirs) for shard in self._shards]
    full = shards[0] if dim is None else np.concatenate(shards, axis=dim)
    if name.endswith("q_proj.weight"):
      return _half_split(full, self._heads)
    return _half_split(full, self._kv_heads) if name.endswith("k_proj.weight") else full

  def _place(self, name: str) -> tuple[str, int | None]:
    """Returns Hugging Face's name, and the dim along which the files shard the tensor."""
    if not 1 <= len(self._shards[0].specs[name].shape) <= 2:
      raise UserError(f"wrong shape: {name} is neither a matrix nor a vector.")
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _INNER:
      ours, dim = _INNER[match[2]]
      return f"model.layers.{match[1]}.{ours}.weight", dim
    if name not in _OUTER:
      raise UserError(f"unexpected: {name} is not a weight of LLaMA.")
    ours, dim = _OUTER[name]
    columns = self._shards[0].specs[name].shape[-1]
    # LLaMA 2 shards the embedding's columns, Llama 3 its rows.
    return ours, 0 if name == "tok_embeddings.weight" and columns == self._dim else dim

  def _full_spec(self, name: str, dim: int | None) -> TensorSpec:
    shape, dtype = self._shards[0].specs[name]
    if dim is None:
      return TensorSpec(shape, dtype)
    if len(shape) != 2:
      raise UserError(f"wrong shape: {name} is not a matrix.")
    size = shape[dim] * len(self._shards)
    return TensorSpec((*shape[:dim], size, *shape[dim + 1 :]), dtype)

  def _rows(self, name: str) -> int:
    if name not in self.specs:
      raise UserError(f"missing: {name} is in no consolidated.*.pth.")
    return self.specs[name].shape[0]


def _half_split(w_FD: np.ndarray, num_heads: int) -> np.ndarray:
  """Permutes the rows of each head from adjacent rotary pairs to half-split order."""
  pairs = w_FD.reshape(num_heads, -1, 2, w_FD.shape[1])
  return pairs.swapaxes(1, 2).reshape(w_FD.shape)


def _positions(declared: dict[str, Any]) -> dict[str, Any]:
  """Returns the RoPE keys of the generation: LLaMA 2, Llama 3, or 3.1 with its longer context.

  Raises:
    UserError: The scaling factor has no effect, or has two values.
  """
  theta = declared["rope_theta"]
  factors = {declared["rope_scale_factor"], declared["rope_scaling_factor"]} - {None}
  if not declared["use_scaled_rope"]:
    if factors:
      raise UserError("params.json: rope_scale_factor needs use_scaled_rope.")
    length = 8192 if theta > 10_000 else 4096
    return {"rope_theta": theta, "max_position_embeddings": length}
  if len(factors) > 1:
    raise UserError("params.json: rope_scale_factor and rope_scaling_factor differ.")
  scaling = {
    "rope_type": "llama3",
    "factor": factors.pop() if factors else 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  return {"rope_theta": theta, "max_position_embeddings": 131_072, "rope_scaling": scaling}
