# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464), linear attention with the delta rule."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import module
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.recurrent import delta_rule, shards
from paxlike.layers.recurrent.cache import RecurrentCache
from paxlike.layers.recurrent.mixer import RecurrentMixer
from paxlike.layers.recurrent.short_conv import ShortConv

_EPSILON = 1e-6  # Added to the squared norms of queries and keys.


@configurable
class GatedDeltaNet(RecurrentMixer):
  """Linear attention with a gated decay of the state and the delta rule for its update.

  Queries, keys and values pass through a short convolution; queries and keys are normalized. The
  state of a head is a matrix [H, V], where V is the width of a value. Each token first decays it.
  Then the value that the state has for the token's key is moved towards the token's value by the
  share beta, and the query reads the state. The heads' outputs are normalized and gated.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_heads: ranges.Size,
    num_key_heads: ranges.Size,
    key_dim: ranges.Size,
    value_dim: ranges.Size,
    query: Callable[..., Linear],
    key: Callable[..., Linear],
    value: Callable[..., Linear],
    output_gate: Callable[..., Linear],
    beta: Callable[..., Linear],
    decay: Callable[..., Linear],
    output: Callable[..., Linear],
    conv: Callable[..., ShortConv],
    norm: Callable[..., Any],
    chunk: ranges.Size = 64,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_heads: N, the number of states, values and gates.
      num_key_heads: K, the number of queries and keys; each serves N / K states.
      key_dim: H, the width of a query and of a key.
      value_dim: V, the width of a value.
      query: D -> K x H.
      key: D -> K x H.
      value: D -> N x V.
      output_gate: D -> N x V, whose SiLU multiplies the heads' outputs.
      beta: D -> N, whose sigmoid is the share by which a value replaces the one in the state.
      decay: D -> N; its softplus times a rate per head is the logarithm of the decay.
      output: N x V -> D.
      conv: The short convolution of queries, keys and values.
      norm: Applied to each head's output.
      chunk: Tokens that training and prefill compute together; a power of two.
    """
    if num_heads % num_key_heads:
      raise ArgumentError(
        f"{num_key_heads=} does not divide {num_heads=}: each key serves the same number of values."
      )
    if chunk & (chunk - 1):
      raise ArgumentError(f"{chunk=} must be a power of two.")
    self.num_heads, self.num_key_heads = num_heads, num_key_heads
    self.key_dim, self.value_dim = key_dim, value_dim
    self.chunk = chunk
    keys = {"kv_heads": num_key_heads, "head": key_dim}
    values = {"heads": num_heads, "head": value_dim}
    self.query = query({"model": dim}, keys)
    self.key = key({"model": dim}, keys)
    self.value = value({"model": dim}, values)
    self.output_gate = output_gate({"model": dim}, values)
    self.beta = beta({"model": dim}, {"heads": num_heads})
    self.decay = decay({"model": dim}, {"heads": num_heads})
    self.output = output(values, {"model": dim})
    self.query_conv, self.key_conv, self.value_conv = conv(keys), conv(keys), conv(values)
    self.norm = norm(value_dim, over="head")
    self.log_rate = self.weight({"heads": num_heads}, init=_initial_rates)
    self.decay_bias = self.weight({"heads": num_heads}, init=module.ones)

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: RecurrentCache | None = None
  ) -> tuple[jax.Array, RecurrentCache | None, Aux]:
    """See `RecurrentMixer`."""
    q_BTKH = mesh.constrain(self.query(x_BTD, context), "batch", "time", "kv_heads", None)
    k_BTKH = mesh.constrain(self.key(x_BTD, context), "batch", "time", "kv_heads", None)
    v_BTNV = mesh.constrain(self.value(x_BTD, context), "batch", "time", "heads", None)
    gates = self.decay(x_BTD, context), self.beta(x_BTD, context)
    with jax.named_scope("gated_delta_rule"):
      if cache is None:
        # The backward pass recomputes the arrays of chunks, many times the size of the inputs.
        mixed = jax.checkpoint(self._mixed)(q_BTKH, k_BTKH, v_BTNV, *gates, context)
        return self._project(mixed[0], x_BTD, context), None, none()
      assert context.positions_BT is not None
      if x_BTD.shape[1] == 1:
        y_BTNV, cache = self._step(q_BTKH, k_BTKH, v_BTNV, *gates, context.positions_BT, cache)
      else:
        y_BTNV, state = self._mixed(q_BTKH, k_BTKH, v_BTNV, *gates, context)
        pairs = zip(self._convs, (q_BTKH, k_BTKH, v_BTNV), strict=True)
        inputs = tuple(conv.last_inputs(x, context.positions_BT) for conv, x in pairs)
        cache = cache.updated(inputs, state, context.positions_BT)
    return self._project(y_BTNV, x_BTD, context), cache, none()

  def empty_cache(self, batch: int, length: int, dtype: Any) -> RecurrentCache:
    """See `RecurrentMixer`."""
    del length
    inputs = tuple(conv.empty(batch, dtype) for conv in self._convs)
    return RecurrentCache.empty(inputs, self._first(batch))

  @property
  def chunk_flops(self) -> float:
    """See `RecurrentMixer`; the transitions of chunks are matrices, which are multiplied."""
    rows, dims = self.chunk + 2 * self.key_dim, self.key_dim + self.value_dim
    scan = 2 * self.key_dim**2 * self.value_dim / self.chunk
    return super().chunk_flops + self.num_heads * (2 * rows * dims + scan)

  @property
  def chunk_numbers(self) -> float:
    """See `RecurrentMixer`; a chunk has a transition and its gradient."""
    of_transition = self.key_dim**2 / self.chunk
    return super().chunk_numbers + self.num_heads * (2 * self.chunk + 2 * of_transition)

  @property
  def exchanged(self) -> float:
    """See `RecurrentMixer`."""
    return self.num_heads * self.key_dim * (self.key_dim + self.value_dim)

  @property
  def _convs(self) -> tuple[ShortConv, ShortConv, ShortConv]:
    return self.query_conv, self.key_conv, self.value_conv

  def _first(self, batch: int) -> jax.Array:
    """Returns the state before the first token, [B, N, H, V]."""
    return jnp.zeros((batch, self.num_heads, self.key_dim, self.value_dim), jnp.float32)

  def _mixed(
    self,
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    context: Context,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (the heads' outputs [B, T, N, V], the state after the last token)."""
    segments_BT = context.segments_BT
    given = zip(self._convs, (q_BTKH, k_BTKH, v_BTNV), strict=True)
    q_BTKH, k_BTKH, v_BTNV = (conv(x, segments_BT) for conv, x in given)
    g_BTN, beta_BTN = self._gates(decay_BTN, beta_BTN, context.positions_BT)
    if mesh.sizes_here(mesh.AXES).get("tensor", 1) > 1:
      q_BTKH, k_BTKH = self._repeated(q_BTKH), self._repeated(k_BTKH)
    tokens, of_state = ("batch", "time"), ("batch", "heads", None, None)
    first = self._first(len(v_BTNV))
    y_BTNV, state = shards.on_shards(
      functools.partial(delta_rule.chunked, chunk=self.chunk),
      [
        (v_BTNV, (*tokens, "heads", None)),
        (_normalized(q_BTKH) * self.key_dim**-0.5, (*tokens, "kv_heads", None)),
        (_normalized(k_BTKH), (*tokens, "kv_heads", None)),
        (g_BTN, (*tokens, "heads")),
        (beta_BTN, (*tokens, "heads")),
        (segments_BT, tokens),
        (first, of_state),
      ],
      [(v_BTNV.shape, (*tokens, "heads", None)), (first.shape, of_state)],
    )
    return y_BTNV, state

  def _repeated(self, x_BTKH: jax.Array) -> jax.Array:
    """Returns queries or keys, one for each of N if the axis `tensor` shards N and not K."""
    sizes = mesh.sizes_here(mesh.AXES)
    if self.num_key_heads % sizes["tensor"] == 0 or self.num_heads % sizes["tensor"]:
      return x_BTKH
    return jnp.repeat(x_BTKH, self.num_heads // self.num_key_heads, axis=2)

  def _step(
    self,
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTNV: jax.Array,
    decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    positions_BT: jax.Array,
    cache: RecurrentCache,
  ) -> tuple[jax.Array, RecurrentCache]:
    """Returns (the heads' outputs of one token, the updated cache)."""
    given = zip(self._convs, (q_BTKH, k_BTKH, v_BTNV), cache.inputs, strict=True)
    outputs, inputs = zip(*(conv.step(x, before) for conv, x, before in given), strict=True)
    g_BTN, beta_BTN = self._gates(decay_BTN, beta_BTN, positions_BT)
    group = self.num_heads // self.num_key_heads
    q_BNH, k_BNH = (jnp.repeat(_normalized(x[:, 0]), group, axis=1) for x in outputs[:2])
    q_BNH, v_BNV = q_BNH * self.key_dim**-0.5, outputs[2][:, 0]
    y_BNV, state = delta_rule.step(q_BNH, k_BNH, v_BNV, g_BTN[:, 0], beta_BTN[:, 0], cache.state)
    return y_BNV[:, None], cache.updated(inputs, state, positions_BT)

  def _gates(
    self, decay_BTN: jax.Array, beta_BTN: jax.Array, positions_BT: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (the logarithm of the decay, beta); both are 0 at position -1."""
    g_BTN = jax.nn.softplus(decay_BTN.astype(jnp.float32) + self.decay_bias[...])
    g_BTN = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * g_BTN
    beta_BTN = jax.nn.sigmoid(beta_BTN.astype(jnp.float32))
    if positions_BT is not None:
      is_token_BT1 = positions_BT[..., None] >= 0
      g_BTN, beta_BTN = jnp.where(is_token_BT1, g_BTN, 0), jnp.where(is_token_BT1, beta_BTN, 0)
    return g_BTN, beta_BTN

  def _project(self, y_BTNV: jax.Array, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns y_BTD for the outputs of the heads."""
    gate_BTNV = mesh.constrain(self.output_gate(x_BTD, context), "batch", "time", "heads", None)
    gate_BTNV = jax.nn.silu(gate_BTNV.astype(jnp.float32))
    return self.output((self.norm(y_BTNV) * gate_BTNV).astype(x_BTD.dtype), context)


def _normalized(x: jax.Array) -> jax.Array:
  """Returns x divided by its norm over the last dim, in its dtype."""
  y = x.astype(jnp.float32)
  return (y * jax.lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + _EPSILON)).astype(x.dtype)


def _initial_rates(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns the logarithms of rates drawn uniformly from 0.01 to 16."""
  del fan_in
  return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))
