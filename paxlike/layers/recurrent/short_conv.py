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
    b = None if self.b is None else self.b[...]
    y = _convolved(window, self.w[...].astype(jnp.float32), None)
    return _activated(y, b, x.dtype), window[:, 1:]

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

    segments = None if segments_BT is None else extended(segments_BT)
    y = _convolved(extended(x), w.astype(jnp.float32), segments)
    return (_activated(y, b, x.dtype),)


@jax.custom_vjp
def _convolved(x: jax.Array, w: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
  """Returns the float32 sums [B, T, *channels] of inputs [B, S, *channels] times taps.

  S is T + taps - 1. Autodiff would pad the gradient of each tap, and XLA for CPUs computes what it
  pads number by number, ten times as slowly. Here dy is padded once, before anything is computed.
  There is no forward-mode derivative.
  """
  inputs = _seen(x, w.shape[-1], segments_BS)
  return jnp.asarray(sum(x * w[..., tap] for tap, x in enumerate(inputs)))


def _seen(x: jax.Array, taps: int, segments_BS: jax.Array | None) -> list[jax.Array]:
  """Returns what each tap sees, float32 [B, T, *channels]: the last one its own token."""
  T = x.shape[1] - taps + 1
  inputs = [x[:, tap : tap + T].astype(jnp.float32) for tap in range(taps)]
  if segments_BS is None:
    return inputs
  own_BT = segments_BS[:, taps - 1 :]
  return [_masked(segments_BS[:, tap : tap + T] == own_BT, x) for tap, x in enumerate(inputs)]


def _masked(is_seen_BT: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.where(is_seen_BT.reshape(*is_seen_BT.shape, *(1,) * (x.ndim - 2)), x, 0)


def _convolved_forward(
  x: jax.Array, w: jax.Array, segments_BS: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
  return _convolved(x, w, segments_BS), (x, w, segments_BS)


def _convolved_backward(
  saved: tuple[jax.Array, jax.Array, jax.Array | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x, w, segments_BS = saved
  S, taps = x.shape[1], w.shape[-1]
  dw = jnp.stack([(seen * dy).sum((0, 1)) for seen in _seen(x, taps, segments_BS)], axis=-1)

  def padded(x: jax.Array, before: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (before, taps - 1), *[(0, 0)] * (x.ndim - 2)])

  dy_padded = padded(dy, taps - 1)
  parts = []
  for shift in range(taps):
    part = dy_padded[:, shift : shift + S]
    if segments_BS is not None:
      later_BS = padded(segments_BS, 0)[:, shift : shift + S]
      part = _masked(segments_BS == later_BS, part)
    parts.append(part * w[..., taps - 1 - shift])
  return jnp.asarray(sum(parts)).astype(x.dtype), dw, None


_convolved.defvjp(_convolved_forward, _convolved_backward)


def _activated(y: jax.Array, b: jax.Array | None, dtype: ranges.Dtype) -> jax.Array:
  """Returns SiLU of float32 sums."""
  y = y if b is None else y + b.astype(jnp.float32)
  return jax.nn.silu(y).astype(dtype)
