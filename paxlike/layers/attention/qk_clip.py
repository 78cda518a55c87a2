# SPDX-License-Identifier: Apache-2.0
"""QK-clip: after a step, query and key weights of heads with too large logits are scaled down.

Source: Kimi Team, 2025, "Kimi K2" (arXiv:2507.20534), section 2.1, which calls Muon with it
MuonClip.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.attention.kernels import AttentionOptions
from paxlike.layers.attention.max_logit import max_logits
from paxlike.layers.module import Definition, Module, Params

# Weight of an attention layer -> factors of its last two dims, which are heads and their width.
Factors = dict[str, jax.Array]


@configurable
class QkClip(Module):
  """Records each head's largest attention logit, of the whole batch, in every training step."""

  def __init__(self, num_heads: ranges.Size, *, threshold: ranges.PositiveFloat):
    """`threshold` is the largest logit that a head may have without being scaled down."""
    self.threshold = threshold
    self.largest = self.statistic({"heads": num_heads}, update=_newest)

  def __call__(
    self,
    y_BTNH: jax.Array,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    **options: Unpack[AttentionOptions],
  ) -> jax.Array:
    """Returns the kernel's output y_BTNH. Its backward pass records the logits of the kernel."""
    return self.record(y_BTNH, max_logits(q_BTNH, k_BSKH, **options))

  def record(self, y_BTNH: jax.Array, largest_N: jax.Array) -> jax.Array:
    """Returns y_BTNH. Its backward pass records the largest logits, which have no gradient."""
    return _recording(self.largest[...], largest_N, y_BTNH)

  def factors(self, largest: jax.Array) -> jax.Array:
    """Returns the factors of the logits of heads, given their largest ones, [..., N]."""
    return jnp.minimum(1.0, self.threshold / jnp.maximum(largest, 1e-30))


def _newest(old: jax.Array, new: jax.Array) -> jax.Array:
  del old
  return new


@jax.custom_vjp
def _recording(statistic: jax.Array, value: jax.Array, y: jax.Array) -> jax.Array:
  """Returns y; the cotangent of `statistic` is `value`."""
  del statistic, value
  return y


def _forward(statistic: jax.Array, value: jax.Array, y: jax.Array) -> Any:
  del statistic
  return y, value


def _backward(value: jax.Array, cotangent: jax.Array) -> Any:
  return value, jnp.zeros_like(value), cotangent


_recording.defvjp(_forward, _backward)


def clipped(definition: Definition, params: Params, extra: Mapping[str, jax.Array]) -> Params:
  """Returns the weights after a step, scaled by QK-clip; `extra` has the step's largest logits.

  `qk_factors` of an attention layer names the weights and their factors.

  Raises:
    UserError: One of them is frozen.
  """
  new = dict(params)
  modules: Any = nnx.iter_modules(definition.module)
  for path, module in modules:
    if getattr(module, "qk_clip", None) is None:
      continue
    place = ".".join(map(str, path))
    factors: Factors = module.qk_factors(extra[f"{place}.qk_clip.largest"])
    for name, factor in factors.items():
      if f"{place}.{name}.w" not in new:
        raise UserError(
          f"QK-clip scales {place}.{name}.w, which is frozen: leave it out, or train the weight."
        )
      for weight in (f"{place}.{name}.w", f"{place}.{name}.b"):
        if weight in new:
          new[weight] = _scaled(new[weight], factor)
  return new


def is_in(definition: Definition) -> bool:
  """Returns whether an attention layer has QK-clip."""
  return any(isinstance(module, QkClip) for _, module in nnx.iter_modules(definition.module))


def largest(extra: Mapping[str, jax.Array]) -> jax.Array | None:
  """Returns the largest logit of all heads and layers; None without QK-clip."""
  found = [x.max() for name, x in extra.items() if name.endswith("qk_clip.largest")]
  return jnp.stack(found).max() if found else None


def _scaled(w: jax.Array, factor: jax.Array) -> jax.Array:
  """Multiplies a weight; both begin with the dims of stacked layers, and end with heads."""
  stacked = factor.shape[:-2]
  between = (1,) * (w.ndim - factor.ndim)
  factor = factor.reshape(*stacked, *between, *factor.shape[-2:])
  return (w.astype(jnp.float32) * factor).astype(w.dtype)


def grouped(factors: jax.Array, num_kv_heads: int) -> tuple[jax.Array, jax.Array]:
  """Returns the factors [..., N, 1] of query heads and [..., K, 1] of key heads.

  The query heads of a key head share the smallest of their factors. Its square root scales the key
  head and each of the query heads.
  """
  *stacked, N = factors.shape
  groups = factors.reshape(*stacked, num_kv_heads, N // num_kv_heads)
  least = jnp.sqrt(groups.min(-1))
  query = jnp.broadcast_to(least[..., None], groups.shape).reshape(*stacked, N)
  return query[..., None], least[..., None]
