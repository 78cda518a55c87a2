# SPDX-License-Identifier: Apache-2.0
"""The layout of Pax's checkpoints: GPT-3, LLaMA and GLaM of its GPU recipes.

Facts are from the source of praxis at feeaff19 (`layers/transformers.py`, `attentions.py`,
`multi_query_attention.py`, `embedding_softmax.py`, `glam.py`) and paxml at b397693f
(`contrib/gpu/scripts_gpu`, `checkpoints.py`).
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from paxlike import untrusted_files
from paxlike.checkpoints.hf_rules import Rules
from paxlike.convert.array_rules import Array
from paxlike.convert.jax_program import module_of
from paxlike.convert.layered_arrays import Layers
from paxlike.convert.safetensors_files import TensorSpec, is_shape
from paxlike.layers.decoder import Decoder

_AT = "lm.transformer.x_layers_{}"
_LAYER = re.compile(r"lm\.transformer\.(repeat\.sub\.)?x_layers_(\d+)\.(.*)")

# Weight -> the arrays that may hold it, of which a checkpoint has one.
_ARRAYS: dict[str, tuple[Array, ...]] = {
  "embedding.table": (
    Array("lm.embedding_lookup.emb_var"),
    Array("lm.softmax.embedding.w"),
    Array("lm.softmax.logits_ffn.linear.w", outputs_first=True),
  ),
  "positions.table": (Array("lm.position_emb.emb_var"),),
  "norm.scale": (Array("lm.final_ln.scale"),),
  "norm.bias": (Array("lm.final_ln.bias"),),
  "head.w": (Array("lm.softmax.logits_ffn.linear.w"),),
  "stack.{}.attention.output.w": (Array(f"{_AT}.self_attention.post.w", outputs_first=True),),
  "stack.{}.attention.output.b": (Array(f"{_AT}.self_attention.post.b"),),
  "stack.{}.attention.relative_bias.table": (Array(f"{_AT}.self_attention.relative_bias.wrb"),),
  "stack.{}.mlp.gate.w": (Array(f"{_AT}.ff_layer.ffn_layer1_gate.linear.w"),),
  "stack.{}.mlp.router.w": (Array(f"{_AT}.ff_layer.gate"),),
  "stack.{}.mlp.experts.up.w": (Array(f"{_AT}.ff_layer.wi_0"),),
  "stack.{}.mlp.experts.down.w": (Array(f"{_AT}.ff_layer.wo_0"),),
}
for _role, _theirs in (("up", "ffn_layer1"), ("down", "ffn_layer2")):
  _ARRAYS |= {
    f"stack.{{}}.mlp.{_role}.w": (Array(f"{_AT}.ff_layer.{_theirs}.linear.w"),),
    f"stack.{{}}.mlp.{_role}.b": (Array(f"{_AT}.ff_layer.{_theirs}.bias.b"),),
  }
for _index, _role in enumerate(("query", "key", "value")):
  for _kind in ("w", "b"):
    _ARRAYS[f"stack.{{}}.attention.{_role}.{_kind}"] = (
      Array(f"{_AT}.self_attention.combined_qkv.{_kind}", part=(_index, 3, 0)),
      Array(f"{_AT}.self_attention.{_role}.{_kind}"),
    )
for _kind in ("scale", "bias"):
  _ARRAYS |= {
    f"stack.{{}}.attention_norm.{_kind}": (Array(f"{_AT}.layer_norm.{_kind}"),),
    f"stack.{{}}.mlp_norm.{_kind}": (Array(f"{_AT}.ff_layer.layer_norm.{_kind}"),),
  }


def unpadded_shapes(state: pathlib.Path) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of arrays before Pax padded them for its mesh, by name in the checkpoint.

  Args:
    state: The folder of arrays; `metadata` beside it has the shapes, since version 1.1.

  Raises:
    UserError: The metadata are damaged.
  """
  file = state.parent / "metadata" / "metadata"
  if not untrusted_files.is_there(file):
    return {}
  found: dict[str, tuple[int, ...]] = {}
  left = [("", untrusted_files.read_json(file, folder=state.parent).get("train_state_metadata"))]
  while left:
    name, value = left.pop()
    if not isinstance(value, dict):
      continue
    if "_array_metadata_tag" not in value:
      left += [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
    elif is_shape(value.get("unpadded_shape")):
      found[name] = tuple(value["unpadded_shape"])
  return found


def layers(name: str) -> Layers | None:
  """Returns the layers that an array holds; repeated ones are stacked along the first dim."""
  match = _LAYER.fullmatch(name)
  if match is None:
    return None
  if match[1]:
    return Layers(f"{_AT}.{match[3]}", int(match[2]))
  return Layers(f"{_AT}.{match[3]}", 0, int(match[2]))


def rules(model: Decoder, weights: Mapping[str, str], found: Mapping[str, TensorSpec]) -> Rules:
  """Returns the rules of a model's weights.

  Args:
    model: The model, unrolled.
    weights: Template -> name of the weight in its first layer.
    found: The arrays of the checkpoint.
  """
  result: Rules = {}
  for template, name in weights.items():
    if (arrays := _ARRAYS.get(template)) is None:
      continue
    layer = int(match[1]) if (match := re.search(r"\.layers\.(\d+)\.", name)) else 0
    here = [array for array in arrays if array.name.format(layer) in found]
    array = here[0] if here else arrays[0]
    spec = found.get(array.name.format(layer))
    fields: dict[str, Any] = {}
    if template.endswith("norm.scale"):
      norm = module_of(model, name, 1)  # LayerNorm adds 1 to its scale, RmsNorm does not.
      fields["shift"] = float(hasattr(norm, "bias")) - norm.offset
    elif re.search(r"\.attention\.(query|key)\.", template):
      fields["pairs"] = module_of(model, name, 2).rope is not None
    if spec is not None and _has_flat_heads(template, array, spec):
      # GLaM's heads, or a single KV head.
      fields["joined"] = (0, 2) if template.endswith(".output.w") else (1, 3)
      fields["outputs_first"] = False
    result[template] = dataclasses.replace(array, **fields)
  return result


def _has_flat_heads(template: str, array: Array, spec: TensorSpec) -> bool:
  is_heads = re.search(r"\.attention\.(query|key|value|output)\.w$", template) is not None
  return is_heads and len(spec.shape) == (2 if array.part is None else 3)
