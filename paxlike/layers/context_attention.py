# SPDX-License-Identifier: Apache-2.0
"""Causal attention where devices of the mesh axis `context` share the tokens of each sequence.

Each device computes as many blocks as any other, about half of its queries times all keys: before,
queries are exchanged into another order of time, and the output back after. Where a window is no
longer than a device's share, it needs but the last keys of the device before.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike import mesh
from paxlike.configurable import configurable
from paxlike.layers import all_keys, attention_kernels, key_ring, near_keys
from paxlike.layers.attention_kernels import Options
from paxlike.layers.blockwise import (
  Back,
  Gradients,
  Keys,
  Mask,
  Partial,
  Queries,
  Share,
  finish,
  start,
)
from paxlike.layers.chunked_attention import xla_chunked
from paxlike.layers.per_device import keys_to_share
from paxlike.layers.time_order import AXIS, CONTIGUOUS, ZIGZAG, Order

_PIECE = 256  # Queries of which logits are held, at the most, against one chunk of keys.
_QKV: mesh.Dims = ("batch", "time", "heads", None)


class _Way(NamedTuple):
  """How queries meet keys.

  Attributes:
    order: Of queries.
    forward: Returns what a device's share has after all keys.
    backward: Returns the gradients of a device's share.
  """

  order: Order
  forward: Callable[[Partial, Share], Partial]
  backward: Callable[[Share, Back], Gradients]


_RING = _Way(ZIGZAG, key_ring.forward, key_ring.backward)
_GATHERED = _Way(ZIGZAG, all_keys.forward, all_keys.backward)
_NEAR = _Way(CONTIGUOUS, near_keys.forward, near_keys.backward)


@configurable
def ring(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[Options]
) -> jax.Array:
  """Ring attention (Liu et al., arXiv:2310.01889); see `Kernel`.

  Keys and values travel around the axis: a device holds no more than twice its own share of them.
  """
  return _attention(ring, _RING, q_BTNH, k_BSKH, v_BSKH, options)


@configurable
def gathered(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[Options]
) -> jax.Array:
  """Attention to all keys, which each device gathers (Llama 3, arXiv:2407.21783); see `Kernel`."""
  return _attention(gathered, _GATHERED, q_BTNH, k_BSKH, v_BSKH, options)


def _attention(
  kernel: attention_kernels.Kernel,
  way: _Way,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  options: Options,
) -> jax.Array:
  """Returns attention to keys that come to a device on a way, unless all are near.

  Raises:
    UserError: There is a bias.
  """
  name = attention_kernels.name_of(kernel)
  attention_kernels.refuse(name, options, "bias_NTS")
  sizes = mesh.sizes_here(mesh.AXES)
  num_devices = sizes.get(AXIS, 1)
  if num_devices == 1:
    return xla_chunked(q_BTNH, k_BSKH, v_BSKH, **options)
  length, segments_BT, sinks_N = q_BTNH.shape[1], options["segments_BT"], options.get("sinks_N")
  if rest := -length % (2 * num_devices):
    # As after the end no token is seen by those before, such can fill rows up to equal parts.
    q, k, v = (_filled(x, rest) for x in (q_BTNH, k_BSKH, v_BSKH))
    whole: Any = options | {"segments_BT": None}
    if segments_BT is not None:
      whole["segments_BT"] = _filled(segments_BT, rest)
    return _attention(kernel, way, q, k, v, whole)[:, :length]
  mask = Mask(options.get("window"), options.get("soft_cap"))
  if near_keys.suffice(mask, length // num_devices):
    way = _NEAR
  return _differentiable(
    _Plan(way, num_devices, mask),
    q_BTNH * options["scale"],
    *keys_to_share(q_BTNH.shape[2], k_BSKH, v_BSKH, sizes),
    None if segments_BT is None else jnp.asarray(segments_BT),
    None if sinks_N is None else jnp.asarray(sinks_N, jnp.float32),
  )


def _filled(x: jax.Array, count: int) -> jax.Array:
  return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is known before there are arrays.

  Attributes:
    way: How keys come to a device.
    num_devices: C, of the axis.
    mask: See there.
  """

  way: _Way
  num_devices: int
  mask: Mask


class _Inputs(NamedTuple):
  """Arrays of whole rows, or a device's share of them, `q_BTNH` scaled; or what belongs to each."""

  q_BTNH: Any
  k_BSKH: Any
  v_BSKH: Any
  segments_BT: Any
  sinks_N: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(plan: _Plan, *inputs: Any) -> jax.Array:
  return _forward(plan, *inputs)[0]


def _forward(plan: _Plan, *inputs: Any) -> tuple[jax.Array, Any]:
  given = _Inputs(*inputs)
  specs = _specs(given)
  y_BTNH, lse_PBKGT = mesh.on_each_device(
    functools.partial(_share_forward, plan), (specs,), (specs.q_BTNH, _pieces_spec(specs))
  )(given)
  return y_BTNH, (given, y_BTNH, lse_PBKGT)


def _backward(plan: _Plan, saved: Any, dy_BTNH: jax.Array) -> tuple[Any, ...]:
  given, y_BTNH, lse_PBKGT = saved
  specs = _specs(given)
  q, k, v, _, sinks = specs
  dq, dk, dv, dsinks = mesh.on_each_device(
    functools.partial(_share_backward, plan, mesh.axes_of(PartitionSpec(*q[:2]))),
    (specs, q, _pieces_spec(specs), q),
    (q, k, v, sinks),
  )(given, y_BTNH, lse_PBKGT, dy_BTNH)
  return dq, dk, dv, None, dsinks


# Of what is inside, no policy of remat saves anything.
_differentiable.defvjp(_forward, _backward, optimize_remat=True)


def _share_forward(plan: _Plan, given: _Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTNH, lse [P, B, K, G, T] of its pieces) of a device's share of the tokens."""
  share = _share(plan, given)
  partial = start(share.queries, share.keys.v.shape[-1], given.sinks_N)
  y, lse = finish(plan.way.forward(partial, share))
  return _tokens(plan, y.astype(given.q_BTNH.dtype)), lse


def _share_backward(
  plan: _Plan, axes: set[str], given: _Inputs, y: jax.Array, lse: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns gradients of q, k, v and sinks; the tokens of a head are shared over `axes`."""
  share = _share(plan, given)
  k_BSKH, v_BSKH, *_ = share.keys
  K = k_BSKH.shape[2]
  delta = (y.astype(jnp.float32) * dy.astype(jnp.float32)).sum(-1)
  back = Back(_pieces(plan, dy, K), lse, _pieces(plan, delta, K))
  sums = plan.way.backward(share, back)
  dq = _tokens(plan, sums.q.astype(given.q_BTNH.dtype))
  dk, dv = sums.k.astype(k_BSKH.dtype), sums.v.astype(v_BSKH.dtype)
  if given.sinks_N is None:
    return dq, dk, dv, None
  weights = jnp.exp(given.sinks_N.reshape(K, -1, 1) - lse)
  dsinks_N = -(weights * back.delta).sum((0, 1, 4)).reshape(-1)
  return dq, dk, dv, jax.lax.psum(dsinks_N, tuple(axes))


def _share(plan: _Plan, given: _Inputs) -> Share:
  return Share(_queries(plan, given), _keys(given), plan.num_devices, plan.mask)


def _queries(plan: _Plan, given: _Inputs) -> Queries:
  q = _pieces(plan, given.q_BTNH, given.k_BSKH.shape[2])
  segments = given.segments_BT
  if segments is not None:
    segments = _pieces(plan, segments[..., None], 1)[:, :, 0, 0]
  positions = plan.way.order.positions(given.q_BTNH.shape[1], plan.num_devices)
  return Queries(q, segments, positions.reshape(len(q), -1))


def _keys(given: _Inputs) -> Keys:
  positions = CONTIGUOUS.positions(given.k_BSKH.shape[1], 0)
  return Keys(given.k_BSKH, given.v_BSKH, given.segments_BT, positions[None])


def _pieces(plan: _Plan, x: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns [P, B, K, G, T, ...] of a device's [B, T, N, ...] in the order of time."""
  x = plan.way.order.exchange(x, plan.num_devices)
  B, length, N, *rest = x.shape
  half = length // 2
  size = max(size for size in range(1, min(half, _PIECE) + 1) if half % size == 0)
  x = x.reshape(B, length // size, size, num_kv_heads, N // num_kv_heads, *rest)
  return jnp.moveaxis(x, (1, 2), (0, 4))


def _tokens(plan: _Plan, x: jax.Array) -> jax.Array:
  """Returns a device's [B, T, N, ...] in the order of time for its pieces."""
  x = jnp.moveaxis(x, (0, 4), (1, 2))
  B, P, size, K, G, *rest = x.shape
  return plan.way.order.restore(x.reshape(B, P * size, K * G, *rest), plan.num_devices)


def _specs(given: _Inputs) -> _Inputs:
  """Returns how the mesh cuts the inputs."""
  sizes = mesh.sizes_here(mesh.AXES)
  dims = _Inputs(_QKV, _QKV, _QKV, ("batch", "time"), ("heads",))
  specs = (
    None if x is None else mesh.partition(of_x, x.shape, sizes)
    for x, of_x in zip(given, dims, strict=True)
  )
  return _Inputs(*specs)


def _pieces_spec(specs: _Inputs) -> PartitionSpec:
  """Returns how the mesh cuts [P, B, K, G, T] when it cuts the inputs so."""
  batch, time, heads, _ = specs.k_BSKH
  return PartitionSpec(time, batch, heads, None, None)
