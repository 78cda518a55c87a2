# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts against loops over tokens."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import NamedSharding, PartitionSpec

from paxlike import layers
from paxlike.compilation import hlo_collectives
from paxlike.devices import topology
from paxlike.devices.mesh import MeshSpec, sharding
from paxlike.layers.call_context import Context
from paxlike.layers.moe.dispatch import Capacity, dropless
from paxlike.layers.moe.routing import sigmoid_choice, softmax_choice
from paxlike.training import train_state

B, T, D, E, K, F = 3, 10, 8, 4, 2, 6


def build(**options):
  linear = functools.partial(layers.Linear, role="router")
  expert = functools.partial(layers.ExpertLinear, role="expert", use_bias=True)
  experts = functools.partial(
    layers.Experts, hidden_dim=F, up=expert, gate=expert, down=expert, activation=layers.swiglu
  )
  defaults = {"num_experts": E, "num_chosen": K, "router": linear, "experts": experts}
  definition = layers.Definition(layers.Moe(D, **(defaults | options)))
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  keys = jax.random.split(jax.random.key(1), len(params))
  # Biases would all be zero.
  params = {
    name: value + 0.1 * jax.random.normal(key, value.shape)
    for key, (name, value) in zip(keys, params.items(), strict=True)
  }
  return definition, params


def apply(definition, params, x_BTD, num_devices, tensor=1):
  """Returns the layer's output and report, on devices along `expert`, and along `tensor`."""
  ici = {"expert": num_devices, "tensor": tensor}
  with jax.set_mesh(MeshSpec(ici=ici).build(jax.devices()[: num_devices * tensor])):
    given = jax.device_get((params, x_BTD))
    return jax.jit(lambda params, x_BTD: definition.bind(params)(x_BTD))(*given)


def silu(x):
  return x / (1 + np.exp(-x))


def reference(params, x_BTD, *, places=None):
  """Returns (y_BTD, dropped choices), one token, one choice, one expert at a time."""
  w = {name: np.asarray(value, np.float64) for name, value in params.items()}
  x_BTD = np.asarray(x_BTD, np.float64)
  y_BTD, dropped = np.zeros_like(x_BTD), 0
  for row in range(len(x_BTD)):
    logits_TE = x_BTD[row] @ w["router.w"]
    shares_TE = np.exp(logits_TE) / np.exp(logits_TE).sum(1, keepdims=True)
    chosen_TK = np.argsort(-shares_TE, axis=1)[:, :K]
    used = np.zeros(E, int)
    for k in range(K):
      for t in range(x_BTD.shape[1]):
        e = chosen_TK[t, k]
        used[e] += 1
        if places is not None and used[e] > places:
          dropped += 1
          continue
        up, gate = (
          x_BTD[row, t] @ w[f"experts.{name}.w"][e] + w[f"experts.{name}.b"][e]
          for name in ("up", "gate")
        )
        y = (silu(gate) * up) @ w["experts.down.w"][e] + w["experts.down.b"][e]
        y_BTD[row, t] += shares_TE[t, e] / shares_TE[t, chosen_TK[t]].sum() * y
  return y_BTD, dropped


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2), (2, 3)])  # D is not a multiple of 3.
@pytest.mark.parametrize("factor", [None, 0.4, 1.0, 4.0])
def test_output_is_that_of_a_loop_over_tokens(factor, sizes):
  dispatch = dropless if factor is None else Capacity(factor=factor)
  places = None if factor is None else Capacity(factor=factor).places(T, E, K)
  definition, params = build(dispatch=dispatch)
  x_BTD = 2 * jax.random.normal(jax.random.key(2), (B, T, D))
  y_BTD, report = apply(definition, params, x_BTD, *sizes)
  expected, dropped = reference(params, x_BTD, places=places)
  np.testing.assert_allclose(y_BTD, expected, atol=1e-5)
  if factor is not None:
    assert tuple(report.metrics["dropped_fraction"]) == (dropped, B * T * K)
  assert (dropped > 0) == (factor == 0.4)


@pytest.mark.parametrize(("factor", "places"), [(1.0, 8), (0.4, 4), (1.3, 8), (1.7, 12)])
def test_places_are_a_multiple_of_four(factor, places):
  assert Capacity(factor=factor).places(T, E, K) == places


@pytest.mark.slow
def test_the_balance_loss_is_least_where_all_are_chosen_alike():
  definition, params = build(balance_loss=0.5, z_loss=0.25)
  x_BTD = jax.random.normal(jax.random.key(2), (B, T, D))
  even = params | {"router.w": params["router.w"] * 0}
  one = params | {"router.w": np.zeros((D, E)) + np.array([9, 0, 0, 0.0])}
  reports = [definition.bind(p)(abs(x_BTD))[1] for p in (even, one)]
  # With equal logits the first K are chosen, but all are as likely.
  assert reports[0].losses["balance_loss"] == pytest.approx(0.5)
  assert reports[1].losses["balance_loss"] > 0.9
  assert reports[0].losses["z_loss"] == pytest.approx(0.25 * np.log(E) ** 2)


@pytest.mark.slow
def test_the_balance_loss_may_count_first_choices_only():
  definition, params = build(balance_loss=1.0, balanced_choices=1)
  x_BTD = jax.random.normal(jax.random.key(2), (B, T, D))
  loss = definition.bind(params)(x_BTD)[1].losses["balance_loss"]
  logits = np.asarray(x_BTD) @ np.asarray(params["router.w"])
  shares = np.asarray(jax.nn.softmax(logits))
  first = np.bincount(logits.argmax(-1).ravel(), minlength=E) / (B * T)
  assert loss == pytest.approx(E * (first * shares.mean((0, 1))).sum(), rel=1e-5)


def test_weights_of_choices():
  logits = jax.random.normal(jax.random.key(0), (1, 5, E))
  free = softmax_choice(logits, None, K, normalized=False)
  np.testing.assert_allclose(free.weights_BTK, np.sort(jax.nn.softmax(logits))[..., : -K - 1 : -1])
  np.testing.assert_allclose(softmax_choice(logits, None, K).weights_BTK.sum(-1), 1, rtol=1e-6)
  scaled = sigmoid_choice(logits, None, K, scale=2.5)
  np.testing.assert_allclose(scaled.weights_BTK.sum(-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize(
  "choice", [softmax_choice, functools.partial(sigmoid_choice, num_groups=4, num_chosen_groups=2)]
)
def test_gpus_choose_as_others_do_from_their_own_rows(choice, monkeypatch):
  logits_BTE = jax.random.normal(jax.random.key(0), (8, 16, 64)).round(1)  # Some are equal.
  expected = choice(logits_BTE, None, 4)
  with monkeypatch.context() as patched:
    patched.setattr(topology, "is_gpu", lambda: True)
    found = choice(logits_BTE, None, 4)
  np.testing.assert_array_equal(found.experts_BTK, expected.experts_BTK)
  np.testing.assert_allclose(found.weights_BTK, expected.weights_BTK, rtol=1e-6)
  with topology.target("h100-8"):
    devices = MeshSpec(ici=(1, 4, 2)).build(topology.devices())
    where = NamedSharding(devices, PartitionSpec("fsdp", "tensor"))
    given = jax.ShapeDtypeStruct(logits_BTE.shape, jnp.float32, sharding=where)
    with jax.set_mesh(devices):
      assert hlo.collectives(hlo.text(lambda x: jax.lax.top_k(x, 4)[1], given))
      assert not hlo.collectives(hlo.text(lambda x: choice(x, None, 4).experts_BTK, given))


def test_a_bias_changes_the_choice_and_not_the_weights():
  logits = jax.random.normal(jax.random.key(0), (1, 5, E))
  bias = jnp.array([0, 0, 0, 9.0])
  chosen = sigmoid_choice(logits, bias, E, scale=1.0)
  assert (chosen.experts_BTK[..., 0] == 3).all()
  scores = jnp.take_along_axis(jax.nn.sigmoid(logits), chosen.experts_BTK, -1)
  np.testing.assert_allclose(chosen.weights_BTK, scores / scores.sum(-1, keepdims=True), rtol=1e-5)


def test_experts_are_chosen_from_the_best_groups():
  logits = jnp.array([[[5, -5, 1, 1.2, 0.9, 0.8]]])
  # The best expert stands in the group whose two best are worst together.
  chosen = sigmoid_choice(logits, None, 2, num_groups=3, num_chosen_groups=1)
  assert sorted(np.asarray(chosen.experts_BTK).ravel()) == [2, 3]


def test_tokens_reach_the_experts_of_other_devices_by_all_to_all_in_columns():
  definition, params = build(dispatch=Capacity(factor=1.0))
  x_BTD = jax.random.normal(jax.random.key(2), (4, T, D))

  def total(params, x_BTD):
    return definition.bind(params)(x_BTD)[0].sum()

  def exchanged(**ici):
    mesh = MeshSpec(ici=ici).build(jax.devices()[: math.prod(ici.values())])
    with jax.set_mesh(mesh):
      specs = {name: sharding(mesh, w.dims, w.shape) for name, w in definition.weights.items()}
      rows = sharding(mesh, ("batch", None, None), x_BTD.shape)
      program = hlo.text(jax.grad(total, (0, 1)), *jax.device_put((params, x_BTD), (specs, rows)))
    found = hlo_collectives.instructions(program, mesh)
    return sum(one.nbytes for one in found if (one.kind, one.axes) == ("all-to-all", ("expert",)))

  unsplit = exchanged(expert=2)
  assert unsplit > 0
  assert exchanged(expert=2, tensor=2) == unsplit / 2
  assert exchanged(expert=2, tensor=4) == unsplit / 4


def gradient_of(definition):
  """Returns the function of weights and input whose result is the gradient of both."""

  def total(params, x_BTD):
    y_BTD = definition.bind(params)(x_BTD)[0]
    return (y_BTD * jnp.cos(jnp.arange(y_BTD.size)).reshape(y_BTD.shape)).sum()

  return jax.jit(jax.grad(total, (0, 1)))


def shardings(mesh, definition, x_BTD):
  specs = {name: sharding(mesh, w.dims, w.shape) for name, w in definition.weights.items()}
  return specs, sharding(mesh, ("batch", None, None), x_BTD.shape)


@pytest.mark.parametrize(
  ("ici", "num_sequences"),
  [
    ({"tensor": 2}, 4),
    ({"expert": 2, "tensor": 2}, 3),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, 4),
    ({"expert": 2, "context": 2, "tensor": 2}, 4),
    ({"expert": 4}, 4),
  ],
  ids=str,
)
def test_gradients_of_dropless_experts_are_those_of_one_device(ici, num_sequences):
  lora = functools.partial(layers.ExpertLora, rank=2)
  expert = functools.partial(layers.ExpertLinear, role="expert", use_bias=True, lora=lora)
  definition, params = build(experts=experts_of(up=expert, gate=expert, down=expert))
  x_BTD = jax.random.normal(jax.random.key(2), (num_sequences, T, D))

  def on(**ici):
    mesh = MeshSpec(ici=ici).build(jax.devices()[: math.prod(ici.values())])
    with jax.set_mesh(mesh):
      given = jax.device_put((params, x_BTD), shardings(mesh, definition, x_BTD))
      return jax.device_get(gradient_of(definition)(*given))

  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), on(**ici), on(data=1))


def test_outputs_of_a_tokens_experts_are_summed_before_they_are_reduced_over_tensor():
  x_BTD = jnp.zeros((4, T, D))

  def sent(num_chosen):
    definition, params = build(num_chosen=num_chosen)
    with topology.target("h200-4"):
      mesh = MeshSpec(ici={"expert": 2, "tensor": 2}).build()
      with jax.set_mesh(mesh):
        given = jax.tree.map(
          lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
          (params, x_BTD),
          shardings(mesh, definition, x_BTD),
        )
        program = hlo.text(gradient_of(definition), *given)
    found = hlo_collectives.instructions(program, mesh)
    return sum(one.nbytes for one in found if one.axes == ("tensor",))

  one, several = sent(1), sent(3)
  gathered = 2 * 2 * T  # Tokens of a device and of the other along `expert`.
  gradients_of_weights = 2 * 2 * gathered * 4  # Of two more choices, all-reduced, float32.
  assert 0 < one <= several <= one + gradients_of_weights


class Normed(layers.ExpertLinear):
  def sorted(self, x_MD, sizes_E):
    return jax.nn.softmax(super().sorted(x_MD, sizes_E))


class NormedLora(layers.ExpertLora):
  def __call__(self, x, y, *, multiply):
    return jax.nn.softmax(super().__call__(x, y, multiply=multiply))


class Ungated(layers.Experts):
  def __init__(self, num_experts, dim, num_chosen):
    linear = functools.partial(layers.ExpertLinear, role="own")
    self.up = linear(num_experts, {"model": dim}, {"ffn": F}, num_chosen)
    self.down = linear(num_experts, {"ffn": F}, {"model": dim}, num_chosen)

  def __call__(self, x, apply):
    return apply(self.down, jax.nn.softmax(apply(self.up, x)))


PLAIN = functools.partial(layers.ExpertLinear, role="plain")


def experts_of(**options):
  defaults = {"up": PLAIN, "down": PLAIN, "activation": layers.swiglu}
  return functools.partial(layers.Experts, **({"hidden_dim": F} | defaults | options))


@pytest.mark.parametrize(
  "experts",
  [
    experts_of(activation=jax.nn.softmax),
    experts_of(activation=jnp.tanh, up=functools.partial(Normed, role="own")),
    experts_of(activation=jnp.tanh, down=functools.partial(Normed, role="own")),
    experts_of(
      activation=jnp.tanh,
      down=functools.partial(PLAIN, lora=functools.partial(NormedLora, rank=2)),
    ),
    Ungated,
  ],
  ids=["activation", "up", "down", "lora", "experts"],
)
def test_what_users_write_may_mix_the_hidden_dim(experts):
  definition, params = build(experts=experts)
  x_BTD = jax.random.normal(jax.random.key(2), (B, T, D))
  one, two = (apply(definition, params, x_BTD, 1, tensor)[0] for tensor in (1, 2))
  np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize(
  ("dispatch", "num_devices"), [(dropless, 1), (Capacity(factor=4.0), 1), (Capacity(factor=4.0), 4)]
)
def test_experts_of_users_may_override_their_matmuls(dispatch, num_devices):
  class Sorted(layers.ExpertLinear):
    def sorted(self, x_MD, sizes_E):
      return -super().sorted(x_MD, sizes_E)

  class Placed(layers.ExpertLinear):
    def placed(self, x_ECD):
      return -super().placed(x_ECD)

  own = Sorted if num_devices == 1 else Placed  # Only several devices multiply slots.

  def output(down):
    experts = functools.partial(layers.Experts, hidden_dim=F, up=up, down=down, activation=jnp.tanh)
    definition, params = build(dispatch=dispatch, experts=experts)
    return apply(definition, params, jnp.ones((1, 4, D)), num_devices)[0]

  up = functools.partial(layers.ExpertLinear, role="up")
  plain, negated = (
    output(functools.partial(cls, role="down")) for cls in (layers.ExpertLinear, own)
  )
  np.testing.assert_allclose(negated, -plain, rtol=1e-6)


@pytest.mark.parametrize("choice", [softmax_choice, sigmoid_choice])
def test_loads_and_entropies_are_those_of_numpy(choice):
  definition, params = build(choice=choice)
  x_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  _, aux = definition.bind(params)(x_BTD, Context(log_layers=True))
  logits = x_BTD.reshape(-1, D).astype(float) @ np.asarray(params["router.w"], float)
  scores = np.exp(logits) if choice is softmax_choice else 1 / (1 + np.exp(-logits))
  shares = scores / scores.sum(1, keepdims=True)
  chosen = np.argsort(-logits, axis=1)[:, :K].reshape(-1)
  assert not definition.bind(params)(x_BTD, Context())[1].layer_sums
  np.testing.assert_array_equal(
    aux.layer_sums[f"expert_load/{E}"], np.bincount(chosen, minlength=E)
  )
  total, weight = aux.layer_sums["router_entropy"]
  assert weight == B * T
  np.testing.assert_allclose(total, -(shares * np.log(shares)).sum(), rtol=1e-5)
