# SPDX-License-Identifier: Apache-2.0
"""Fiddlers of how matmuls compute: precision, quantization, adapters."""

import copy
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from flax import nnx

from paxlike import layers
from paxlike.config import ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.fiddlers.selection import ATTENTION, BLOCK, FLOAT32, MLP, matrices, select
from paxlike.layers.decoder import VALUE_HEAD
from paxlike.training.trainer import Trainer

DOTS = {
  "fp8": layers.Fp8,
  "fp8_delayed": layers.DelayedFp8,
  "mxfp8": layers.MxFp8,
  "int8": layers.Int8,
  "qat_fp8": layers.QatFp8,
  "qat_fp8_blocks": layers.QatFp8Blocks,
  "qat_int4": layers.QatInt4,
  "qat_int8": layers.QatInt8,
}
_QAT = tuple(dot for name, dot in DOTS.items() if name.startswith("qat_"))
# Schemes of `quantize_weights`. In the base of `lora`, int8 has a scale per block of 64 instead.
SCHEMES = {
  "int8": layers.weight_only.int8_columns,
  "int4": layers.weight_only.int4,
  "nf4": layers.weight_only.nf4,
}
_UNDROPPABLE = ("head", "router")
# Roles in LORA_TARGET_LAYERS: of the embedding table, and the prefixes of those of the matrices of
# experts and of the linear maps of recurrent layers.
EMBEDDING, EXPERT, RECURRENT = "embedding", "expert_", "recurrent_"
_OF_RECURRENT = tuple(f"{RECURRENT}{role}" for role in ATTENTION)
# Values of LORA_TARGET_LAYERS for several roles. "all" is all linear maps of blocks.
LORA_ROLES = {
  "all": BLOCK + _OF_RECURRENT,
  "attention": ATTENTION,
  "recurrent": _OF_RECURRENT,
  "mlp": MLP,
  "experts": tuple(f"{EXPERT}{role}" for role in MLP),
}


def precision(graph: fdl.Buildable, dtype: ranges.ComputeDtype = "bfloat16"):
  """Sets the compute dtype of layers; weights, statistics and loss stay float32.

  Routers, the weights of an indexer's heads and value heads are computed in float32.
  """
  computing = (
    layers.Linear,
    layers.Lora,
    layers.ExpertLora,
    layers.EmbeddingLora,
    layers.ExpertLinear,
    layers.Embedding,
    layers.PositionEmbedding,
    layers.PerLayerEmbedding,
    layers.LayerNorm,
    layers.RmsNorm,
    layers.GroupedRmsNorm,
  )
  for kind in computing:
    for node in select(graph, kind):
      if getattr(node, "role", None) not in FLOAT32:
        node.dtype = jnp.dtype(dtype)


def quantize(graph: fdl.Buildable, kind: str = "fp8"):
  """Sets how the blocks' linear maps and experts multiply; `kind` is a key of `DOTS`.

  fp8, fp8_delayed, mxfp8 and int8 multiply in 8 bits; qat_* in the compute dtype, with weights as
  they are after weight-only quantization.

  mxfp8 applies to linear maps only, because there is no block-scaled grouped matmul for experts.
  """
  if kind not in DOTS:
    hint = did_you_mean(kind, DOTS) or f" One of {', '.join(DOTS)}."
    raise UserError(f"no quantization {kind}.{hint}")
  for node in select(graph, layers.Linear, *BLOCK) if kind == "mxfp8" else matrices(graph):
    node.dot = fdl.Partial(DOTS[kind])


def transformer_engine(graph: fdl.Buildable):
  """Uses NVIDIA's Transformer Engine for the linear maps of blocks, in fp8 if they use fp8.

  Raises:
    UserError: They use another quantization.
  """
  for node in select(graph, layers.Linear, *BLOCK):
    dot = getattr(node, "dot", None)
    made = None if dot is None else fdl.get_callable(dot)
    if made not in (None, layers.Fp8, layers.TransformerEngine):
      raise UserError("ENABLE_TE (transformer_engine) requires QUANTIZATION=fp8 or none.")
    if made is not layers.TransformerEngine:
      node.dot = fdl.Partial(layers.TransformerEngine, fp8=dot is not None)


def lora(
  graph: fdl.Buildable,
  rank: ranges.Size = 8,
  alpha: ranges.Factor | None = None,
  dropout: ranges.Probability = 0.0,
  roles: Sequence[str] = ("all",),
  base: str | None = None,
  rslora: bool = False,
  dora: bool = False,
):
  """Adds LoRA to the layers of these roles, and freezes all other weights.

  Roles are those of linear maps, keys of `LORA_ROLES`, `embedding`, for the matrices of experts
  `expert_up`, `expert_gate` and `expert_down`, and for layers with a recurrent state those of their
  linear maps after `recurrent_`.

  The adapters' scale is alpha / rank, with `rslora` alpha / sqrt(rank), or 1 if alpha is None.
  `dora` adds a magnitude of each output.
  `base`, int8 or nf4, is the weight-only quantization of the blocks' linear maps and experts.
  """
  adapted = _of_roles(graph, roles)
  is_sparse = any(select(graph, layers.SparseLatentAttention))
  undroppable = (*_UNDROPPABLE, "key_value") if is_sparse else _UNDROPPABLE
  _check_kind(adapted, dropout=dropout, dora=dora, undroppable=undroppable)
  options = {"rank": rank, "scale": layers.lora.scale_of(rank, alpha, rslora=rslora)}
  for role, nodes in adapted.items():
    if role == EMBEDDING:
      adapter = fdl.Partial(layers.EmbeddingLora, **options)
    elif role.startswith(EXPERT):
      adapter = fdl.Partial(layers.ExpertLora, **options)
    else:
      adapter = fdl.Partial(layers.Dora if dora else layers.Lora, **options)
      if dropout:
        adapter.dropout = fdl.Partial(layers.Dropout, rate=dropout)
    for node in nodes:
      if (dot := getattr(node, "dot", None)) and fdl.get_callable(dot) in _QAT:
        raise UserError(
          "QUANTIZATION=qat_* trains the weights that are quantized, but USE_LORA freezes them:"
          " leave one of them out."
        )
      node.lora = copy.deepcopy(adapter)
      node.lora.dtype = getattr(node, "dtype", jnp.float32)
  if base is not None:
    if base not in (schemes := ("int8", "nf4")):
      raise UserError(f"no scheme {base} for the base.{did_you_mean(base, schemes)}")
    for node in matrices(graph):
      node.scheme = getattr(layers.weight_only, base)
  for node in select(graph, Trainer):
    # A value head is new, and so trained itself.
    has_values = getattr(node.model, "value_head", None) is not None
    others = [VALUE_HEAD] if has_values else []
    node.trained = "|".join([layers.lora.WEIGHTS, *others])


def lora_bank(graph: fdl.Buildable, *, rank: int, num_adapters: int, roles: Sequence[str]):
  """Adds places for several adapters to the linear maps of these roles, for decoding.

  Raises:
    UserError: The model has adapters already, or these roles cannot have several.
  """
  for role, nodes in _of_roles(graph, roles).items():
    if role in ("head", "router", "key_value"):  # Which are called without a context, or merged.
      raise UserError(
        f"adapters of {role} cannot be decoded beside others: merge them with paxlike-convert."
      )
    for node in nodes:
      if getattr(node, "lora", None) is not None:
        raise UserError("the base has adapters itself: load the model that they were trained on.")
      node.lora = fdl.Partial(
        layers.LoraBank,
        rank=rank,
        num_adapters=num_adapters,
        dtype=getattr(node, "dtype", jnp.float32),
      )


def _of_roles(graph: fdl.Buildable, roles: Sequence[str]) -> dict[str, list[Any]]:
  """Returns the layers to adapt by role.

  Raises:
    UserError: There is none of a role.
  """
  there: dict[str, list[Any]] = {}
  mixers = select(graph, layers.RecurrentMixer)
  recurrent = {id(node) for mixer in mixers for node in select(mixer, layers.Linear)}
  for node in select(graph, layers.Linear):
    if role := getattr(node, "role", None):
      there.setdefault(f"{RECURRENT if id(node) in recurrent else ''}{role}", []).append(node)
  for node in select(graph, layers.ExpertLinear):
    there.setdefault(f"{EXPERT}{node.role}", []).append(node)
  there[EMBEDDING] = list(select(graph, layers.Embedding))
  found: dict[str, list[Any]] = {}
  for name in roles:
    # A key of LORA_ROLES may include roles that this model does not have.
    own = [role for role in LORA_ROLES.get(name, (name,)) if there.get(role)]
    if not own:
      raise UserError(
        f"LORA_TARGET_LAYERS (roles): no linear map has the role {name!r};"
        f" expected {', '.join(LORA_ROLES)}, or some of {', '.join(sorted(there))}."
      )
    found |= {role: there[role] for role in own}
  if not found:
    raise UserError("roles: expected at least one role of linear maps.")
  return found


def lora_roles(model: nnx.Module) -> dict[str, str]:
  """Returns the role in LORA_TARGET_LAYERS of each linear map of a model, by its name."""
  nodes = {".".join(map(str, path)): node for path, node in nnx.iter_modules(model)}

  def prefix(name: str) -> str:
    parent = nodes.get(name.rpartition(".")[0])
    return RECURRENT if isinstance(parent, layers.RecurrentMixer) else ""

  linears = {name: node for name, node in nodes.items() if isinstance(node, layers.Linear)}
  return {name: prefix(name) + node.role for name, node in linears.items()}


def _check_kind(
  adapted: dict[str, list[Any]], *, dropout: float, dora: bool, undroppable: Sequence[str]
):
  """Raises a UserError if adapters of these layers cannot have dropout or magnitudes.

  Linear maps of the roles `undroppable` are called without a context, or merged with adapters.
  """
  for role in adapted:
    is_linear = role != EMBEDDING and not role.startswith(EXPERT)
    if dora and not is_linear:
      raise UserError(
        f"LORA_DORA: the adapter of {role} has no magnitude: leave {role} out of"
        " LORA_TARGET_LAYERS, or set LORA_DORA=False."
      )
    # That of the embedding has none beside others that do, as in PEFT.
    if dropout and (role.startswith(EXPERT) or role in undroppable):
      raise UserError(
        f"LORA_DROPOUT: the adapter of {role} has no dropout: leave {role} out of"
        " LORA_TARGET_LAYERS, or set LORA_DROPOUT=0 (lora_dropout of PEFT)."
      )
  nodes = [node for of_role in adapted.values() for node in of_role]
  if dora and dropout and any(getattr(node, "dot", None) is not None for node in nodes):
    raise UserError(
      "LORA_DORA with LORA_DROPOUT multiplies by the base weights twice, which matmuls in 8 bits"
      " cannot: leave LORA_DROPOUT or QUANTIZATION out."
    )


def quantize_weights(graph: fdl.Buildable, scheme: str = "int8"):
  """Weight-only quantization of the blocks' linear maps and experts, to evaluate or decode.

  int8 has one scale per output (per head and output in a map that contracts heads); int4 has one
  per 128 weights, nf4 one per 64. Matmuls are in the compute dtype.
  """
  if scheme not in SCHEMES:
    hint = did_you_mean(scheme, SCHEMES) or f" One of {', '.join(SCHEMES)}."
    raise UserError(f"no weight-only quantization {scheme}.{hint}")
  for node in matrices(graph):
    node.scheme, node.dot = SCHEMES[scheme], None
  for node in select(graph, Trainer):
    node.read_only = True
