# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts (Shazeer et al., 2017): a router sends each token to few of many layers.

Two ways to bring tokens to experts have one signature: `dropless` sorts them, `Capacity` gives each
expert a fixed number of places and drops what finds none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from paxlike import mesh
from paxlike.layers import module
from paxlike.layers.grouped_matmul import grouped_matmul
from paxlike.layers.linear import Linear
from paxlike.layers.mlp import Activation, Mlp


class Routing(NamedTuple):
  """Where the tokens of each row go.

  Attributes:
    experts_BTK: int32, the experts of each token, the first choice first.
    weights_BTK: float32, the share of each in the result.
    probabilities_BTE: float32, what the choice came from.
    logits_BTE: float32.
  """

  experts_BTK: jax.Array
  weights_BTK: jax.Array
  probabilities_BTE: jax.Array
  logits_BTE: jax.Array


# (logits_BTE, the router's bias_E if it has one, K) -> Routing.
Choice = Callable[[jax.Array, jax.Array | None, int], Routing]


def softmax_choice(
  logits_BTE: jax.Array, bias_E: jax.Array | None, num_chosen: int, *, normalized: bool = True
) -> Routing:
  """The likeliest experts, weighed by their probabilities; `normalized`, these sum to 1."""
  assert bias_E is None
  probabilities_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  weights_BTK, experts_BTK = jax.lax.top_k(probabilities_BTE, num_chosen)
  if normalized:
    weights_BTK /= weights_BTK.sum(-1, keepdims=True)
  return Routing(experts_BTK, weights_BTK, probabilities_BTE, logits_BTE)


def sigmoid_choice(
  logits_BTE: jax.Array,
  bias_E: jax.Array | None,
  num_chosen: int,
  *,
  num_groups: int = 1,
  num_chosen_groups: int = 1,
  scale: float = 1.0,
) -> Routing:
  """The choice of DeepSeek-V3: experts of the best groups, by sigmoid and a bias without gradient.

  Args:
    logits_BTE: Of the router.
    bias_E: Added to the scores for the choice only, not for the weights.
    num_chosen: K.
    num_groups: Equal parts of the experts, ranked by the sum of their two best scores.
    num_chosen_groups: Groups that may be chosen from.
    scale: Sum of a token's weights.
  """
  scores_BTE = jax.nn.sigmoid(logits_BTE)
  ranks_BTE = scores_BTE if bias_E is None else scores_BTE + jax.lax.stop_gradient(bias_E)
  if num_groups > 1:
    grouped = ranks_BTE.reshape(*ranks_BTE.shape[:-1], num_groups, -1)
    best = jax.lax.top_k(grouped, 2)[0].sum(-1)
    chosen = jax.lax.top_k(best, num_chosen_groups)[1]
    allowed = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(-2)
    ranks_BTE = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranks_BTE.shape)
  experts_BTK = jax.lax.top_k(ranks_BTE, num_chosen)[1]
  weights_BTK = jnp.take_along_axis(scores_BTE, experts_BTK, axis=-1)
  weights_BTK = scale * weights_BTK / (weights_BTK.sum(-1, keepdims=True) + 1e-20)
  return Routing(experts_BTK, weights_BTK, scores_BTE, logits_BTE)


class ExpertLinear(module.Module):
  """A linear map for each expert.

  Attributes:
    role: As of `Linear`.
    dtype: As of `Linear`.
  """

  def __init__(
    self,
    num_experts: int,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    use_bias: bool = False,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: Any = jnp.float32,
  ):
    self.role = role
    self.dtype = dtype
    experts = {"experts": num_experts}
    self.w = self.weight(
      {**experts, **inputs, **outputs}, init=init, fan_in=tuple(inputs), compute_dtype=dtype
    )
    bias = {**experts, **outputs}
    self.b = self.weight(bias, init=module.zeros, compute_dtype=dtype) if use_bias else None

  def sorted(self, x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns [M, F] for tokens in the order of their experts, `sizes_E` for each."""
    w_EDF = self.w[...].astype(self.dtype)
    y_MF = grouped_matmul(x_MD.astype(self.dtype), w_EDF, sizes_E)
    if self.b is not None:
      bias_EF = self.b[...].astype(self.dtype)
      y_MF += jnp.repeat(bias_EF, sizes_E, axis=0, total_repeat_length=len(x_MD))
    return y_MF

  def placed(self, x_ECD: jax.Array) -> jax.Array:
    """Returns [E, C, F] for C places of each expert."""
    y_ECF = jnp.einsum("ECD,EDF->ECF", x_ECD.astype(self.dtype), self.w[...].astype(self.dtype))
    return y_ECF if self.b is None else y_ECF + self.b[...].astype(self.dtype)[:, None]


class Experts(module.Module):
  """Feed-forward layers, one for each expert: see `Mlp`."""

  def __init__(
    self,
    num_experts: int,
    dim: int,
    *,
    hidden_dim: int,
    up: Callable[..., ExpertLinear],
    down: Callable[..., ExpertLinear],
    gate: Callable[..., ExpertLinear] | None = None,
    activation: Activation,
  ):
    self.activation = activation
    model, ffn = {"model": dim}, {"ffn": hidden_dim}
    self.up = up(num_experts, model, ffn)
    self.gate = None if gate is None else gate(num_experts, model, ffn)
    self.down = down(num_experts, ffn, model)

  def __call__(self, x: jax.Array, apply: Callable[[ExpertLinear, jax.Array], jax.Array]):
    """Returns what the experts make of x; `apply` says which of its rows an expert sees."""
    up = apply(self.up, x)
    if self.gate is None:
      return apply(self.down, self.activation(up))
    return apply(self.down, self.activation(apply(self.gate, x), up))


# (experts, x_BTD, routing) -> (y_BTD, metrics as [sum, weight]).
Dispatch = Callable[[Experts, jax.Array, Routing], tuple[jax.Array, dict[str, jax.Array]]]


def dropless(
  experts: Experts, x_BTD: jax.Array, routing: Routing
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sorts tokens by expert, so that every one is served (MegaBlocks; Gale et al., 2022).

  Each device sorts its own tokens. Where the mesh has an expert axis, a device gathers those of the
  others along it, applies its own experts, and scatters the sums: as it may happen that all tokens
  choose the experts of one device, no exchange of a size known in advance could carry less.
  """
  num_experts = routing.logits_BTE.shape[-1]
  graph, weights = nnx.split(experts)
  manual = {axis for dim in ("batch", "time") for axis in mesh.RULES[dim]}
  sizes = mesh.sizes_here(manual)
  if not sizes:
    return _serve(experts, x_BTD, routing.experts_BTK, routing.weights_BTK), {}
  split_experts = sizes["expert"] > 1 and num_experts % sizes["expert"] == 0
  tokens = mesh.partition(("batch", "time", None), x_BTD.shape, sizes)
  split_tokens = "expert" in str(tokens)

  def local(weights, x_BTD, experts_BTK, weights_BTK):
    given = (x_BTD, experts_BTK, weights_BTK)
    if split_experts and split_tokens:
      gather = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)
      given = jax.tree.map(gather, given)
    first = 0
    if split_experts:
      first = jax.lax.axis_index("expert") * (num_experts // sizes["expert"])
    x_BTD, experts_BTK, weights_BTK = given
    y_BTD = _serve(nnx.merge(graph, weights), x_BTD, experts_BTK - first, weights_BTK)
    if not split_experts:
      return y_BTD
    if split_tokens:
      return jax.lax.psum_scatter(y_BTD, "expert", tiled=True)
    return jax.lax.psum(y_BTD, "expert")

  y_BTD = jax.shard_map(
    local,
    in_specs=(
      PartitionSpec("expert") if split_experts else PartitionSpec(),
      tokens,
      tokens,
      tokens,
    ),
    out_specs=tokens,
    axis_names=manual,
    check_vma=False,
  )(weights, x_BTD, routing.experts_BTK, routing.weights_BTK)
  return y_BTD, {}


def _serve(
  experts: Experts, x_BTD: jax.Array, experts_BTK: jax.Array, weights_BTK: jax.Array
) -> jax.Array:
  """Returns the sum over those experts that are here, numbered from 0."""
  num_experts, num_chosen = experts.up.w[...].shape[0], experts_BTK.shape[-1]
  here_BTK = (experts_BTK >= 0) & (experts_BTK < num_experts)
  chosen = jnp.where(here_BTK, experts_BTK, num_experts).reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  inverse = jnp.argsort(order)
  sizes_E = jnp.bincount(chosen, length=num_experts).astype(jnp.int32)
  x_MD: Any = _rows(x_BTD.reshape(-1, x_BTD.shape[-1]), order, inverse, num_chosen)
  y_MD = experts(x_MD, lambda layer, x: layer.sorted(x, sizes_E))
  y_MD: Any = _rows(y_MD, inverse, order, 1)
  y_BTKD = jnp.where(here_BTK[..., None], y_MD.reshape(*experts_BTK.shape, -1), 0)
  return _weighed(y_BTKD, weights_BTK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
  """Returns x, each row `copies` times, in an order; its gradient is a gather too, no scatter."""
  del inverse
  return x[order // copies]


def _rows_forward(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> Any:
  return _rows(x, order, inverse, copies), inverse


def _rows_backward(copies: int, inverse: jax.Array, dy: jax.Array) -> Any:
  return dy[inverse].reshape(-1, copies, dy.shape[-1]).sum(1), None, None


_rows.defvjp(_rows_forward, _rows_backward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
  """Gives every expert an equal number of places in each row (GShard; Lepikhin et al., 2020).

  First choices are served before second ones, and earlier tokens before later ones; who finds no
  place keeps its residual only. Each row is a group: places do not depend on the other rows.

  Attributes:
    factor: Places over those needed if all experts were chosen equally often.
  """

  factor: float = 2.0

  def places(self, num_tokens: int, num_experts: int, num_chosen: int) -> int:
    """Returns C, a multiple of 4 as in Pax."""
    return 4 * math.ceil(num_tokens * num_chosen * self.factor / num_experts / 4)

  def __call__(
    self, experts: Experts, x_BTD: jax.Array, routing: Routing
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    B, T, D = x_BTD.shape
    E, K = routing.logits_BTE.shape[-1], routing.experts_BTK.shape[-1]
    C = self.places(T, E, K)
    chosen_BKT = routing.experts_BTK.swapaxes(1, 2)
    turns = jnp.cumsum(jax.nn.one_hot(chosen_BKT.reshape(B, K * T), E, dtype=jnp.int32), axis=1)
    turn_BKT = jnp.take_along_axis(turns, chosen_BKT.reshape(B, K * T, 1), axis=2)
    turn_BTK = (turn_BKT.reshape(B, K, T) - 1).swapaxes(1, 2)
    kept_BTK = turn_BTK < C
    slots = jnp.where(kept_BTK, routing.experts_BTK * C + turn_BTK, E * C).reshape(B, T * K)

    def put(slots: jax.Array, x_TD: jax.Array) -> jax.Array:
      places = jnp.zeros((E * C, D), x_TD.dtype)
      return places.at[slots].set(jnp.repeat(x_TD, K, axis=0), mode="drop")

    x_BECD = jax.vmap(put)(slots, x_BTD).reshape(B, E, C, D)
    # From each device's rows to each device's experts: an all-to-all over the expert axis.
    x_EBCD = mesh.constrain(x_BECD.swapaxes(0, 1), "experts", "group", None, None)
    y = experts(x_EBCD.reshape(E, B * C, D), lambda layer, x: layer.placed(x))
    y_EBCD = mesh.constrain(y.reshape(E, B, C, -1), "experts", "group", None, None)
    y_BSD = mesh.constrain(y_EBCD.swapaxes(0, 1).reshape(B, E * C, -1), "batch", None, None)
    y_BTKD = jax.vmap(lambda y_SD, slots: y_SD.at[slots].get(mode="fill", fill_value=0))(
      y_BSD, slots
    ).reshape(B, T, K, -1)
    dropped = jnp.stack([(~kept_BTK).sum(), jnp.array(B * T * K)]).astype(jnp.float32)
    return _weighed(y_BTKD, routing.weights_BTK), {"dropped_fraction": dropped}


def _weighed(y_BTKD: jax.Array, weights_BTK: jax.Array) -> jax.Array:
  y_BTD = jnp.einsum(
    "BTKD,BTK->BTD", y_BTKD, weights_BTK.astype(y_BTKD.dtype), preferred_element_type=jnp.float32
  )
  return y_BTD.astype(y_BTKD.dtype)


@jax.custom_vjp
def _with_gradient(y: jax.Array, weight: jax.Array, gradient: jax.Array) -> jax.Array:
  """Returns y; `weight` then has `gradient`, whatever the loss."""
  del weight, gradient
  return y


_with_gradient.defvjp(
  lambda y, weight, gradient: (y, gradient), lambda gradient, dy: (dy, gradient, None)
)


class Moe(module.Module):
  """A feed-forward layer of which each token sees `num_chosen` of `num_experts` experts."""

  def __init__(
    self,
    dim: int,
    *,
    num_experts: int,
    num_chosen: int,
    router: Callable[..., Linear],
    experts: Callable[[int, int], Experts],
    choice: Choice = softmax_choice,
    bias_rate: float | None = None,
    shared: Callable[[int], Mlp] | None = None,
    dispatch: Dispatch = dropless,
    balance_loss: float = 0.0,
    balanced_choices: int | None = None,
    z_loss: float = 0.0,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_experts: E.
      num_chosen: K.
      router: Of D to E, in float32.
      experts: Made for (E, D).
      choice: Which experts a token goes to.
      bias_rate: By so much each step changes the bias of an expert's choice, for those that were
        chosen seldom up, for others down (Wang et al., 2024); None: there is no bias.
      shared: An expert that every token sees besides.
      dispatch: How tokens come to their experts.
      balance_loss: Weight of the load-balancing loss (Fedus et al., 2021): 1 if all are equal.
      balanced_choices: How many of a token's choices it counts; None: all.
      z_loss: Weight of the squared log-normaliser of the router (Zoph et al., 2022).
    """
    self.num_experts = num_experts
    self.num_chosen = num_chosen
    self.choice = choice
    self.dispatch = dispatch
    self.balance_loss = balance_loss
    self.balanced_choices = balanced_choices
    self.z_loss = z_loss
    self.router = router({"model": dim}, {"experts": num_experts})
    self.router_bias = None if bias_rate is None else self._bias(num_experts, bias_rate)
    self.experts = experts(num_experts, dim)
    self.shared = None if shared is None else shared(dim)

  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (y_BTD, losses and metrics)."""
    bias_E = None if self.router_bias is None else self.router_bias[...]
    routing = self.choice(self.router(x_BTD), bias_E, self.num_chosen)
    y_BTD, report = self.dispatch(self.experts, x_BTD, routing)
    if bias_E is not None:
      load_E = jnp.bincount(routing.experts_BTK.reshape(-1), length=self.num_experts)
      y_BTD = _with_gradient(y_BTD, bias_E, load_E - load_E.mean())
    if self.shared is not None:
      y_BTD += self.shared(x_BTD)[0]
    return y_BTD, report | self._losses(routing)

  def _bias(self, num_experts: int, rate: float) -> nnx.Param:
    update = functools.partial(module.follow_sign, rate=rate)
    return self.weight({"experts": num_experts}, init=module.zeros, update=update)

  def _losses(self, routing: Routing) -> dict[str, jax.Array]:
    losses = {}
    if self.balance_loss:
      counted_BTK = routing.experts_BTK[..., : self.balanced_choices]
      chosen_E = jax.nn.one_hot(counted_BTK, self.num_experts).mean((0, 1, 2))
      mean_E = routing.probabilities_BTE.mean((0, 1))
      losses["balance_loss"] = self.balance_loss * self.num_experts * (chosen_E * mean_E).sum()
    if self.z_loss:
      normalizer = jax.nn.logsumexp(routing.logits_BTE, axis=-1)
      losses["z_loss"] = self.z_loss * jnp.square(normalizer).mean()
    return losses

  @property
  def expert_flops(self) -> float:
    """FLOPs of the experts per token in one forward pass."""
    experts = self.experts
    layers = [layer for layer in (experts.gate, experts.up, experts.down) if layer is not None]
    weights = sum(math.prod(layer.w.get_value().shape) for layer in layers)
    return 2 * weights * self.num_chosen / self.num_experts
