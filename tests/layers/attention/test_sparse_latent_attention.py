# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: what the indexer selects, and the loss that trains it.

Its logits, and decoding with its cache, are compared with transformers in convert/test_parity.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_models import converted, save_random
from helpers.shrunk import shrunk

from paxlike import layers
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.attention import indexer, sparse_latent_attention
from paxlike.layers.attention.auto import Place
from paxlike.layers.call_context import Context
from paxlike.layers.module import Definition, Params

T, D, TOP_K = 24, 32, 6


def layer(kind: Any = layers.SparseLatentAttention, top_k: int = TOP_K) -> Definition:
  def linear(role):
    return functools.partial(layers.Linear, role=role)

  options: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "rope_dim": 8,
    "value_dim": 12,
    "rank": 20,
    "query_rank": 24,
    "norm": layers.RmsNorm,
    "rope": functools.partial(layers.Rope, interleaved=True),
    **{role: linear(role) for role in ("query", "query_down", "latent", "key_value", "output")},
  }
  if kind is layers.SparseLatentAttention:
    options["indexer"] = functools.partial(
      layers.Indexer,
      num_heads=8,
      head_dim=16,
      top_k=top_k,
      query=linear("index_query"),
      key=linear("index_key"),
      weights=linear("index_weights"),
      norm=layers.LayerNorm,
      rope=layers.Rope,
    )
  return Definition(kind(D, **options))


def given(batch: int = 8) -> tuple[Params, jax.Array, Context]:
  """Returns weights, inputs, and documents of 1, 17 and 1 tokens before padding."""
  keys = jax.random.split(jax.random.key(0), 20)
  specs = layer().weights.items()
  params = {
    name: jax.random.normal(key, spec.shape) / math.sqrt(spec.fan_in or 1)
    for key, (name, spec) in zip(keys, specs, strict=False)
  }
  x_BTD = jax.random.normal(keys[-1], (batch, T, D))
  lengths = np.array([1, 17, 1, 5])
  segments = np.repeat([1, 2, 3, 0], lengths)
  positions = np.concatenate([np.arange(length) for length in lengths])

  def rows(x):
    return jnp.asarray(np.broadcast_to(x, (batch, T)).astype(np.int32))

  return params, x_BTD, Context(segments_BT=rows(segments), positions_BT=rows(positions))


def output_and_gradients(
  definition: Definition, params: Params, x_BTD: jax.Array, context: Context
):
  """Returns (y, the indexer's loss), and the gradients of a function of both."""

  def total(params, x_BTD):
    y_BTD, _, aux = definition.bind(params)(x_BTD, context)
    loss = aux.losses["index_loss"]
    return jnp.square(y_BTD).sum() + 10 * loss, (y_BTD, loss)

  return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x_BTD)


def output(definition: Definition, params: Params, x_BTD: jax.Array, context: Context) -> Any:
  """Returns (y, the losses)."""

  @jax.jit
  def of(params, x_BTD):
    y_BTD, _, aux = definition.bind(params)(x_BTD, context)
    return y_BTD, aux.losses

  return of({name: params[name] for name in definition.weights}, x_BTD)


def test_attention_to_all_tokens_is_latent_attention():
  params, x_BTD, context = given(2)
  expected, _ = output(layer(layers.LatentAttention), params, x_BTD, context)
  found, _ = output(layer(top_k=T), params, x_BTD, context)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  # A longer sequence whose longest document has 17 tokens.
  found, _ = output(layer(top_k=17), params, x_BTD, context)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  found, _ = output(layer(), params, x_BTD, context)
  assert np.abs(found - expected)[:, 8:18].max() > 0.05


def test_a_document_selects_its_own_tokens(monkeypatch):
  params, x_BTD, context = given(2)
  found, losses = output(layer(), params, x_BTD, context)
  alone, of_alone = output(layer(), params, x_BTD[:, 1:18], Context())
  np.testing.assert_allclose(found[:, 1:18], alone, atol=1e-5)
  # A document of one token has no divergence, and padding does not count.
  assert float(losses["index_loss"]) == pytest.approx(17 / T * float(of_alone["index_loss"]))
  # Few queries at a time, in several spans, of which some have fewer keys than are selected.
  monkeypatch.setattr(indexer, "_MOST_SCORES", 2 * 8 * T * 2)
  monkeypatch.setattr(sparse_latent_attention, "_MOST_NUMBERS", 2 * TOP_K * 56 * 5)
  in_chunks = output(layer(), params, x_BTD, context)
  np.testing.assert_allclose(in_chunks[0], found, atol=1e-5)
  np.testing.assert_allclose(in_chunks[1]["index_loss"], losses["index_loss"], rtol=1e-5)


@pytest.mark.parametrize("mesh", [{"context": 8}, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_devices_that_share_sequences_and_heads_are_one_device(mesh):
  definition, (params, x_BTD, context) = layer(), given()
  expected = output_and_gradients(definition, params, x_BTD, context)
  with jax.set_mesh(MeshSpec(ici=mesh).build()):
    found = output_and_gradients(definition, params, x_BTD, context)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    # Sums over devices round in another order, relative to the largest number.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(np.abs(b).max(), 10))


def test_the_kernel_is_not_in_use_where_attention_is_sparse():
  model: Any = shrunk("DeepSeekV32").module
  place = Place(jax.devices()[0])
  assert model.kernels(place, seq_len=TOP_K) == model.kernels(place) == ["flash_cpu"]
  assert model.kernels(place, seq_len=TOP_K + 1) == ["sparse"]


def loss_in_torch(theirs: Any, tokens: np.ndarray) -> Any:
  """Returns the loss of the indexers by their published formula, after its backward pass."""
  import torch
  from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

  divergences = []

  def observe(attention, args, kwargs, outputs):
    del args
    x, mask = kwargs["hidden_states"].detach(), kwargs["attention_mask"]
    latent = attention.q_a_layernorm(attention.q_a_proj(x)).detach()
    of, rotary = attention.indexer, kwargs["position_embeddings"]
    selected = of(x, latent, rotary, mask[:, 0], None).long()
    q = of.wq_b(latent).unflatten(-1, (of.n_heads, of.head_dim))
    k = of.k_norm(of.wk(x)).unsqueeze(2)
    split = [of.qk_rope_head_dim, of.head_dim - of.qk_rope_head_dim]
    (q_rot, q), (k_rot, k) = q.split(split, -1), k.split(split, -1)
    q_rot, k_rot = apply_rotary_pos_emb(q_rot, k_rot, *rotary, unsqueeze_dim=2)
    q, k = torch.cat([q_rot, q], -1), torch.cat([k_rot, k], -1)[:, :, 0]
    products = torch.einsum("btih,bsh->btis", q, k).relu()
    scores = (products * of.weights_proj(x)[..., None]).sum(2) * (of.n_heads * of.head_dim) ** -0.5
    target = outputs[1].detach().mean(1)
    for text in range(len(x)):
      for t in range(x.shape[1]):
        chosen = [s for s in selected[text, t].tolist() if s <= t]
        p, log_q = target[text, t, chosen], scores[text, t, chosen].log_softmax(-1)
        assert float(p.sum()) == pytest.approx(1, abs=1e-5)
        divergences.append((p * (p.log() - log_q)).sum())

  hooks = [
    one.self_attn.register_forward_hook(observe, with_kwargs=True) for one in theirs.model.layers
  ]
  theirs(torch.tensor(tokens, dtype=torch.long))
  for hook in hooks:
    hook.remove()
  loss: Any = sum(divergences) / tokens.size
  loss.backward()
  return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [6, 64])
def test_the_loss_of_the_indexer_trains_it_alone_as_in_pytorch(tmp_path, top_k):
  theirs = save_random("deepseek_v32", tmp_path / "theirs", index_topk=top_k)
  definition, params = converted(tmp_path / "theirs", tmp_path / "ours")
  tokens = np.random.default_rng(0).integers(3, 96, (2, 16)).astype(np.int32)
  expected = loss_in_torch(theirs, tokens)

  def losses(params):
    logits_BTV, aux = definition.bind(params)(tokens, Context())
    return {"index": aux.losses["index_loss"], "logits": jnp.square(logits_BTV).sum()}

  def gradient_of(name):
    return jax.jit(jax.value_and_grad(lambda params: losses(params)[name]))(params)

  (value, of_index), (_, of_logits) = gradient_of("index"), gradient_of("logits")
  assert float(value) == pytest.approx(expected, rel=1e-4)
  assert expected > 0.01
  names = {"query.w": "wq_b", "key.w": "wk", "weights.w": "weights_proj"}
  names |= {"key_norm.scale": "k_norm", "key_norm.bias": "k_norm"}
  seen = 0
  for name, gradient in of_index.items():
    if ".indexer." not in name:
      assert not np.any(gradient) and np.any(of_logits[name]), name
      continue
    seen += 1
    assert not np.any(of_logits[name]), name
    *_, number, _, _, role, kind = name.split(".")
    module = getattr(theirs.model.layers[int(number)].self_attn.indexer, names[f"{role}.{kind}"])
    wanted = (module.bias if kind == "bias" else module.weight).grad.numpy()
    wanted = wanted.T if kind == "w" else wanted
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(gradient, wanted.reshape(gradient.shape), atol=1e-4 * largest)
    assert largest > 1e-5
  assert seen == 5 * 3
