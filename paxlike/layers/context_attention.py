# SPDX-License-Identifier: Apache-2.0
"""Causal attention where devices of the mesh axis `context` share the tokens of each sequence.

Each device computes as many blocks as any other, about half of its queries times all keys: queries
and all that belongs to them are exchanged into the order of `zigzag`, and the output back.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike import mesh
from paxlike.errors import UserError
from paxlike.layers import all_keys, attention_kernels, key_ring, zigzag
from paxlike.layers.attention_kernels import Options
from paxlike.layers.blockwise import Back, Mask, Queries, finish, start
from paxlike.layers.chunked_attention import xla_chunked
from paxlike.layers.per_device import keys_to_share

_PIECE = 512  # Queries of which logits are held, at the most, against one chunk of keys.
_QKV: mesh.Dims = ("batch", "time", "heads", None)


def ring(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[Options]
) -> jax.Array:
  """Ring attention (Liu et al., arXiv:2310.01889); see `Kernel`.

  Keys and values travel around the axis: a device holds no more than twice its own share of them.
  """
  return _attention(ring, key_ring, q_BTNH, k_BSKH, v_BSKH, options)


def gathered(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[Options]
) -> jax.Array:
  """Attention to all keys, which each device gathers (Llama 3, arXiv:2407.21783); see `Kernel`."""
  return _attention(gathered, all_keys, q_BTNH, k_BSKH, v_BSKH, options)


def _attention(
  kernel: attention_kernels.Kernel,
  way: Any,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  options: Options,
) -> jax.Array:
  """Returns attention to keys that come to a device on a way, a module of `forward`, `backward`.

  Raises:
    UserError: There is a bias, or devices cannot have equal shares of the tokens.
  """
  name = attention_kernels.name_of(kernel)
  attention_kernels.refuse(name, options, "bias_NTS")
  sizes = mesh.sizes_here(mesh.AXES)
  num_devices = sizes.get(zigzag.AXIS, 1)
  if num_devices == 1:
    return xla_chunked(q_BTNH, k_BSKH, v_BSKH, **options)
  if (length := q_BTNH.shape[1]) % (2 * num_devices):
    raise UserError(
      f"ATTENTION_KERNEL={name} cuts MAX_SEQ_LEN={length} into {2 * num_devices} equal parts, two"
      f" for each device of the mesh axis context: make it a multiple of {2 * num_devices}."
    )
  segments_BT, sinks_N = options["segments_BT"], options.get("sinks_N")
  return _differentiable(
    _Plan(way, num_devices, Mask(options.get("window"), options.get("soft_cap"))),
    q_BTNH * options["scale"],
    *keys_to_share(q_BTNH.shape[2], k_BSKH, v_BSKH, sizes),
    None if segments_BT is None else jnp.asarray(segments_BT),
    None if sinks_N is None else jnp.asarray(sinks_N, jnp.float32),
  )


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is known before there are arrays.

  Attributes:
    way: How keys come to a device.
    num_devices: C, of the axis.
    mask: See there.
  """

  way: Any
  num_devices: int
  mask: Mask


class _Inputs(NamedTuple):
  """Arrays of whole rows, or a device's share of them. `q_BTNH` is scaled."""

  q_BTNH: jax.Array
  k_BSKH: jax.Array
  v_BSKH: jax.Array
  segments_BT: jax.Array | None
  sinks_N: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(plan: _Plan, *inputs: Any) -> jax.Array:
  return _forward(plan, *inputs)[0]


def _forward(plan: _Plan, *inputs: Any) -> tuple[jax.Array, Any]:
  given = _Inputs(*inputs)
  specs = _specs(given)
  y_BTNH, lse_PBKGT = _on_devices(
    functools.partial(_share_forward, plan), (specs,), (specs.q_BTNH, _pieces_spec(specs))
  )(given)
  return y_BTNH, (given, y_BTNH, lse_PBKGT)


def _backward(plan: _Plan, saved: Any, dy_BTNH: jax.Array) -> tuple[Any, ...]:
  given, y_BTNH, lse_PBKGT = saved
  specs = _specs(given)
  q, k, v, _, sinks = specs
  dq, dk, dv, dsinks = _on_devices(
    functools.partial(_share_backward, plan, mesh.axes_of(PartitionSpec(*q[:2]))),
    (specs, q, _pieces_spec(specs), q),
    (q, k, v, sinks),
  )(given, y_BTNH, lse_PBKGT, dy_BTNH)
  return dq, dk, dv, None, dsinks


_differentiable.defvjp(_forward, _backward)


def _share_forward(plan: _Plan, given: _Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTNH, lse [P, B, K, G, T] of its pieces) of a device's share of the tokens."""
  queries = _queries(plan, given)
  partial = start(queries, given.v_BSKH.shape[-1], given.sinks_N)
  keys = given.k_BSKH, given.v_BSKH, given.segments_BT
  partial = plan.way.forward(partial, queries, *keys, plan.num_devices, plan.mask)
  y, lse = finish(partial)
  return _tokens(plan, y.astype(given.q_BTNH.dtype)), lse


def _share_backward(
  plan: _Plan, shared: set[str], given: _Inputs, y: jax.Array, lse: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns gradients of q, k, v and sinks; tokens of a head are shared over some axes."""
  queries = _queries(plan, given)
  K = given.k_BSKH.shape[2]
  delta = (y.astype(jnp.float32) * dy.astype(jnp.float32)).sum(-1)
  back = Back(_pieces(plan, dy, K), lse, _pieces(plan, delta, K))
  keys = given.k_BSKH, given.v_BSKH, given.segments_BT
  dq, dk, dv = plan.way.backward(queries, back, *keys, plan.num_devices, plan.mask)
  dq = _tokens(plan, dq.astype(given.q_BTNH.dtype))
  dk, dv = dk.astype(given.k_BSKH.dtype), dv.astype(given.v_BSKH.dtype)
  if given.sinks_N is None:
    return dq, dk, dv, None
  weights = jnp.exp(given.sinks_N.reshape(K, -1, 1) - lse)
  dsinks_N = -(weights * back.delta).sum((0, 1, 4)).reshape(-1)
  return dq, dk, dv, jax.lax.psum(dsinks_N, tuple(shared))


def _queries(plan: _Plan, given: _Inputs) -> Queries:
  q = _pieces(plan, given.q_BTNH, given.k_BSKH.shape[2])
  size = q.shape[4]
  segments = given.segments_BT
  if segments is not None:
    segments = _pieces(plan, segments[..., None], 1)[:, :, 0, 0]
  chunks = zigzag.chunks_of(jax.lax.axis_index(zigzag.AXIS), plan.num_devices)
  of_chunk = len(q) // 2
  first = (chunks[:, None] * of_chunk + jnp.arange(of_chunk)) * size
  return Queries(q, segments, first.reshape(-1))


def _pieces(plan: _Plan, x: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns [P, B, K, G, T, ...] of a device's zigzag share for its [B, T, N, ...]."""
  x = zigzag.exchange(x, plan.num_devices)
  _, B, length, N, *rest = x.shape
  size = max(size for size in range(1, min(length, _PIECE) + 1) if length % size == 0)
  x = x.reshape(2, B, length // size, size, num_kv_heads, N // num_kv_heads, *rest)
  return jnp.moveaxis(x, (2, 3), (1, 5)).reshape(-1, B, *x.shape[4:6], size, *rest)


def _tokens(plan: _Plan, x: jax.Array) -> jax.Array:
  """Returns a device's [B, T, N, ...] for its pieces."""
  P, B, K, G, size, *rest = x.shape
  x = jnp.moveaxis(x.reshape(2, P // 2, B, K, G, size, *rest), (1, 5), (2, 3))
  return zigzag.restore(x.reshape(2, B, P // 2 * size, K * G, *rest), plan.num_devices)


def _specs(given: _Inputs) -> Any:
  """Returns how the mesh cuts the inputs."""
  sizes = mesh.sizes_here(mesh.AXES)
  dims = _Inputs(_QKV, _QKV, _QKV, ("batch", "time"), ("heads",))
  specs = (
    None if x is None else mesh.partition(of_x, x.shape, sizes)
    for x, of_x in zip(given, dims, strict=True)
  )
  return _Inputs(*specs)


def _pieces_spec(specs: Any) -> PartitionSpec:
  """Returns how the mesh cuts [P, B, K, G, T] when it cuts the inputs so."""
  batch, time, heads, _ = specs.k_BSKH
  return PartitionSpec(time, batch, heads, None, None)


def _on_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
  """Returns `shard_map` of a function over all axes: XLA aborts on gathers beside manual ones."""
  sizes = mesh.sizes_here(mesh.AXES)
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={axis for axis, size in sizes.items() if size > 1},
    check_vma=False,
  )
