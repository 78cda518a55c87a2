# SPDX-License-Identifier: Apache-2.0
"""The layout of MaxText's checkpoints, and what it folds into weights.

Facts are from its source, `src/maxtext` at e591f30c: `layers/attentions.py` (queries are scaled by
their initializer, not by attention), `layers/normalizations.py`, `layers/embeddings.py` and
`models/{llama2,mistral,mixtral,gemma,gemma2,gemma3,gpt3}.py`.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from paxlike.checkpoints.hf_rules import Rules
from paxlike.convert.array_rules import Array
from paxlike.convert.jax_program import module_of
from paxlike.convert.layered_arrays import Layers
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError
from paxlike.layers.decoder import Decoder

_AT = "decoder.layers.{}"
# Names of Gemma 2's layers, of which each holds two.
_PAIR = re.compile(r"([a-z_]+)_(local|global)\.(.*)")
_STACKED = re.compile(r"decoder\.layers\.(?:layers_(\d+)\.)?(.*)")
_SINGLE = re.compile(r"decoder\.layers_(\d+)\.(.*)")
_REMAINDER = re.compile(r"decoder\.layers_remainder\.layers_(\d+)\.(.*)")


def _part(name: str, index: int, number: int, axis: int) -> Array:
  return Array(name, part=(index, number, axis))


def _named(*names: str) -> tuple[Array, ...]:
  return tuple(Array(name) for name in names)


# Weight -> the arrays that may hold it, of which a checkpoint has one.
_ARRAYS: dict[str, tuple[Array, ...]] = {
  "embedding.table": _named("token_embedder.embedding"),
  "positions.table": _named("decoder.position_embedder.embedding"),
  "norm.scale": _named("decoder.decoder_norm.scale"),
  "norm.bias": _named("decoder.decoder_norm.bias"),
  "head.w": _named("decoder.logits_dense.kernel"),
  "stack.{}.attention.output.w": _named(f"{_AT}.self_attention.out.kernel"),
  "stack.{}.attention.output.b": _named(f"{_AT}.self_attention.out.bias"),
  "stack.{}.attention.query_norm.scale": _named(f"{_AT}.self_attention.query_norm.scale"),
  "stack.{}.attention.key_norm.scale": _named(f"{_AT}.self_attention.key_norm.scale"),
  "stack.{}.attention_post_norm.scale": _named(f"{_AT}.post_self_attention_norm.scale"),
  "stack.{}.mlp_post_norm.scale": _named(f"{_AT}.post_ffw_norm.scale"),
  "stack.{}.mlp.down.w": _named(f"{_AT}.mlp.wo.kernel"),
  "stack.{}.mlp.down.b": _named(f"{_AT}.mlp.wo.bias"),
  "stack.{}.mlp.up.b": _named(f"{_AT}.mlp.wi.bias"),
  "stack.{}.mlp.gate.w": (
    Array(f"{_AT}.mlp.wi_0.kernel"),
    _part(f"{_AT}.mlp.wi.kernel", 0, 2, 1),  # fused_mlp
  ),
  "stack.{}.mlp.router.w": _named(f"{_AT}.MoeBlock_0.gate.kernel"),
  "stack.{}.mlp.experts.gate.w": _named(f"{_AT}.MoeBlock_0.wi_0"),
  "stack.{}.mlp.experts.up.w": _named(f"{_AT}.MoeBlock_0.wi_1"),
  "stack.{}.mlp.experts.down.w": _named(f"{_AT}.MoeBlock_0.wo"),
}
for _index, _role in enumerate(("query", "key", "value")):
  _fused = f"{_AT}.self_attention.qkv_proj"
  _ARRAYS |= {
    f"stack.{{}}.attention.{_role}.w": (
      Array(f"{_AT}.self_attention.{_role}.kernel"),
      _part(f"{_fused}.kernel", _index, 3, 1),  # fused_qkv of GPT-3
    ),
    f"stack.{{}}.attention.{_role}.b": (
      Array(f"{_AT}.self_attention.{_role}.bias"),
      _part(f"{_fused}.bias", _index, 3, 0),
    ),
  }
for _kind in ("scale", "bias"):
  _ARRAYS |= {
    f"stack.{{}}.attention_norm.{_kind}": _named(
      f"{_AT}.pre_self_attention_layer_norm.{_kind}", f"{_AT}.pre_self_attention_norm.{_kind}"
    ),
    f"stack.{{}}.mlp_norm.{_kind}": _named(
      f"{_AT}.post_self_attention_layer_norm.{_kind}",
      f"{_AT}.pre_ffw_norm.{_kind}",
      f"{_AT}.mlp.mlp_layer_norm.{_kind}",
    ),
  }


def _up(has_gate: bool) -> tuple[Array, ...]:
  if not has_gate:
    return _named(f"{_AT}.mlp.wi.kernel")
  return Array(f"{_AT}.mlp.wi_1.kernel"), _part(f"{_AT}.mlp.wi.kernel", 1, 2, 1)


def is_ignored(name: str) -> bool:
  """Returns whether an array is not part of the text model."""
  return name.startswith("vision_encoder.")


def layers(name: str, *, axis: int) -> Layers | None:
  """Returns the layers that an array holds; scanned ones are stacked along `axis`."""
  if match := _REMAINDER.fullmatch(name):  # Of Gemma 3: the layers after the last group of six.
    return Layers(f"{_AT}.{match[2]}", int(match[1]), -1)
  if match := _SINGLE.fullmatch(name):
    if pair := _PAIR.fullmatch(match[2]):
      return Layers(f"{_AT}.{pair[1]}.{pair[3]}", int(pair[2] == "global"), int(match[1]))
    return Layers(f"{_AT}.{match[2]}", 0, int(match[1]))
  if match := _STACKED.fullmatch(name):
    if pair := _PAIR.fullmatch(match[2]):
      return Layers(f"{_AT}.{pair[1]}.{pair[3]}", int(pair[2] == "global"), None, axis)
    return Layers(f"{_AT}.{match[2]}", int(match[1] or 0), None, axis)
  return None


def rules(
  model: Decoder, weights: Mapping[str, str], found: Mapping[str, TensorSpec], *, pairs: bool
) -> Rules:
  """Returns the rules of a model's weights.

  Args:
    model: The model, unrolled.
    weights: Template -> name of the weight in its first layer.
    found: The arrays of the checkpoint.
    pairs: Whether rotary pairs are adjacent, as in its Llama 3.1.

  Raises:
    UserError: The model's tied embedding is not one of MaxText's, or heads are in an unknown order.
  """
  fused = found.get(f"{_AT}.self_attention.qkv_proj.kernel".format(0))
  if fused is not None and len(fused.shape) == 3:
    raise UserError(
      "with fused_qkv=true, the order of MaxText's heads depends on the tensor parallelism of the"
      " run, which the checkpoint does not hold: paxlike reads it for gpt3 only."
    )
  result: Rules = {}
  for template, name in weights.items():
    arrays = _ARRAYS.get(template)
    if template == "stack.{}.mlp.up.w":
      arrays = _up(module_of(model, name, 2).gate is not None)
    if arrays is not None:
      here = [array for array in arrays if array.name.format(0) in found]
      array = here[0] if here else arrays[0]
      fields = _constants(model, template, name, found)
      is_rotated = re.search(r"\.attention\.(query|key)\.", template) is not None
      result[template] = dataclasses.replace(array, pairs=pairs and is_rotated, **fields)
  return result


def _constants(model: Decoder, template: str, name: str, found: Collection[str]) -> dict[str, Any]:
  """Returns the fields of `Array` that make our weight have the same effect as theirs."""
  if template.endswith("norm.scale"):
    # LayerNorm, of GPT-3, adds 1 to its scale; RMSNorm does not.
    norm = module_of(model, name, 1)
    return {"shift": float(hasattr(norm, "bias")) - norm.offset}
  if template == "embedding.table":
    return {"factor": 1 / _embedding_scale(model)}
  if ".attention.query." in template:
    attention = module_of(model, name, 2)
    return {"factor": _query_scale(model, attention, found) / attention.scale}
  return {}


def _query_scale(model: Decoder, attention: Any, found: Collection[str]) -> float:
  """Returns the factor that MaxText's attention applies to queries."""
  if f"{_AT}.self_attention.query_norm.scale".format(0) in found:
    return attention.scale  # Gemma 3
  return 1.0 if model.positions is None else 1 / math.sqrt(attention.head_dim)


def _embedding_scale(model: Decoder) -> float:
  """Returns the factor by which our model multiplies embedded tokens; MaxText folds it in.

  Raises:
    UserError: Logits would differ by a factor.
  """
  scale, dim = model.embedding.scale, model.embedding.table.get_value().shape[1]
  # Logits of tied embeddings are divided by sqrt(D), but for GPT-3 (normalize_embedding_logits).
  if model.head is None and model.positions is None and not math.isclose(scale, math.sqrt(dim)):
    raise UserError(
      "MaxText divides the logits of tied embeddings by sqrt(MODEL_DIMS), which this model does"
      " not: give an experiment of Gemma or GPT-3, or --fdl.USE_TIED_EMBEDDING=false."
    )
  return scale
