# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy in float32, and its sum over chunks of a sequence that bounds memory."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from paxlike.devices import mesh, topology
from paxlike.layers.precision import cpu_dots


def cross_entropy(
  logits: jax.Array, targets: jax.Array, *, z_loss: float = 0.0, smoothing: float = 0.0
) -> jax.Array:
  """Returns -log softmax(logits)[targets] in nats, float32 [...], for logits [..., V].

  The gradient takes one pass over the logits and has their dtype.

  Args:
    logits: The logits.
    targets: Token ids [...] in [0, V).
    z_loss: Adds this times the square of log(sum(exp(logits))), which keeps it near 0 (PaLM;
      Chowdhery et al., 2022, arXiv:2204.02311).
    smoothing: The probability that targets spread over all V tokens (Szegedy et al., 2016,
      arXiv:1512.00567).
  """
  return _entropy(z_loss, smoothing, logits, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _entropy(z_loss, smoothing, logits, targets):
  return _entropy_forward(z_loss, smoothing, logits, targets)[0]


def _entropy_forward(z_loss, smoothing, logits, targets):
  is_sharded = mesh.is_sharded("vocab")
  if is_sharded:
    # No device has all logits of a token, so a gather would all-gather them.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    chosen = jnp.where(is_target, logits, jnp.zeros((), logits.dtype)).sum(-1)
  else:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  log_sum_exp = one_pass_log_sum_exp if topology.is_gpu() and not is_sharded else jax.nn.logsumexp
  normalizer = log_sum_exp(logits.astype(jnp.float32), -1)
  expected = chosen.astype(jnp.float32)
  if smoothing:
    expected = (1 - smoothing) * expected + smoothing * logits.astype(jnp.float32).mean(-1)
  loss = normalizer - expected
  if z_loss:
    loss += z_loss * jnp.square(normalizer)
  return loss, (logits, targets, normalizer)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def one_pass_log_sum_exp(logits: jax.Array, axis: int) -> jax.Array:
  """Returns log(sum(exp(logits))) over an axis, for float32 logits, which are read once.

  The maximum of what was read so far is kept with the sum relative to it (Milakov and Gimelshein,
  2018, arXiv:1805.02867); `jax.nn.logsumexp` reads all logits for their maximum first. A logit of
  -inf counts as the least finite float32; several of +inf give NaN.
  """
  least = jnp.finfo(jnp.float32).min
  # The difference of -inf and itself would be NaN.
  pairs = (jnp.maximum(logits, least), jnp.ones_like(logits))
  nothing = (jnp.float32(least), jnp.float32(0))
  maximum, total = jax.lax.reduce(pairs, nothing, _joined, (axis % logits.ndim,))
  return maximum + jnp.log(total)


@one_pass_log_sum_exp.defjvp
def _(axis, primals, tangents):
  (logits,), (tangent,) = primals, tangents
  value = one_pass_log_sum_exp(logits, axis)
  return value, (jnp.exp(logits - jnp.expand_dims(value, axis)) * tangent).sum(axis)


def _joined(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
  """Returns the maximum, and the sum relative to it, of two sets of logits."""
  factor = jnp.exp(-jnp.abs(a[0] - b[0]))
  total = jnp.where(a[0] >= b[0], a[1] + b[1] * factor, a[1] * factor + b[1])
  return jnp.maximum(a[0], b[0]), total


def _entropy_backward(z_loss, smoothing, saved, cotangent):
  logits, targets, normalizer = saved
  gradient = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
  if z_loss:
    gradient *= 1 + 2 * z_loss * normalizer[..., None]
  if smoothing:
    gradient -= smoothing / logits.shape[-1]
  if cpu_dots.on_cpu() and not mesh.sizes_here(mesh.AXES):
    # XLA for CPUs takes two to three times as long for a comparison in one loop with a softmax, so
    # that the target's part is added by a scatter.
    gradient *= cotangent[..., None]
    by_token = gradient.reshape(-1, gradient.shape[-1])
    places = (jnp.arange(len(by_token)), targets.reshape(-1))
    at_target = (1 - smoothing) * cotangent.reshape(-1)
    gradient = by_token.at[places].add(-at_target, unique_indices=True).reshape(gradient.shape)
  else:
    # Elsewhere, or sharded, a comparison fuses with the softmax; a scatter would be another pass.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    gradient = (gradient - (1 - smoothing) * is_target) * cotangent[..., None]
  return gradient.astype(logits.dtype), None


_entropy.defvjp(_entropy_forward, _entropy_backward)


class Shards(NamedTuple):
  """How the mesh shards [B, T]: over `axes`, into `batch` x `time` shards."""

  batch: int
  time: int
  axes: tuple[str, ...]

  @classmethod
  def of(cls, shape: Sequence[int]) -> Self:
    """Returns how the current mesh shards [B, T]."""
    if not (sizes := mesh.sizes_here(mesh.AXES)):
      return cls(1, 1, ())
    axes = mesh.axes_by_dim(mesh.partition(("batch", "time"), shape, sizes))
    batch, time = (math.prod(sizes[axis] for axis in one) for one in axes)
    return cls(batch, time, (*axes[0], *axes[1]))

  def chunks(self, x: jax.Array, count: int) -> jax.Array:
    """Returns [B, T, ...] as [chunks, shards, B / batch, T / time / chunks, ...].

    T of a shard is padded with zeros to a multiple of the number of chunks. If nothing is sharded,
    there is no dim of shards.
    """
    B, T, *rest = x.shape
    length = T // self.time
    count = min(length, count)
    x = x.reshape(self.batch, B // self.batch, self.time, length, *rest)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -length % count)] + [(0, 0)] * len(rest))
    x = x.reshape(*x.shape[:3], count, -1, *rest)
    x = x.transpose(3, 0, 2, 1, 4, *range(5, x.ndim))
    shards = (self.batch * self.time,) if self.axes else ()
    return x.reshape(count, *shards, *x.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(w: jax.Array, dims: mesh.Dims) -> jax.Array:
  """Returns w, all-gathered over fsdp; the gradient is reduce-scattered.

  `dims` are the dim names of w.
  """
  return mesh.constrain(w, *(None if dim == "model" else dim for dim in dims))


gathered.defvjp(
  lambda w, dims: (gathered(w, dims), None), lambda dims, _, dw: (mesh.constrain(dw, *dims),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def sum_over_chunks(
  loss: Callable[[Any, Any, Any], jax.Array],
  weights: Any,
  x: jax.Array,
  constants: Any,
  axes: tuple[str, ...] = (),
) -> jax.Array:
  """Returns the sum of loss(weights, x[i], constants[i]) over the leading dim.

  The gradient of each chunk is computed together with its loss, so that the logits are freed
  before the next chunk and never recomputed.

  Args:
    loss: Returns a float32 scalar.
    weights: A pytree; differentiated.
    x: [chunks, ...]; differentiated.
    constants: A pytree of [chunks, ...].
    axes: Mesh axes. If there are any, x and constants are [chunks, shards, ...], sharded over
      them, and `loss` takes one shard. Losses and weight gradients accumulate per shard, and are
      all-reduced once after the last chunk.
  """

  def add(total, chunk):
    return total + _by_shard(loss, axes)(weights, *chunk), None

  return jax.lax.scan(add, _zeros((), x, axes), (x, constants))[0].sum()


def _zeros(shape: Sequence[int], x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Returns float32 zeros: [shards, *shape], sharded as x, or `shape` if there are no axes."""
  if not axes:
    return jnp.zeros(shape)
  spec = PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * len(shape))
  return jax.lax.with_sharding_constraint(jnp.zeros((x.shape[1], *shape)), spec)


def _by_shard(function: Any, axes: tuple[str, ...]) -> Any:
  """Returns a function of (weights, x, constants), mapped over the shards of x and constants."""
  return jax.vmap(function, (None, 0, 0), spmd_axis_name=axes) if axes else function


def _chunks_forward(loss, weights, x, constants, axes):
  def add(carry, chunk):
    total, gradient = carry
    value, (dw, dx) = _by_shard(jax.value_and_grad(loss, (0, 1)), axes)(weights, *chunk)
    gradient = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradient, dw)
    return (total + value, gradient), dx

  def summed(gradient: jax.Array, w: jax.Array) -> jax.Array:
    gradient = gradient.astype(w.dtype)  # All-reduced in the dtype of other weights' gradients.
    return jax.lax.reduce(gradient, np.zeros((), w.dtype), jax.lax.add, (0,)) if axes else gradient

  gradients = jax.tree.map(lambda w: _zeros(w.shape, x, axes), weights)
  (total, dw), dx = jax.lax.scan(add, (_zeros((), x, axes), gradients), (x, constants))
  return total.sum(), (jax.tree.map(summed, dw, weights), dx)


def _chunks_backward(loss, axes, gradients, cotangent):
  del loss, axes
  dw, dx = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
  return dw, dx, None


sum_over_chunks.defvjp(_chunks_forward, _chunks_backward)
