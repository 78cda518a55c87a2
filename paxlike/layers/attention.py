# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention (Vaswani et al., 2017), keys and values grouped (Ainslie et al., 2023)."""

import math
from collections.abc import Callable

import jax

from paxlike import mesh
from paxlike.layers import attention_kernels
from paxlike.layers.context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module


class Attention(Module):
  """Causal self-attention over [B, T, D]."""

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    query: Callable[..., Linear],
    key: Callable[..., Linear],
    value: Callable[..., Linear],
    output: Callable[..., Linear],
    kernel: attention_kernels.Kernel = attention_kernels.xla,
  ):
    self.num_heads = num_heads
    self.head_dim = head_dim
    self.kernel = kernel
    heads = {"heads": num_heads, "head": head_dim}
    kv_heads = {"kv_heads": num_kv_heads or num_heads, "head": head_dim}
    self.query = query({"model": dim}, heads)
    self.key = key({"model": dim}, kv_heads)
    self.value = value({"model": dim}, kv_heads)
    self.output = output(heads, {"model": dim})

  def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
    q_BTNH = mesh.constrain(self.query(x_BTD), "batch", "time", "heads", None)
    k_BTKH = mesh.constrain(self.key(x_BTD), "batch", "time", "kv_heads", None)
    v_BTKH = mesh.constrain(self.value(x_BTD), "batch", "time", "kv_heads", None)
    y_BTNH = self.kernel(
      q_BTNH,
      k_BTKH,
      v_BTKH,
      scale=1 / math.sqrt(self.head_dim),
      segments_BT=context.segments_BT,
    )
    return self.output(y_BTNH)

  def score_flops(self, num_tokens: int) -> int:
    """Returns the FLOPs per token of logits and weighted values in one unmasked forward pass."""
    return 4 * num_tokens * self.num_heads * self.head_dim
