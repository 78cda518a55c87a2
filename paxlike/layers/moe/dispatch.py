# SPDX-License-Identifier: Apache-2.0
"""Dispatch of tokens to experts, with or without dropping.

`dropless` sorts tokens by expert; `Capacity` gives each expert a fixed number of slots and drops
the tokens that do not fit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.module import is_statistic
from paxlike.layers.moe.expert_sharding import ExpertSharding
from paxlike.layers.moe.experts import Experts
from paxlike.layers.moe.routing import Routing
from paxlike.layers.precision import cpu_dots

# (experts, x_BTD, routing) -> (y_BTD, metrics as [sum, weight]).
Dispatch = Callable[[Experts, jax.Array, Routing], tuple[jax.Array, dict[str, jax.Array]]]


@configurable
def dropless(
  experts: Experts, x_BTD: jax.Array, routing: Routing
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sorts tokens by expert and drops none (MegaBlocks; Gale et al., 2022).

  Each device sorts its own tokens and those that it gathers for its experts (see
  `ExpertSharding`). An all-to-all would not transfer less: its size is static, and all tokens may
  choose the experts of one device.
  """
  num_experts = routing.logits_BTE.shape[-1]
  sharding = ExpertSharding.of(experts, x_BTD.shape, num_experts)
  if sharding is None:
    return _apply_sorted(experts, x_BTD, routing.experts_BTK, routing.weights_BTK), {}
  graph, statistics, weights = nnx.split(experts, is_statistic, ...)

  def local(weights, statistics, x_BTD, experts_BTK, weights_BTK):
    axes = tuple(sorted(sharding.manual))
    statistics = jax.tree.map(lambda s: _max_over_devices(s, axes), statistics)
    x_BTD, experts_BTK, weights_BTK = sharding.gathered(x_BTD, experts_BTK, weights_BTK)
    experts = nnx.merge(graph, statistics, weights)
    sharding.keep_bias_once(experts)
    first = sharding.first(num_experts)
    return sharding.reduced(_apply_sorted(experts, x_BTD, experts_BTK - first, weights_BTK))

  of_weights, tokens = sharding.of_weights(weights), sharding.tokens
  y_BTD = jax.shard_map(
    local,
    in_specs=(of_weights, PartitionSpec(), sharding.inputs, tokens, tokens),
    out_specs=sharding.outputs,
    axis_names=sharding.manual,
    check_vma=False,
  )(weights, statistics, x_BTD, routing.experts_BTK, routing.weights_BTK)
  return y_BTD, {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _max_over_devices(statistic: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Returns `statistic`; its "gradient", the new value, becomes the maximum over devices."""
  del axes
  return statistic


# The transpose of `shard_map` sums the "gradients" of all devices; the division cancels that.
_max_over_devices.defvjp(
  lambda statistic, axes: (statistic, None),
  lambda axes, _, new: (jax.lax.pmax(new, axes) / jax.lax.axis_size(axes),),
)


def _apply_sorted(
  experts: Experts, x_BTD: jax.Array, experts_BTK: jax.Array, weights_BTK: jax.Array
) -> jax.Array:
  """Returns, for each token, the weighted sum of the outputs of its experts on this device.

  `experts_BTK` counts from this device's first expert; the experts of other devices, and dropped
  choices, are out of range.
  """
  num_experts, num_chosen = experts.up.num_experts, experts_BTK.shape[-1]
  here_BTK = (experts_BTK >= 0) & (experts_BTK < num_experts)
  chosen = jnp.where(here_BTK, experts_BTK, num_experts).reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  inverse = jnp.argsort(order)
  sizes_E = jnp.bincount(chosen, length=num_experts).astype(jnp.int32)
  x_MD: Any = _permute(x_BTD.reshape(-1, x_BTD.shape[-1]), order, inverse, num_chosen)
  y_MD = experts(x_MD, lambda layer, x: layer.sorted(x, sizes_E))
  y_MD: Any = _permute(y_MD, inverse, order, 1)
  y_BTKD = jnp.where(here_BTK[..., None], y_MD.reshape(*experts_BTK.shape, -1), 0)
  return _weighted_sum(y_BTKD, weights_BTK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
  """Returns x with each token repeated `copies` times, then permuted by `order`.

  `inverse`, the inverse permutation, makes the gradient a gather instead of a scatter.
  """
  del inverse
  return x[order // copies]


def _permute_forward(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> Any:
  return _permute(x, order, inverse, copies), inverse


def _permute_backward(copies: int, inverse: jax.Array, dy: jax.Array) -> Any:
  return dy[inverse].reshape(-1, copies, dy.shape[-1]).sum(1), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
  """Gives every expert the same number of slots per sequence (GShard; Lepikhin et al., 2020).

  First choices get slots before second ones, earlier tokens before later ones. A choice that is
  dropped adds nothing: without any, a token keeps only its residual connection. Each sequence is a
  group with its own slots. One CPU drops the same choices, but multiplies only what is kept.

  Attributes:
    factor: The capacity factor, relative to the slots that uniform routing needs.
  """

  factor: ranges.Capacity = 2.0

  def places(self, num_tokens: int, num_experts: int, num_chosen: int) -> int:
    """Returns C, the slots per expert and sequence, rounded up to a multiple of 4 as in Pax."""
    return 4 * math.ceil(num_tokens * num_chosen * self.factor / num_experts / 4)

  def __call__(
    self, experts: Experts, x_BTD: jax.Array, routing: Routing
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    B, T, _ = x_BTD.shape
    E, K = routing.logits_BTE.shape[-1], routing.experts_BTK.shape[-1]
    C = self.places(T, E, K)
    chosen_BKT = routing.experts_BTK.swapaxes(1, 2)
    is_chosen = jax.nn.one_hot(chosen_BKT.reshape(B, K * T), E, dtype=jnp.int32)
    rank_BKT = (is_chosen * jnp.cumsum(is_chosen, axis=1)).sum(-1) - 1
    rank_BTK = rank_BKT.reshape(B, K, T).swapaxes(1, 2)
    kept_BTK = rank_BTK < C
    dropped = jnp.stack([(~kept_BTK).sum(), jnp.array(B * T * K)]).astype(jnp.float32)
    # One CPU need not multiply empty slots. Quantized matmuls have other scales without slots.
    if cpu_dots.on_cpu() and not mesh.sizes_here(mesh.AXES) and experts.up.dot is None:
      kept_experts_BTK = jnp.where(kept_BTK, routing.experts_BTK, E)
      y_BTD = _apply_sorted(experts, x_BTD, kept_experts_BTK, routing.weights_BTK)
    else:
      slots_BM = jnp.where(kept_BTK, routing.experts_BTK * C + rank_BTK, E * C).reshape(B, T * K)
      y_BMD = _apply_placed(experts, x_BTD, slots_BM, (E, C))
      y_BTD = _weighted_sum(y_BMD.reshape(B, T, K, -1), routing.weights_BTK)
    return y_BTD, {"dropped_fraction": dropped}


def _apply_placed(
  experts: Experts, x_BTD: jax.Array, slots_BM: jax.Array, sizes: tuple[int, int]
) -> jax.Array:
  """Returns [B, M, D]: for each choice, what its expert computed in its slot; zeros if dropped.

  `sizes` are (E, C). M is T x K, and a dropped choice has the slot E x C.
  """
  B, M = slots_BM.shape
  E, C = sizes
  x_BTD = mesh.constrain(x_BTD, "batch", None, "columns")
  x_BSD: Any = _put(E * C, slots_BM, jnp.repeat(x_BTD, M // x_BTD.shape[1], axis=1))
  # From sharded sequences to sharded experts: an all-to-all over the expert axis. Each device along
  # the tensor axis sends some columns, and then gathers the rest.
  x_EBCD = x_BSD.reshape(B, E, C, -1).swapaxes(0, 1)
  x_EBCD = mesh.constrain(x_EBCD, "experts", "group", None, "columns")
  x_EBCD = mesh.constrain(x_EBCD, "experts", "group", None, None)
  y = experts(x_EBCD.reshape(E, B * C, -1), lambda layer, x: layer.placed(x))
  # Not columns at once: see `Moe.__call__`.
  y_EBCD = mesh.constrain(y.reshape(E, B, C, -1), "experts", "group", None, None)
  y_EBCD = mesh.constrain(y_EBCD, "experts", "group", None, "columns")
  y_BSD = mesh.constrain(y_EBCD.swapaxes(0, 1).reshape(B, E * C, -1), "batch", None, "columns")
  return cast(jax.Array, _take(E * C, slots_BM, y_BSD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put(num_slots: int, slots_BM: jax.Array, x_BMD: jax.Array) -> jax.Array:
  """Returns [B, S, D] with each sequence's tokens in their slots; drops tokens of slot S."""

  def put(slots_M: jax.Array, x_MD: jax.Array) -> jax.Array:
    slots_SD = jnp.zeros((num_slots, x_MD.shape[-1]), x_MD.dtype)
    return slots_SD.at[slots_M].set(x_MD, mode="drop")

  return _map_sequences(put, slots_BM, x_BMD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(num_slots: int, slots_BM: jax.Array, y_BSD: jax.Array) -> jax.Array:
  """Returns [B, M, D], the contents of each token's slot, zeros for slot S; transpose of `_put`."""
  del num_slots

  def take(slots_M: jax.Array, y_SD: jax.Array) -> jax.Array:
    return y_SD.at[slots_M].get(mode="fill", fill_value=0)

  return _map_sequences(take, slots_BM, y_BSD)


def _map_sequences(
  function: Callable[[jax.Array, jax.Array], jax.Array], slots_BM: jax.Array, x: jax.Array
) -> jax.Array:
  """Maps `function` over sequences, in `shard_map` because XLA aborts on partitioned scatters."""
  mapped = jax.vmap(function)
  sizes = mesh.sizes_here(mesh.AXES)
  if sizes:
    spec = mesh.partition(("batch", None, "columns"), x.shape, sizes)
    mapped = mesh.on_each_device(mapped, (PartitionSpec(*spec[:2]), spec), spec)
  return mapped(slots_BM, x)


_put.defvjp(
  lambda S, slots_BM, x_BMD: (_put(S, slots_BM, x_BMD), slots_BM),
  lambda S, slots_BM, dy_BSD: (None, _take(S, slots_BM, dy_BSD)),
)
_take.defvjp(
  lambda S, slots_BM, y_BSD: (_take(S, slots_BM, y_BSD), slots_BM),
  lambda S, slots_BM, dy_BMD: (None, _put(S, slots_BM, dy_BMD)),
)


def _weighted_sum(y_BTKD: jax.Array, weights_BTK: jax.Array) -> jax.Array:
  y_BTD = jnp.einsum(
    "BTKD,BTK->BTD", y_BTKD, weights_BTK.astype(y_BTKD.dtype), preferred_element_type=jnp.float32
  )
  return y_BTD.astype(y_BTKD.dtype)
