# SPDX-License-Identifier: Apache-2.0
"""A small model, and a batch for it, that tests of several files train."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from paxlike import layers
from paxlike.training import optimizers

SEQ_LEN, VOCAB = 16, 96


def attention(linear: Callable[[str], Callable[..., layers.Linear]]):
  """Attention with 4 heads of width 8, from what makes the linear map of a role."""
  return functools.partial(
    layers.Attention,
    num_heads=4,
    head_dim=8,
    query=linear("query"),
    key=linear("key"),
    value=linear("value"),
    output=linear("output"),
  )


def tiny(
  *,
  scan: bool = False,
  num_layers: int = 2,
  dropout: float = 0.0,
  dtype=np.float32,
  weight_dtype: str = "float32",
  ends: bool = False,
  mtp: layers.MtpKind | None = None,
  dot: Any = None,
  **stack,
) -> layers.Definition:
  """Returns a GPT of `num_layers` layers, width 32, 4 heads; `ends` adds one before and after.

  `mtp` adds two layers for multi-token prediction; `dot` is of the MLPs of the layers at both ends.
  """
  init = functools.partial(layers.gaussian, std=0.1)

  norm = functools.partial(layers.LayerNorm, offset=1.0, dtype=dtype)

  def linear(role, dot=None):
    return functools.partial(
      layers.Linear, role=role, use_bias=True, init=init, dtype=dtype, dot=dot
    )

  mlp = functools.partial(layers.Mlp, hidden_dim=64)

  block = functools.partial(
    layers.Block,
    norm=norm,
    attention=attention(linear),
    mlp=functools.partial(mlp, up=linear("up"), down=linear("down")),
    dropout=functools.partial(layers.Dropout, rate=dropout) if dropout else None,
  )
  of_end = functools.partial(mlp, up=linear("up", dot), down=linear("down", dot))
  single = [functools.partial(block, mlp=of_end)] if ends else []
  further: dict[str, Any] = {"block": block, "num_layers": 2, "loss_weight": 0.3}
  kinds = {
    "parallel": functools.partial(layers.ParallelMtp, **further),
    "sequential": functools.partial(
      layers.SequentialMtp, norm=norm, projection=linear("mtp_projection"), **further
    ),
  }
  model = layers.Decoder(
    vocab_size=VOCAB,
    dim=32,
    embedding=functools.partial(layers.Embedding, init=init, dtype=dtype),
    positions=functools.partial(layers.PositionEmbedding, max_len=SEQ_LEN, init=init, dtype=dtype),
    stack=functools.partial(
      layers.Stack,
      prologue=single,
      pattern=[block],
      repeats=num_layers,
      epilogue=single,
      scan=scan,
      **stack,
    ),
    norm=norm,
    mtp=None if mtp is None else kinds[mtp],
  )
  return layers.Definition(model, dtype=weight_dtype)


def adamw(peak: float = 1.0, **options) -> optimizers.Optimizer:
  """Returns AdamW with a constant rate.

  Its epsilon is so large that an update is nearly in proportion to its gradient: with a small one,
  gradients that are zero but for rounding would count like any other.
  """
  defaults: dict[str, Any] = {
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1.0,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
  }
  schedule = optimizers.constant(peak=peak)
  return optimizers.adamw(learning_rate=schedule, **(defaults | options))


def batch(size: int = 8, *, packed: bool = False, seed: int = 0) -> dict[str, Any]:
  """Returns random tokens, some without weight."""
  random = np.random.default_rng(seed)
  tokens = random.integers(0, VOCAB, (size, SEQ_LEN + 1)).astype(np.int32)
  weights = (random.random((size, SEQ_LEN)) < 0.8).astype(np.float32)
  arrays = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
  if packed:
    starts = random.random((size, SEQ_LEN)) < 0.2
    segments = 1 + np.cumsum(starts, 1)
    index = np.arange(SEQ_LEN)
    first = np.maximum.accumulate(np.where(starts, index, 0), 1)
    arrays |= {"segments": segments.astype(np.int32), "positions": (index - first).astype(np.int32)}
  return arrays


def place(position: int) -> dict[str, Any]:
  """A place in data, as checkpoints hold."""
  return {"epoch": 0, "position": position, "fingerprint": "some data"}
