# SPDX-License-Identifier: Apache-2.0
"""Fiddlers of how matmuls compute: precision, quantization, adapters."""

import copy
from collections.abc import Sequence

import fiddle as fdl
import jax.numpy as jnp

from paxlike import layers
from paxlike.config import ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.fiddlers.selection import ATTENTION, BLOCK, MLP, matrices, select
from paxlike.training.trainer import Trainer

DOTS = {
  "fp8": layers.Fp8,
  "fp8_delayed": layers.DelayedFp8,
  "mxfp8": layers.MxFp8,
  "int8": layers.Int8,
}
# Schemes of `quantize_weights`. In the base of `lora`, int8 has a scale per block of 64 instead.
SCHEMES = {
  "int8": layers.weight_only.int8_columns,
  "int4": layers.weight_only.int4,
  "nf4": layers.weight_only.nf4,
}
# Values of LORA_TARGET_LAYERS.
LORA_ROLES = {"all": BLOCK, "attention": ATTENTION, "mlp": MLP}


def precision(graph: fdl.Buildable, dtype: ranges.ComputeDtype = "bfloat16"):
  """Sets the compute dtype of all layers but routers; weights, statistics and loss stay float32."""
  computing = (
    layers.Linear,
    layers.Lora,
    layers.ExpertLinear,
    layers.Embedding,
    layers.PositionEmbedding,
    layers.LayerNorm,
    layers.RmsNorm,
    layers.JointRmsNorm,
  )
  for kind in computing:
    for node in select(graph, kind):
      if getattr(node, "role", None) != "router":
        node.dtype = jnp.dtype(dtype)


def quantize(graph: fdl.Buildable, kind: str = "fp8"):
  """Runs the matmuls of the blocks' linear maps and experts in 8 bits; `kind` is a key of `DOTS`.

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
  roles: Sequence[str] = LORA_ROLES["all"],
  base: str | None = None,
):
  """Adds LoRA to the linear maps of these roles, and freezes all other weights.

  The adapters' scale is alpha / rank, or 1 if alpha is None.
  `base`, int8 or nf4, is the weight-only quantization of the blocks' linear maps and experts.
  """
  adapter = fdl.Partial(layers.Lora, rank=rank, scale=1.0 if alpha is None else alpha / rank)
  if dropout:
    adapter.dropout = fdl.Partial(layers.Dropout, rate=dropout)
  if not roles:
    raise UserError("roles: expected at least one role of linear maps.")
  adapted = list(select(graph, layers.Linear, *roles))
  linears = select(graph, layers.Linear)
  there: set[str] = {role for node in linears if (role := getattr(node, "role", None))}
  absent = [role for role in roles if role not in there]
  # A key of LORA_ROLES may include roles that this model does not have.
  if absent and (not adapted or tuple(roles) not in map(tuple, LORA_ROLES.values())):
    raise UserError(
      f"LORA_TARGET_LAYERS (roles): no linear map has the role {' or '.join(map(repr, absent))};"
      f" expected {', '.join(LORA_ROLES)}, or some of {', '.join(sorted(there))}."
    )
  for node in adapted:
    node.lora = copy.deepcopy(adapter)
    node.lora.dtype = getattr(node, "dtype", jnp.float32)
  if base is not None:
    if base not in (schemes := ("int8", "nf4")):
      raise UserError(f"no scheme {base} for the base.{did_you_mean(base, schemes)}")
    for node in matrices(graph):
      node.scheme = getattr(layers.weight_only, base)
  for node in select(graph, Trainer):
    node.trained = layers.lora.WEIGHTS


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
