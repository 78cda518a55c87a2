# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: causal attention over sequences that are sharded over the axis `context`.

Queries are permuted to zigzag order and the output back, so that every device computes the same
number of blocks, about half of its queries times all keys. If a window is no longer than a device's
shard, tokens stay in sequence order and a device receives only the previous device's last keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.attention import all_gather, kernels, window_halo
from paxlike.layers.attention import ring as key_ring
from paxlike.layers.attention.chunked import xla_chunked
from paxlike.layers.attention.kernels import AttentionOptions
from paxlike.layers.attention.online_softmax import (
  Accumulator,
  BackwardInputs,
  Gradients,
  Keys,
  Mask,
  Queries,
  Shard,
  finish,
  start,
)
from paxlike.layers.attention.sharded_kernel import repeated_keys
from paxlike.layers.attention.zigzag import AXIS, CONTIGUOUS, ZIGZAG, Order

_PIECE = 256  # Maximum queries whose logits with a chunk of keys are materialized at a time.
_QKV: mesh.Dims = ("batch", "time", "heads", None)


class _Strategy(NamedTuple):
  """A context-parallel strategy.

  Attributes:
    order: Token order of the queries.
    forward: Returns a device's accumulator over all keys.
    backward: Returns the gradients of a device's shard.
  """

  order: Order
  forward: Callable[[Accumulator, Shard], Accumulator]
  backward: Callable[[Shard, BackwardInputs], Gradients]


_RING = _Strategy(ZIGZAG, key_ring.forward, key_ring.backward)
_GATHERED = _Strategy(ZIGZAG, all_gather.forward, all_gather.backward)
_WINDOW_HALO = _Strategy(CONTIGUOUS, window_halo.forward, window_halo.backward)


@configurable
def ring(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Ring attention (Liu et al., arXiv:2310.01889); see `Kernel`.

  Keys and values rotate around the axis; a device holds at most twice its own shard of them.
  """
  return _attention(ring, _RING, q_BTNH, k_BSKH, v_BSKH, options)


@configurable
def gathered(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Attention to all-gathered keys and values (Llama 3, arXiv:2407.21783); see `Kernel`."""
  return _attention(gathered, _GATHERED, q_BTNH, k_BSKH, v_BSKH, options)


def _attention(
  kernel: kernels.Kernel,
  strategy: _Strategy,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  options: AttentionOptions,
) -> jax.Array:
  """Returns attention by `strategy`, or by `window_halo` if the window is short enough.

  Raises:
    UserError: A bias is set.
  """
  kernels.refuse(kernel, options, "bias_NTS")
  sizes = mesh.sizes_here(mesh.AXES)
  num_devices = sizes.get(AXIS, 1)
  if num_devices == 1:
    return xla_chunked(q_BTNH, k_BSKH, v_BSKH, **options)
  length, segments_BT, sinks_N = q_BTNH.shape[1], options["segments_BT"], options.get("sinks_N")
  if rest := -length % (2 * num_devices):
    # Pad T to a multiple of 2C; the causal mask hides the padding from all other tokens.
    q, k, v = (_padded(x, rest) for x in (q_BTNH, k_BSKH, v_BSKH))
    padded: Any = options | {"segments_BT": None}
    if segments_BT is not None:
      padded["segments_BT"] = _padded(segments_BT, rest)
    return _attention(kernel, strategy, q, k, v, padded)[:, :length]
  mask = Mask(options.get("window"), options.get("soft_cap"))
  if window_halo.applies(mask, length // num_devices):
    strategy = _WINDOW_HALO
  return _differentiable(
    _Plan(strategy, num_devices, mask),
    q_BTNH * options["scale"],
    *repeated_keys(q_BTNH.shape[2], k_BSKH, v_BSKH, sizes),
    None if segments_BT is None else jnp.asarray(segments_BT),
    None if sinks_N is None else jnp.asarray(sinks_N, jnp.float32),
  )


def _padded(x: jax.Array, count: int) -> jax.Array:
  return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class _Plan:
  """The static arguments of the custom vjp.

  Attributes:
    strategy: The strategy.
    num_devices: C, the size of the axis.
    mask: Window and soft cap.
  """

  strategy: _Strategy
  num_devices: int
  mask: Mask


class _Inputs(NamedTuple):
  """Global arrays or a device's shards of them, `q_BTNH` scaled; or their PartitionSpecs."""

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
    functools.partial(_shard_forward, plan), (specs,), (specs.q_BTNH, _pieces_spec(specs))
  )(given)
  return y_BTNH, (given, y_BTNH, lse_PBKGT)


def _backward(plan: _Plan, saved: Any, dy_BTNH: jax.Array) -> tuple[Any, ...]:
  given, y_BTNH, lse_PBKGT = saved
  specs = _specs(given)
  q, k, v, _, sinks = specs
  dq, dk, dv, dsinks = mesh.on_each_device(
    functools.partial(_shard_backward, plan, mesh.axes_of(PartitionSpec(*q[:2]))),
    (specs, q, _pieces_spec(specs), q),
    (q, k, v, sinks),
  )(given, y_BTNH, lse_PBKGT, dy_BTNH)
  return dq, dk, dv, None, dsinks


# With optimize_remat, remat policies see this function as one unit and save nothing inside it.
_differentiable.defvjp(_forward, _backward, optimize_remat=True)


def _shard_forward(plan: _Plan, given: _Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTNH, lse [P, B, K, G, T]) of a device's shard of the tokens."""
  shard = _shard(plan, given)
  accumulator = start(shard.queries, shard.keys.v.shape[-1], given.sinks_N)
  y, lse = finish(plan.strategy.forward(accumulator, shard))
  return _tokens(plan, y.astype(given.q_BTNH.dtype)), lse


def _shard_backward(
  plan: _Plan, axes: set[str], given: _Inputs, y: jax.Array, lse: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns the gradients of q, k, v and sinks; `axes` are those that shard batch and time."""
  shard = _shard(plan, given)
  k_BSKH, v_BSKH, *_ = shard.keys
  K = k_BSKH.shape[2]
  delta = (y.astype(jnp.float32) * dy.astype(jnp.float32)).sum(-1)
  inputs = BackwardInputs(_pieces(plan, dy, K), lse, _pieces(plan, delta, K))
  sums = plan.strategy.backward(shard, inputs)
  dq = _tokens(plan, sums.q.astype(given.q_BTNH.dtype))
  dk, dv = sums.k.astype(k_BSKH.dtype), sums.v.astype(v_BSKH.dtype)
  if given.sinks_N is None:
    return dq, dk, dv, None
  weights = jnp.exp(given.sinks_N.reshape(K, -1, 1) - lse)
  dsinks_N = -(weights * inputs.delta).sum((0, 1, 4)).reshape(-1)
  return dq, dk, dv, jax.lax.psum(dsinks_N, tuple(sorted(axes)))


def _shard(plan: _Plan, given: _Inputs) -> Shard:
  return Shard(_queries(plan, given), _keys(given), plan.num_devices, plan.mask)


def _queries(plan: _Plan, given: _Inputs) -> Queries:
  q = _pieces(plan, given.q_BTNH, given.k_BSKH.shape[2])
  segments = given.segments_BT
  if segments is not None:
    segments = _pieces(plan, segments[..., None], 1)[:, :, 0, 0]
  positions = plan.strategy.order.positions(given.q_BTNH.shape[1], plan.num_devices)
  return Queries(q, segments, positions.reshape(len(q), -1))


def _keys(given: _Inputs) -> Keys:
  positions = CONTIGUOUS.positions(given.k_BSKH.shape[1], 0)
  return Keys(given.k_BSKH, given.v_BSKH, given.segments_BT, positions[None])


def _pieces(plan: _Plan, x: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns a device's [B, T, N, ...], in sequence order, as pieces [P, B, K, G, T, ...]."""
  x = plan.strategy.order.exchange(x, plan.num_devices)
  B, length, N, *rest = x.shape
  half = length // 2
  size = max(size for size in range(1, min(half, _PIECE) + 1) if half % size == 0)
  x = x.reshape(B, length // size, size, num_kv_heads, N // num_kv_heads, *rest)
  return jnp.moveaxis(x, (1, 2), (0, 4))


def _tokens(plan: _Plan, x: jax.Array) -> jax.Array:
  """Returns pieces [P, B, K, G, T, ...] as [B, T, N, ...] in sequence order."""
  x = jnp.moveaxis(x, (0, 4), (1, 2))
  B, P, size, K, G, *rest = x.shape
  return plan.strategy.order.restore(x.reshape(B, P * size, K * G, *rest), plan.num_devices)


def _specs(given: _Inputs) -> _Inputs:
  """Returns the PartitionSpecs of the inputs."""
  sizes = mesh.sizes_here(mesh.AXES)
  dims = _Inputs(_QKV, _QKV, _QKV, ("batch", "time"), ("heads",))
  specs = (
    None if x is None else mesh.partition(of_x, x.shape, sizes)
    for x, of_x in zip(given, dims, strict=True)
  )
  return _Inputs(*specs)


def _pieces_spec(specs: _Inputs) -> PartitionSpec:
  """Returns the PartitionSpec of [P, B, K, G, T], given those of the inputs."""
  batch, time, heads, _ = specs.k_BSKH
  return PartitionSpec(time, batch, heads, None, None)
