# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts (Shazeer et al., 2017)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import entr

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import module
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.mlp import Mlp
from paxlike.layers.moe.dispatch import Dispatch, dropless
from paxlike.layers.moe.experts import Experts
from paxlike.layers.moe.routing import Choice, Routing, check_groups, scores, softmax_choice


@jax.custom_vjp
def _with_gradient(y: jax.Array, weight: jax.Array, gradient: jax.Array) -> jax.Array:
  """Returns y; the gradient of `weight` becomes `gradient`, regardless of the loss."""
  del weight, gradient
  return y


_with_gradient.defvjp(
  lambda y, weight, gradient: (y, gradient), lambda gradient, dy: (dy, gradient, None)
)


def _groups(choice: Choice) -> dict[str, int]:
  """Returns the expert-group arguments of a choice."""
  given = getattr(choice, "keywords", {})
  return {name: given[name] for name in ("num_groups", "num_chosen_groups") if name in given}


def _norms(make: Callable[[int], Any] | None, dim: int) -> tuple[Any, Any]:
  """Returns the norms of a branch's input and output, or None for each."""
  return (None, None) if make is None else (make(dim), make(dim))


def _normed(norm: Any, x_BTD: jax.Array) -> jax.Array:
  return x_BTD if norm is None else norm(x_BTD)


@configurable
class Moe(module.Module):
  """A feed-forward layer that routes each token to `num_chosen` of `num_experts` experts."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_experts: ranges.Size,
    num_chosen: ranges.Size,
    router: Callable[..., Linear],
    experts: Callable[[int, int, int], Experts],
    choice: Choice = softmax_choice,
    bias_rate: ranges.Fraction | None = None,
    shared: Callable[[int], Mlp] | None = None,
    shared_gate: Callable[..., Linear] | None = None,
    branch_norm: Callable[[int], Any] | None = None,
    router_norm: Callable[[int], Any] | None = None,
    expert_scale: module.Initializer | None = None,
    dispatch: Dispatch = dropless,
    balance_loss: ranges.Weight = 0.0,
    balanced_choices: ranges.Positive | None = None,
    z_loss: ranges.Weight = 0.0,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_experts: E.
      num_chosen: K, the top-k.
      router: D -> E, in float32.
      experts: Builds the experts; called with (E, D, K).
      choice: Chooses a token's experts from the router's logits.
      bias_rate: Step size of the router bias, raised for experts below the mean load and lowered
        for those above it (auxiliary-loss-free balancing; Wang et al., 2024); None: no bias.
      shared: A shared expert that every token passes through.
      shared_gate: D -> 1, whose sigmoid multiplies the output of the shared expert.
      branch_norm: Applied to the inputs and outputs of the routed experts, and to those of the
        shared one. Its block then has no norm before the layer (Gemma 4).
      router_norm: Applied to the input of the router.
      expert_scale: Initializer of a trained factor of each routed expert's output.
      dispatch: Moves tokens to their experts and back.
      balance_loss: Weight of the load-balancing loss (Fedus et al., 2021), which is 1 for uniform
        routing.
      balanced_choices: The number of a token's top choices that this loss counts; None: all.
      z_loss: Weight of the router z-loss, the squared logsumexp of the logits (Zoph et al., 2022).
    """
    check_groups(num_experts, num_chosen, **_groups(choice))
    self.num_experts = num_experts
    self.num_chosen = num_chosen
    self.choice = choice
    self.dispatch = dispatch
    self.balance_loss = balance_loss
    self.balanced_choices = balanced_choices
    self.z_loss = z_loss
    self.router = router({"model": dim}, {"experts": num_experts})
    self.router_norm = None if router_norm is None else router_norm(dim)
    self.expert_scale = (
      None if expert_scale is None else self.weight({"experts": num_experts}, init=expert_scale)
    )
    self.router_bias = None if bias_rate is None else self._bias(num_experts, bias_rate)
    self.experts = experts(num_experts, dim, num_chosen)
    self.shared = None if shared is None else shared(dim)
    gate = {"model": dim}, {"head": 1}
    self.shared_gate = None if shared_gate is None else shared_gate(*gate)
    self.has_own_norms = branch_norm is not None
    routed, of_shared = branch_norm, None if shared is None else branch_norm
    self.routed_norm, self.routed_post_norm = _norms(routed, dim)
    self.shared_norm, self.shared_post_norm = _norms(of_shared, dim)

  def __call__(self, x_BTD: jax.Array, context: Context | None = None) -> tuple[jax.Array, Aux]:
    """Returns (y_BTD, losses and metrics)."""
    bias_E = None if self.router_bias is None else self.router_bias[...]
    logits_BTE = self.router(_normed(self.router_norm, x_BTD))
    routing = self.choice(logits_BTE, bias_E, self.num_chosen)
    if self.expert_scale is not None:
      scale_BTE = jnp.broadcast_to(self.expert_scale[...], logits_BTE.shape)
      factors_BTK = scores(routing.experts_BTK, scale_BTE)
      routing = routing._replace(weights_BTK=routing.weights_BTK * factors_BTK)
    # Dispatch shards columns over `tensor`. XLA would extend that to other matmuls, and (in JAX
    # 0.10.2) compute wrong sums with one sequence per device over `data` and `fsdp`.
    routed_BTD = mesh.constrain(_normed(self.routed_norm, x_BTD), "batch", "time", None)
    y_BTD, metrics = self.routed(routed_BTD, routing)
    y_BTD = mesh.constrain(y_BTD, "batch", "time", None)
    y_BTD = _normed(self.routed_post_norm, y_BTD)
    if bias_E is not None:
      load_E = jnp.bincount(routing.experts_BTK.reshape(-1), length=self.num_experts)
      y_BTD = _with_gradient(y_BTD, bias_E, load_E - load_E.mean())
    if self.shared is not None:
      shared_BTD = self.shared(_normed(self.shared_norm, x_BTD), context)[0]
      shared_BTD = _normed(self.shared_post_norm, shared_BTD)
      if self.shared_gate is not None:
        shared_BTD *= jax.nn.sigmoid(self.shared_gate(x_BTD, context))
      y_BTD += shared_BTD
    aux = none()._replace(losses=self._losses(routing), metrics=metrics)
    if context is not None and context.log_layers:
      aux = aux._replace(layer_sums=self._logged(routing))
    return y_BTD, aux

  def routed(self, x_BTD: jax.Array, routing: Routing) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the weighted sum of the outputs of each token's experts, metrics)."""
    return self.dispatch(self.experts, x_BTD, routing)

  def _bias(self, num_experts: int, rate: float) -> nnx.Param:
    update = functools.partial(module.follow_sign, rate=rate)
    return self.weight({"experts": num_experts}, init=module.zeros, update=update)

  def _logged(self, routing: Routing) -> dict[str, jax.Array]:
    """Returns the layer metrics: the tokens of each expert, and [sum, weight] of the entropy.

    The entropy is that of a token's probabilities, in nats. The name of the counts ends in E, since
    layers may differ in it.
    """
    is_chosen = routing.experts_BTK[..., None] == jnp.arange(self.num_experts)
    scores_BTE = jax.lax.stop_gradient(routing.probabilities_BTE)
    entropy_BT = entr(scores_BTE / scores_BTE.sum(-1, keepdims=True)).sum(-1)
    return {
      f"expert_load/{self.num_experts}": is_chosen.sum((0, 1, 2), dtype=jnp.float32),
      "router_entropy": jnp.stack([entropy_BT.sum(), jnp.float32(entropy_BT.size)]),
    }

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


@configurable
class InputWeightedMoe(Moe):
  """`Moe` for one expert per token, whose weight multiplies the expert's input (Llama 4)."""

  def routed(self, x_BTD: jax.Array, routing: Routing) -> tuple[jax.Array, dict[str, jax.Array]]:
    if self.num_chosen != 1:
      raise ArgumentError(
        f"num_chosen={self.num_chosen} must be 1: weighted inputs of several experts would differ."
      )
    weighted_BTD = x_BTD * routing.weights_BTK.astype(x_BTD.dtype)
    ones_BTK = jnp.ones_like(routing.weights_BTK)
    return self.dispatch(self.experts, weighted_BTD, routing._replace(weights_BTK=ones_BTK))
