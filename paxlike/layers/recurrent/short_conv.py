# SPDX-License-Identifier: Apache-2.0
"""A causal depthwise convolution over the last few tokens, before the recurrence of a mixer."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import module
from paxlike.layers.recurrent import shards


@configurable
class ShortConv(module.Module):
  """SiLU of a causal convolution of each channel by itself, within each document.

  Attributes:
    taps: Tokens that an output depends on: its own and the `taps - 1` before it.
  """

  def __init__(
    self,
    channels: Mapping[str, int],
    *,
    taps: ranges.Size = 4,
    use_bias: bool = False,
    init: module.Initializer = module.gaussian_fan_in,
  ):
    """`channels` has the name and size of each dim of a token, such as heads and head."""
    self.taps = taps
    self._dims = tuple(channels)
    self._shape = tuple(channels.values())
    self.w = self.weight({**channels, "tap": taps}, init=init, fan_in=("tap",))
    self.b = self.weight(channels, init=module.zeros) if use_bias else None

  @jax.named_scope("short_conv")
  def __call__(self, x: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
    """Returns y [B, T, *channels] in the dtype of x; computes in float32.

    Raises:
      UserError: Sequences are sharded into fewer than `taps - 1` tokens.
    """
    weights = (self.w[...], None if self.b is None else self.b[...])
    if not mesh.is_sharded("time"):
      return self._apply(x, segments_BT, *weights, num_devices=1)[0]
    tokens, dims = ("batch", "time"), self._dims
    inputs = [(x, (*tokens, *dims)), (segments_BT, tokens), (weights[0], (*dims, "tap"))]
    given = [*inputs, (weights[1], dims)]
    return shards.on_shards(self._apply, given, [(x.shape, (*tokens, *dims))])[0]

  def step(self, x: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (y [B, 1, *channels] of one token, the inputs before the next token).

    `inputs` [B, taps - 1, *channels] are those before x [B, 1, *channels].
    """
    window = jnp.concatenate([inputs.astype(x.dtype), x], axis=1)
    last = self.taps - 1
    shifted = [window[:, last - shift : last - shift + 1] for shift in range(self.taps)]
    b = None if self.b is None else self.b[...]
    return _activated(shifted, self.w[...], b, x.dtype), window[:, 1:]

  def empty(self, batch: int, dtype: ranges.Dtype) -> jax.Array:
    """Returns the inputs before the first token."""
    return jnp.zeros((batch, self.taps - 1, *self._shape), dtype)

  def last_inputs(self, x: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Returns the inputs before the token that follows x [B, T, *channels]; see `step`.

    Tokens at position -1, which are the last ones, are left out.
    """
    counts_B1 = (positions_BT >= 0).sum(axis=1, keepdims=True)
    indexes = counts_B1 - jnp.arange(self.taps - 1, 0, -1)
    indexes = indexes.reshape(*indexes.shape, *(1,) * (x.ndim - 2))
    found = jnp.take_along_axis(x, jnp.maximum(indexes, 0), axis=1)
    return jnp.where(indexes >= 0, found, jnp.zeros_like(found))

  def _apply(
    self,
    x: jax.Array,
    segments_BT: jax.Array | None,
    w: jax.Array,
    b: jax.Array | None,
    *,
    num_devices: int,
  ) -> tuple[jax.Array]:
    """Returns (y,) of a device's tokens."""
    T, halo = x.shape[1], self.taps - 1
    if num_devices > 1 and halo > T:
      raise ArgumentError(
        f"sequences are sharded into {T} tokens over the mesh axis context, fewer than the {halo}"
        " that a convolution needs: use longer sequences, or a smaller axis."
      )

    def extended(x: jax.Array) -> jax.Array:
      if num_devices > 1:
        near = shards.from_previous(x[:, -halo:] if halo else x[:, :0], num_devices)
      else:
        near = jnp.zeros_like(x, shape=(len(x), halo, *x.shape[2:]))
      return jnp.concatenate([near, x], axis=1)

    def shifted(x: jax.Array) -> list[jax.Array]:
      x = extended(x)
      return [x[:, halo - shift : halo - shift + T] for shift in range(self.taps)]

    inputs = shifted(x)
    if segments_BT is not None:
      trailing = (1,) * (x.ndim - 2)
      same = (before == segments_BT for before in shifted(segments_BT))
      masks = [is_same.reshape(*is_same.shape, *trailing) for is_same in same]
      inputs = [jnp.where(m, x, jnp.zeros_like(x)) for m, x in zip(masks, inputs, strict=True)]
    return (_activated(inputs, w, b, x.dtype),)


def _activated(
  shifted: list[jax.Array], w: jax.Array, b: jax.Array | None, dtype: ranges.Dtype
) -> jax.Array:
  """Returns SiLU of the sum of inputs times taps; shifted[i] is the input i tokens before."""
  w = w.astype(jnp.float32)
  taps = w.shape[-1]
  y = sum(x.astype(jnp.float32) * w[..., taps - 1 - i] for i, x in enumerate(shifted))
  y = y if b is None else y + b.astype(jnp.float32)
  return jax.nn.silu(jnp.asarray(y)).astype(dtype)
