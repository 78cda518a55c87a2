# SPDX-License-Identifier: Apache-2.0
"""Fiddlers: functions that edit a whole graph; they find nodes by type and role, never by path.

Each takes the root graph and edits it in place; `--fiddler=precision(dtype="float32")` applies one
from the command line. Experiments apply them in a fixed order: qk_norm, multi_token_prediction,
qk_clip, loss, parametrize, rescale, precision, quantize, transformer_engine, lora, attention,
segments, remat, shard_sequences, stack, pipeline.
"""

from paxlike.fiddlers.hyperparameters import change_rate, parametrize
from paxlike.fiddlers.layout import attention, pipeline, remat, segments, shard_sequences, stack
from paxlike.fiddlers.matmuls import (
  DOTS,
  LORA_ROLES,
  SCHEMES,
  lora,
  lora_bank,
  precision,
  quantize,
  quantize_weights,
  transformer_engine,
)
from paxlike.fiddlers.model import (
  decoding,
  loss,
  multi_token_prediction,
  next_token_only,
  qk_clip,
  qk_norm,
  rescale,
  shrink,
  without_teacher,
)
from paxlike.fiddlers.selection import select

__all__ = [
  "DOTS",
  "FIDDLERS",
  "LORA_ROLES",
  "SCHEMES",
  "attention",
  "change_rate",
  "decoding",
  "lora",
  "lora_bank",
  "loss",
  "multi_token_prediction",
  "next_token_only",
  "parametrize",
  "pipeline",
  "precision",
  "qk_clip",
  "qk_norm",
  "quantize",
  "quantize_weights",
  "remat",
  "rescale",
  "segments",
  "select",
  "shard_sequences",
  "shrink",
  "stack",
  "transformer_engine",
  "without_teacher",
]

FIDDLERS = {
  edit.__name__: edit
  for edit in (
    attention,
    shard_sequences,
    decoding,
    quantize_weights,
    lora,
    loss,
    multi_token_prediction,
    parametrize,
    precision,
    qk_clip,
    qk_norm,
    quantize,
    remat,
    rescale,
    shrink,
    stack,
    transformer_engine,
  )
}
