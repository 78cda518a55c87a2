# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, in chunks of tokens by matmuls, or token by token.

S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and y_t = S_t^T q_t, for each head, with
a_t = exp(g_t). In a chunk, the values that tokens add to the state solve a triangular system
(the WY representation; Yang et al., 2024, arXiv:2406.06484 and arXiv:2412.06464).

J chunks have T queries and S keys each; V is the width of a value. Matmuls have operands in the
dtype of the values, and sum in float32; decays, the triangular system and states are in float32.
"""

import functools

import jax
import jax.numpy as jnp

from paxlike.layers.recurrent import chunk_scan, shards

_BASE = 8  # Triangular blocks of this size are inverted by substitution.


def chunked(
  v_BTNV: jax.Array,
  q_BTKH: jax.Array,
  k_BTKH: jax.Array,
  g_BTN: jax.Array,
  beta_BTN: jax.Array,
  segments_BT: jax.Array | None,
  first_BNHV: jax.Array,
  *,
  chunk: int,
  num_devices: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y [B, T, N, V] of a device's tokens, the state after the last token of all devices).

  Args:
    v_BTNV: Values.
    q_BTKH: Queries; each head of them serves N / K heads of values.
    k_BTKH: Keys, of norm at most 1.
    g_BTN: Logarithms of the decay, at most 0.
    beta_BTN: From 0 to 1.
    segments_BT: See `Context`; the state is reset where a document begins.
    first_BNHV: The state before the first token of the sequence.
    chunk: Tokens of a chunk, a power of two.
    num_devices: The number of devices that share the sequence; see `shards.on_shards`.
  """
  B, length, K, H = k_BTKH.shape
  N, V = v_BTNV.shape[2:]
  dtype = v_BTNV.dtype
  chunk = chunk_scan.size(chunk, length)
  grouped = (K, N // K)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  v_JBKGSV = jnp.moveaxis(chunk_scan.split(v_BTNV.reshape(B, length, *grouped, V), chunk), 2, 4)
  q_JBKTH, k_JBKSH = (jnp.moveaxis(chunk_scan.split(x, chunk), 2, 3) for x in (q_BTKH, k_BTKH))
  g_JBKGT, beta_JBKGT = (
    jnp.moveaxis(chunk_scan.split(x.reshape(B, length, *grouped), chunk), 2, 4)
    for x in (g_BTN, beta_BTN)
  )
  total = jnp.cumsum(g_JBKGT, axis=-1)
  visible = jnp.tril(jnp.ones((chunk, chunk), bool))
  read, added = jnp.exp(total), jnp.exp(total[..., -1:] - total)
  kept = read[..., -1]
  if segments_BT is not None:
    masks = chunk_scan.masks(segments_BT, chunk, num_devices)
    visible = visible & masks.within_JBTS[:, :, None, None]
    read = jnp.where(masks.from_state_JBT[:, :, None, None], read, 0)
    added = jnp.where(masks.to_state_JBT[:, :, None, None], added, 0)
    kept = jnp.where(masks.kept_JB[:, :, None, None], kept, 0)
  decay = jnp.exp(jnp.where(visible, total[..., :, None] - total[..., None, :], -jnp.inf))
  similar = dot("JBKTH,JBKSH->JBKTS", k_JBKSH, k_JBKSH)[:, :, :, None]
  inverse = _inverse(jnp.tril(beta_JBKGT[..., None] * similar * decay, -1))
  inverse = inverse * beta_JBKGT[..., None, :]
  u = dot("JBKGTS,JBKGSV->JBKGTV", inverse.astype(dtype), v_JBKGSV)
  w = dot("JBKGTS,JBKSH->JBKGTH", (inverse * read[..., None, :]).astype(dtype), k_JBKSH)

  def summed(x: jax.Array) -> jax.Array:
    """Returns what tokens with these values add to the state."""
    return dot("JBKSH,JBKGSV->JBKGHV", k_JBKSH, (added[..., None] * x).astype(dtype))

  transition = kept[..., None, None] * jnp.eye(H) - summed(w)
  first = first_BNHV.reshape(B, *grouped, H, V)
  before, last = chunk_scan.states(transition, summed(u), first, num_devices=num_devices)
  state = before.astype(dtype)
  new = (u - dot("JBKGTH,JBKGHV->JBKGTV", w.astype(dtype), state)).astype(dtype)
  scores = dot("JBKTH,JBKSH->JBKTS", q_JBKTH, k_JBKSH)[:, :, :, None] * decay
  y = dot("JBKGTS,JBKGSV->JBKGTV", scores.astype(dtype), new)
  y += read[..., None] * dot("JBKTH,JBKGHV->JBKGTV", q_JBKTH, state)
  y_BTNV = chunk_scan.join(jnp.moveaxis(y.astype(dtype), 4, 2), length).reshape(v_BTNV.shape)
  return y_BTNV, shards.of_last(last, num_devices).reshape(first_BNHV.shape)


def step(
  q_BNH: jax.Array,
  k_BNH: jax.Array,
  v_BNV: jax.Array,
  g_BN: jax.Array,
  beta_BN: jax.Array,
  state_BNHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y [B, N, V] of one token, the state after it); computes in float32."""
  dtype = v_BNV.dtype
  q_BNH, k_BNH, v_BNV = (x.astype(jnp.float32) for x in (q_BNH, k_BNH, v_BNV))
  state_BNHV = state_BNHV * jnp.exp(g_BN)[..., None, None]
  found_BNV = jnp.einsum("BNHV,BNH->BNV", state_BNHV, k_BNH)
  new_BNV = beta_BN[..., None] * (v_BNV - found_BNV)
  state_BNHV += k_BNH[..., None] * new_BNV[..., None, :]
  return jnp.einsum("BNHV,BNH->BNV", state_BNHV, q_BNH).astype(dtype), state_BNHV


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
  """Returns the inverse of I + lower, for strictly lower triangular matrices [..., T, T].

  Halves are inverted, then joined by matmuls; products of powers of `lower` would cancel digits.
  """
  size = lower.shape[-1]
  if size <= _BASE:
    return _substituted(lower)
  half = size // 2
  blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
  upper_left, lower_right = _inverse(blocks)
  below = -_multiply(lower_right, _multiply(lower[..., half:, :half], upper_left))
  top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
  return jnp.concatenate([top, jnp.concatenate([below, lower_right], axis=-1)], axis=-2)


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  transposed = inverse.swapaxes(-1, -2)
  return (-jnp.tril(_multiply(_multiply(transposed, gradient), transposed), -1),)


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverse = _inverse(lower)
  return inverse, inverse


_inverse.defvjp(_inverse_forward, _inverse_backward)
_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _substituted(lower: jax.Array) -> jax.Array:
  """Returns the inverse by forward substitution, a row of all matrices at a time."""
  size = lower.shape[-1]
  rows: list[jax.Array] = []
  for index, unit in enumerate(jnp.eye(size, dtype=lower.dtype)):
    known = (lower[..., index, i, None] * row for i, row in enumerate(rows))
    rows.append(jnp.broadcast_to(unit, (*lower.shape[:-2], size)) - sum(known))
  return jnp.stack(rows, axis=-2)
