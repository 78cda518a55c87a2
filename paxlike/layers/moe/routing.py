# SPDX-License-Identifier: Apache-2.0
"""Top-k choices of experts from a router's logits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.errors import ArgumentError


class Routing(NamedTuple):
  """The routing of tokens to experts.

  Attributes:
    experts_BTK: int32, the experts of each token, first choice first.
    weights_BTK: float32, the weights of their outputs.
    probabilities_BTE: float32, the router's probabilities or scores.
    logits_BTE: float32.
  """

  experts_BTK: jax.Array
  weights_BTK: jax.Array
  probabilities_BTE: jax.Array
  logits_BTE: jax.Array


# (logits_BTE, the router's bias_E if it has one, K) -> Routing.
Choice = Callable[[jax.Array, jax.Array | None, int], Routing]


@configurable
def softmax_choice(
  logits_BTE: jax.Array, bias_E: jax.Array | None, num_chosen: int, *, normalized: bool = True
) -> Routing:
  """Top-k of the softmax; weights are the probabilities, scaled to sum to 1 if `normalized`."""
  assert bias_E is None
  probabilities_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  experts_BTK = _top(probabilities_BTE, num_chosen)[1]
  weights_BTK = scores(experts_BTK, probabilities_BTE)
  if normalized:
    weights_BTK /= weights_BTK.sum(-1, keepdims=True)
  return Routing(experts_BTK, weights_BTK, probabilities_BTE, logits_BTE)


@configurable
def sigmoid_choice(
  logits_BTE: jax.Array,
  bias_E: jax.Array | None,
  num_chosen: int,
  *,
  num_groups: ranges.Size = 1,
  num_chosen_groups: ranges.Size = 1,
  scale: ranges.Factor = 1.0,
) -> Routing:
  """The choice of DeepSeek-V3: group-limited top-k of sigmoid scores plus a bias.

  Args:
    logits_BTE: The router's logits.
    bias_E: Added to the scores for the choice only, not for the weights; gets no gradient.
    num_chosen: K.
    num_groups: The number of equal groups of experts, ranked by the sum of their two best scores.
    num_chosen_groups: The number of best groups from which experts are chosen.
    scale: The sum of a token's weights.
  """
  scores_BTE = jax.nn.sigmoid(logits_BTE)
  ranks_BTE = scores_BTE if bias_E is None else scores_BTE + jax.lax.stop_gradient(bias_E)
  if num_groups > 1:
    grouped = ranks_BTE.reshape(*ranks_BTE.shape[:-1], num_groups, -1)
    best = _top(grouped, 2)[0].sum(-1)
    chosen = _top(best, num_chosen_groups)[1]
    allowed = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(-2)
    ranks_BTE = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranks_BTE.shape)
  experts_BTK = _top(ranks_BTE, num_chosen)[1]
  weights_BTK = scores(experts_BTK, scores_BTE)
  weights_BTK = scale * weights_BTK / (weights_BTK.sum(-1, keepdims=True) + 1e-20)
  return Routing(experts_BTK, weights_BTK, scores_BTE, logits_BTE)


@configurable
def sigmoid_of_top_choice(
  logits_BTE: jax.Array, bias_E: jax.Array | None, num_chosen: int
) -> Routing:
  """The choice of Llama 4: top-k of the logits; weights are their sigmoids, not normalized."""
  assert bias_E is None
  experts_BTK = _top(logits_BTE, num_chosen)[1]
  weights_BTK = jax.nn.sigmoid(scores(experts_BTK, logits_BTE))
  return Routing(experts_BTK, weights_BTK, jax.nn.softmax(logits_BTE, axis=-1), logits_BTE)


def _top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the k largest numbers of each row, first the largest, and their int32 places.

  With `jax.lax.top_k` on several GPUs, each may gather and sort the rows of all (JAX 0.10.2). There
  is no gradient, and at least k numbers of a row must not be -inf.
  """
  x = jax.lax.stop_gradient(x)
  if not topology.is_gpu():
    return jax.lax.top_k(x, k)
  found = []
  for _ in range(k):
    place = jnp.argmax(x, -1)
    found.append((x.max(-1), place))
    x = jnp.where(jnp.arange(x.shape[-1]) == place[..., None], -jnp.inf, x)
  values, places = zip(*found, strict=True)
  return jnp.stack(values, -1), jnp.stack(places, -1)


def check_groups(
  num_experts: int, num_chosen: int, *, num_groups: int = 1, num_chosen_groups: int = 1
):
  """Checks that `num_chosen` experts can be chosen; see `sigmoid_choice`.

  Raises:
    ArgumentError: There are too few experts or groups, or the groups do not divide the experts.
  """
  if num_chosen > num_experts:
    raise ArgumentError(f"{num_chosen=} is more than {num_experts=}.")
  if num_groups == 1:
    return
  if num_experts % num_groups or num_experts < 2 * num_groups:
    raise ArgumentError(
      f"{num_experts=} does not divide into {num_groups=} groups of at least two experts: a group"
      " is ranked by its two best scores."
    )
  if num_chosen_groups > num_groups:
    raise ArgumentError(f"{num_chosen_groups=} is more than {num_groups=}.")
  allowed = num_chosen_groups * num_experts // num_groups
  if num_chosen > allowed:
    raise ArgumentError(f"{num_chosen=}, but {num_chosen_groups=} have only {allowed} experts.")


def scores(experts_BTK: jax.Array, scores_BTE: jax.Array) -> jax.Array:
  """Returns the scores of the chosen experts, float32 [B, T, K].

  It compares indexes instead of gathering: in a pipeline stage whose tokens and heads are sharded,
  XLA aborts on a scatter, the gradient of a gather.
  """
  return _select(scores_BTE.shape[-1], experts_BTK, scores_BTE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _select(num_experts: int, experts_BTK: jax.Array, scores_BTE: jax.Array) -> jax.Array:
  return jnp.where(_is_expert(experts_BTK, num_experts), scores_BTE[..., None, :], 0).sum(-1)


def _select_forward(num_experts: int, experts_BTK: jax.Array, scores_BTE: jax.Array) -> Any:
  return _select(num_experts, experts_BTK, scores_BTE), experts_BTK


def _select_backward(num_experts: int, experts_BTK: jax.Array, dy_BTK: jax.Array) -> Any:
  return None, jnp.where(_is_expert(experts_BTK, num_experts), dy_BTK[..., None], 0).sum(-2)


def _is_expert(experts_BTK: jax.Array, num_experts: int) -> jax.Array:
  return experts_BTK[..., None] == jnp.arange(num_experts)


_select.defvjp(_select_forward, _select_backward)
