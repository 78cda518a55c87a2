# SPDX-License-Identifier: Apache-2.0
"""The GPT against its arithmetic written out in NumPy."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.jaxprs import equations
from helpers.tiny_model import VOCAB, batch, tiny

from paxlike.devices.mesh import MeshSpec
from paxlike.layers.decoder import context_of, forward
from paxlike.layers.loss import cross_entropy, sum_over_chunks
from paxlike.training import train_state
from paxlike.training.objectives import NextToken


def params_of(definition):
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  # Biases and norms start at zero: make them count.
  return {
    name: value + 0.1 * jax.random.normal(jax.random.key(len(name)), value.shape)
    for name, value in params.items()
  }


def reference(params, tokens):
  p = {name: np.asarray(value, np.float64) for name, value in params.items()}

  def norm(name, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * (1 + p[f"{name}.scale"]) + p[f"{name}.bias"]

  def linear(name, x, spec):
    return np.einsum(spec, x, p[f"{name}.w"]) + p[f"{name}.b"]

  def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  x = p["embedding.table"][tokens] + p["positions.table"][: tokens.shape[1]]
  for layer in range(2):
    at = f"stack.layers.{layer}"
    y = norm(f"{at}.attention_norm", x)
    q, k, v = (linear(f"{at}.attention.{n}", y, "btd,dnh->btnh") for n in ("query", "key", "value"))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(tokens.shape[1]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    x = x + linear(f"{at}.attention.output", y, "btnh,nhd->btd")
    y = gelu(linear(f"{at}.mlp.up", norm(f"{at}.mlp_norm", x), "btd,df->btf"))
    x = x + linear(f"{at}.mlp.down", y, "btf,fd->btd")
  return norm("norm", x) @ p["embedding.table"].T


def test_logits_equal_numpy():
  definition = tiny()
  params = params_of(definition)
  data = batch(2)
  logits, aux = jax.jit(functools.partial(forward, definition))(params, data)
  assert aux == ({}, {}, {}, {}, {}, {})
  np.testing.assert_allclose(logits, reference(params, data["inputs"]), atol=1e-4)


LENGTHS = (16, 15, 13, 2, 1)


def cut(data, length):
  return {name: x[:, :length] for name, x in data.items()}


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_the_loss_in_chunks_is_the_loss_of_the_logits(length):
  definition = tiny()
  params = params_of(definition)
  data = cut(batch(2), length)

  def whole(params):
    logits, _ = forward(definition, params, data)
    return (cross_entropy(logits, data["targets"]) * data["weights"]).sum()

  def chunked(params):
    return NextToken().total(definition.bind(params), None, data, None)[0]

  expected, gradients = jax.jit(jax.value_and_grad(whole))(params)
  got, chunk_gradients = jax.jit(jax.value_and_grad(chunked))(params)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  np.testing.assert_allclose(jax.jit(chunked)(params), expected, rtol=1e-5)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(chunk_gradients[name], gradient, atol=2e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_made_of_logits_in_chunks_has_every_token_once(length):
  definition = tiny()
  params, data = params_of(definition), cut(batch(2), length)
  logits, _ = forward(definition, params, data)
  model = definition.bind(params)
  x_BTD, *_ = model.hidden(data["inputs"], context_of(data))
  got = model.map_logits(lambda logits, t: cross_entropy(logits, t), x_BTD, data["targets"])
  np.testing.assert_allclose(got, cross_entropy(logits, data["targets"]), rtol=1e-5)


@pytest.mark.parametrize("length", [16, 15, 13])
def test_a_step_never_holds_the_logits_of_all_tokens(length):
  definition = tiny()
  params, data = params_of(definition), cut(batch(8), length)
  program = jax.make_jaxpr(
    jax.grad(lambda params: NextToken().total(definition.bind(params), None, data, None)[0])
  )(params)
  shapes = [made.aval.shape for one, _ in equations(program.jaxpr) for made in one.outvars]
  of_logits = [shape for shape in shapes if shape[-1:] == (VOCAB,) and shape[0] == 8]
  assert 0 < max(map(math.prod, of_logits)) <= 8 * 4 * VOCAB


def test_chunks_pass_on_what_the_sum_is_multiplied_by():
  weights, x = jax.random.normal(jax.random.key(0), (2, 3, 4))

  def loss(w, x, constants):
    return (jnp.sin(w) * x * constants).sum()

  def total(w, x):
    value: Any = sum_over_chunks(loss, w[0], x, jnp.arange(3.0))
    return 3 * value

  def plainly(w, x):
    return 3 * sum(loss(w[0], x[i], float(i)) for i in range(3))

  for got, expected in zip(
    jax.grad(total, (0, 1))(weights, x), jax.grad(plainly, (0, 1))(weights, x), strict=True
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_untrained_model_knows_nothing():
  definition = tiny()
  data = batch(4)
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  total, _ = NextToken().total(definition.bind(params), None, data, None)
  assert abs(float(total) / data["weights"].sum() - np.log(VOCAB)) < 0.3
