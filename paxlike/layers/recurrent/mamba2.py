# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060): a recurrence with a decay per head and token."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import module
from paxlike.layers.attention.sharded_kernel import repeated_keys
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.norm import GroupedRmsNorm
from paxlike.layers.recurrent import shards, ssd
from paxlike.layers.recurrent.cache import RecurrentCache
from paxlike.layers.recurrent.mixer import RecurrentMixer
from paxlike.layers.recurrent.short_conv import ShortConv

_STEPS = (0.001, 0.1)  # Range of the steps of initial weights, at inputs of zero.
_RATES = (1.0, 16.0)  # Range of the initial rates of decay.


@configurable
class Mamba2(RecurrentMixer):
  """Mamba-2 over [B, T, D]; see `ssd` for the recurrence.

  With the paper's x, B, C, z, delta, A and D as value, key, query, output_gate, step, rate and
  skip:

      decay_t = -rate * step_t
      y_t = norm((state_t @ query_t + skip * value_t) * silu(output_gate_t))

  The value of the recurrence is step_t * value_t. Values, keys and queries pass through a short
  convolution.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_heads: ranges.Size,
    head_dim: ranges.Size,
    state_dim: ranges.Size,
    num_groups: ranges.Size = 1,
    output_gate: Callable[..., Linear],
    value: Callable[..., Linear],
    key: Callable[..., Linear],
    query: Callable[..., Linear],
    step: Callable[..., Linear],
    output: Callable[..., Linear],
    conv: Callable[[Mapping[str, int]], ShortConv],
    norm: Callable[..., GroupedRmsNorm] | None = None,
    least_step: ranges.NonNegativeFloat = 0.0,
    chunk: ranges.Size = 128,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_heads: N.
      head_dim: H.
      state_dim: S.
      num_groups: G; heads of a group share keys and queries.
      output_gate: D -> N x H, whose SiLU multiplies the heads' outputs.
      value: D -> N x H.
      key: D -> G x S.
      query: D -> G x S.
      step: D -> N.
      output: N x H -> D.
      conv: The short convolution; called with the dims of values, keys and queries.
      norm: Called with the dims N and H, and G; None: no norm.
      least_step: Lower bound of the steps.
      chunk: Tokens that are computed together by matmuls.

    Raises:
      UserError: `num_groups` does not divide `num_heads`.
    """
    if num_heads % num_groups:
      raise ArgumentError(
        f"{num_groups=} of Mamba-2 does not divide {num_heads=}: each group has as many heads."
      )
    self.num_heads, self.value_dim, self.key_dim = num_heads, head_dim, state_dim
    self.num_groups = num_groups
    self.least_step = least_step
    self.chunk = chunk
    model = {"model": dim}
    heads = {"heads": num_heads, "head": head_dim}
    groups = {"kv_heads": num_groups, "head": state_dim}
    self.output_gate = output_gate(model, heads)
    self.value = value(model, heads)
    self.key = key(model, groups)
    self.query = query(model, groups)
    self.step = step(model, {"heads": num_heads})
    self.output = output(heads, model)
    self.value_conv, self.key_conv, self.query_conv = conv(heads), conv(groups), conv(groups)
    self.norm = None if norm is None else norm(heads, num_groups)
    self.step_bias = self.weight({"heads": num_heads}, init=_initial_steps)
    self.log_rate = self.weight({"heads": num_heads}, init=_initial_rates)
    self.skip = self.weight({"heads": num_heads}, init=module.ones)

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: RecurrentCache | None = None
  ) -> tuple[jax.Array, RecurrentCache | None, Aux]:
    """See `RecurrentMixer`."""
    maps = (self.value, self.key, self.query)
    inputs = [
      mesh.constrain(linear(x_BTD, context), "batch", "time", dim, None)
      for linear, dim in zip(maps, ("heads", "kv_heads", "kv_heads"), strict=True)
    ]
    steps_BTN = self._steps(x_BTD, context)
    if cache is not None and x_BTD.shape[1] == 1:
      y_BTNH, v_BTNH, cache = self._decode(inputs, steps_BTN, context, cache)
    else:
      y_BTNH, v_BTNH, cache = self._recur(inputs, steps_BTN, context, cache)
    y_BTNH += v_BTNH.astype(jnp.float32) * self.skip[...].astype(jnp.float32)[:, None]
    y_BTNH *= jax.nn.silu(self.output_gate(x_BTD, context).astype(jnp.float32))
    if self.norm is not None:
      y_BTNH = self.norm(y_BTNH)
    y_BTNH = mesh.constrain(y_BTNH.astype(self.output.dtype), "batch", "time", "heads", None)
    return self.output(y_BTNH, context), cache, none()

  def empty_cache(self, batch: int, length: int, dtype: Any) -> RecurrentCache:
    """See `RecurrentMixer`."""
    del length
    state = jnp.zeros((batch, self.num_heads, self.value_dim, self.key_dim), jnp.float32)
    return RecurrentCache.empty(tuple(conv.empty(batch, dtype) for conv in self._convs), state)

  @property
  def _convs(self) -> tuple[ShortConv, ShortConv, ShortConv]:
    return self.value_conv, self.key_conv, self.query_conv

  def _steps(self, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns the float32 steps [B, T, N]; 0 for padding, which then leaves the state as it is."""
    bias_N = self.step_bias[...].astype(jnp.float32)
    steps_BTN = jax.nn.softplus(self.step(x_BTD, context).astype(jnp.float32) + bias_N)
    if self.least_step:
      steps_BTN = jnp.maximum(steps_BTN, self.least_step)
    if context.positions_BT is None:
      return steps_BTN
    return jnp.where(context.positions_BT[..., None] >= 0, steps_BTN, 0)

  def _decays(self, steps_BTN: jax.Array) -> jax.Array:
    return -jnp.exp(self.log_rate[...].astype(jnp.float32)) * steps_BTN

  def _decode(
    self,
    inputs: list[jax.Array],
    steps_B1N: jax.Array,
    context: Context,
    cache: RecurrentCache,
  ) -> tuple[jax.Array, jax.Array, RecurrentCache]:
    """Returns (float32 y_B1NH, v_B1NH, the updated cache) of one token of each sequence."""
    assert context.positions_BT is not None
    given = zip(self._convs, inputs, cache.inputs, strict=True)
    convolved, last = zip(*(conv.step(x, before) for conv, x, before in given), strict=True)
    v_BNH, k_BGS, q_BGS = (x[:, 0].astype(jnp.float32) for x in convolved)
    steps_BN, decays_BN = steps_B1N[:, 0], self._decays(steps_B1N)[:, 0]
    y_BNH, state = ssd.step(cache.state, v_BNH * steps_BN[..., None], decays_BN, k_BGS, q_BGS)
    return y_BNH[:, None], convolved[0], cache.updated(last, state, context.positions_BT)

  def _recur(
    self,
    inputs: list[jax.Array],
    steps_BTN: jax.Array,
    context: Context,
    cache: RecurrentCache | None,
  ) -> tuple[jax.Array, jax.Array, RecurrentCache | None]:
    """Returns (float32 y_BTNH, v_BTNH, the updated cache) of whole sequences."""
    given = zip(self._convs, inputs, strict=True)
    v_BTNH, k_BTGS, q_BTGS = (conv(x, context.segments_BT) for conv, x in given)
    scaled_BTNH = (v_BTNH.astype(jnp.float32) * steps_BTN[..., None]).astype(v_BTNH.dtype)
    (B, T, N, H), S = v_BTNH.shape, self.key_dim
    segments_BT = context.segments_BT
    if segments_BT is None:
      segments_BT = jnp.zeros((B, T), jnp.int32)
    if sizes := mesh.sizes_here(mesh.AXES):
      k_BTGS, q_BTGS = repeated_keys(N, k_BTGS, q_BTGS, sizes)
    heads, groups = ("batch", "time", "heads", None), ("batch", "time", "kv_heads", None)
    with jax.named_scope("recurrence"):
      y_BTNH, state = shards.on_shards(
        functools.partial(ssd.chunked, chunk=self.chunk),
        [
          (scaled_BTNH, heads),
          (self._decays(steps_BTN), heads[:3]),
          (k_BTGS, groups),
          (q_BTGS, groups),
          (segments_BT, heads[:2]),
        ],
        [(v_BTNH.shape, heads), ((B, N, H, S), ("batch", "heads", None, None))],
      )
    if cache is not None:
      positions_BT = context.positions_BT
      assert positions_BT is not None
      pairs = zip(self._convs, inputs, strict=True)
      last = tuple(conv.last_inputs(x, positions_BT) for conv, x in pairs)
      cache = cache.updated(last, state, positions_BT)
    return y_BTNH, v_BTNH, cache


def _initial_steps(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns biases whose softplus is drawn log-uniformly from `_STEPS`."""
  del fan_in
  least, most = jnp.log(jnp.array(_STEPS))
  steps = jnp.exp(jax.random.uniform(key, shape, minval=least, maxval=most))
  return steps + jnp.log(-jnp.expm1(-steps))


def _initial_rates(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns logarithms of rates drawn uniformly from `_RATES`."""
  del fan_in
  least, most = _RATES
  return jnp.log(jax.random.uniform(key, shape, minval=least, maxval=most))
