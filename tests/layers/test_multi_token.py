# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction against its arithmetic written out in NumPy."""

import dataclasses
import functools
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import pytest
from helpers.shrunk import ONE_OF_EACH
from helpers.steps import assert_same, one_device
from helpers.tiny_model import SEQ_LEN, VOCAB, batch, tiny

from paxlike import fiddlers, registry
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers import flops
from paxlike.layers.multi_token import targets_after
from paxlike.training import preflight, train_state
from paxlike.training.objectives import Dpo, NextToken

KINDS = ("sequential", "parallel")


@functools.cache
def params_of(kind: Any) -> dict[str, jax.Array]:
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(tiny(mtp=kind), mesh, seed=0)
  # Biases and norms start at zero: make them count.
  keys = jax.random.split(jax.random.key(1), len(params))
  named = zip(keys, params.items(), strict=True)
  return {name: w + 0.1 * jax.random.normal(key, w.shape) for key, (name, w) in named}


def losses(kind: Any, data: dict[str, Any]) -> tuple[float, float, np.ndarray]:
  """Returns (the loss of next tokens, the weighted one of later ones, the pair of its metric)."""
  definition = tiny(mtp=kind)

  def of(params: Any, data: Any) -> Any:
    return NextToken().total(definition.bind(params), None, data, None)

  loss, aux = jax.jit(of)(params_of(kind), data)
  return float(loss), float(aux.summed["mtp_loss"]), np.asarray(aux.metrics["mtp_loss"])


class Reference:
  """The model in float64, for sequences of one document each."""

  def __init__(self, kind: str):
    self.p = {name: np.asarray(w, np.float64) for name, w in params_of(kind).items()}
    self.kind = kind

  def norm(self, name, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * (1 + self.p[f"{name}.scale"]) + self.p[f"{name}.bias"]

  def linear(self, name, x, spec):
    return np.einsum(spec, x, self.p[f"{name}.w"]) + self.p[f"{name}.b"]

  def block(self, at, x):
    y = self.norm(f"{at}.attention_norm", x)
    of = f"{at}.attention"
    q, k, v = (self.linear(f"{of}.{n}", y, "btd,dnh->btnh") for n in ("query", "key", "value"))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.exp(np.where(np.tri(x.shape[1]) > 0, scores, -np.inf))
    y = np.einsum("bnts,bsnh->btnh", scores / scores.sum(-1, keepdims=True), v)
    x = x + self.linear(f"{of}.output", y, "btnh,nhd->btd")
    y = self.linear(f"{at}.mlp.up", self.norm(f"{at}.mlp_norm", x), "btd,df->btf")
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return x + self.linear(f"{at}.mlp.down", y, "btf,fd->btd")

  def losses(self, tokens, targets):
    """Returns what is lost of targets[:, t] from the states at t - depth, for depths 0, 1 and 2."""
    embedded = self.p["embedding.table"][tokens] + self.p["positions.table"][: tokens.shape[1]]
    x = self.block("stack.layers.1", self.block("stack.layers.0", embedded))
    states = [self.norm("norm", x)]
    for depth in (1, 2):
      at = f"mtp.layers.{depth - 1}"
      if self.kind == "parallel":
        states.append(self.norm("norm", self.block(at, x)))
        continue
      # No padding: what has no later token is left out.
      given = self.norm(f"{at}.embedding_norm", embedded[:, depth:])
      before = self.norm(f"{at}.hidden_norm", states[-1][:, : given.shape[1]])
      joined = np.concatenate([given, before], -1)
      y = self.block(f"{at}.block", self.linear(f"{at}.projection", joined, "btc,cd->btd"))
      states.append(self.norm(f"{at}.norm", y))
    found = []
    for depth, state in enumerate(states):
      logits = state[:, : tokens.shape[1] - depth] @ self.p["embedding.table"].T
      total = np.log(np.exp(logits).sum(-1))
      found.append(total - np.take_along_axis(logits, targets[:, depth:, None], -1)[..., 0])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_numpy(kind):
  data = batch(3)
  next_token, *later = Reference(kind).losses(data["inputs"], data["targets"])
  weights = [data["weights"][:, depth:] for depth in range(3)]
  expected = [(one * w).sum() for one, w in zip(later, weights[1:], strict=True)]
  loss, added, (total, weight) = losses(kind, data)
  np.testing.assert_allclose(loss, (next_token * weights[0]).sum(), rtol=1e-5)
  np.testing.assert_allclose(added, 0.3 * sum(expected) / 2, rtol=1e-5)
  np.testing.assert_allclose([total, weight], [sum(expected), weights[1].sum() + weights[2].sum()])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_packed_rows_are_predicted_as_alone(kind):
  lengths, data = (9, 1, 4), batch(1)
  names = ("inputs", "targets", "weights")
  data["weights"] = np.ones((1, SEQ_LEN), np.float32)
  alone = {name: np.zeros((len(lengths), SEQ_LEN), data[name].dtype) for name in names}
  packed = {name: np.zeros((1, SEQ_LEN), data[name].dtype) for name in names}
  packed |= {name: np.zeros((1, SEQ_LEN), np.int32) for name in ("segments", "positions")}
  start = 0
  for number, length in enumerate(lengths):
    for name in names:
      alone[name][number, :length] = data[name][0, start : start + length]
      packed[name][0, start : start + length] = data[name][0, start : start + length]
    packed["segments"][0, start : start + length] = number + 1
    packed["positions"][0, start : start + length] = np.arange(length)
    start += length
  for got, expected in zip(losses(kind, packed), losses(kind, alone), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5)
  assert losses(kind, packed)[2][1] == 8 + 0 + 3 + 7 + 0 + 2


def test_targets_are_those_of_the_same_document_and_sequence():
  data = batch(2, packed=True)
  for depth in (1, 3, SEQ_LEN, SEQ_LEN + 5):
    targets, weights = targets_after(data, depth)
    for b, t in np.ndindex(2, SEQ_LEN):
      is_there = t + depth < SEQ_LEN
      is_there = is_there and data["segments"][b, t] == data["segments"][b, t + depth]
      expected = data["weights"][b, t + depth] if is_there else 0
      assert weights[b, t] == expected
      assert not expected or targets[b, t] == data["targets"][b, t + depth]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_descends_the_sum_of_both_losses(kind):
  """With remat, in as many parts as there are sequences, and as differentiated in one piece."""
  data = batch(8, packed=True)
  whole = one_device(tiny(mtp=kind), data)
  assert_same(one_device(tiny(mtp=kind, scan=True), data, num_microbatches=8), whole)
  loss, added, (_, weight) = losses(kind, data)
  assert added > 0.1 * loss
  # The metric is a mean over the tokens that are predicted.
  assert whole[1]["mtp_loss"][1] == weight < 2 * data["weights"].sum()
  assert whole[1]["loss"][1] == data["weights"].sum()
  # Without the further loss, the model's own weights go elsewhere.
  plain = one_device(tiny(), data)
  name = ("stack.{}.attention.query.w", 0)
  assert np.abs(whole[0][name] - plain[0][name]).max() > 1e-4
  # And the layers' weights move.
  name = next(n for n in whole[0] if n[0].startswith("mtp.layers.1") and n[0].endswith("up.w"))
  first = train_state.init_params(
    tiny(mtp=kind), MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), seed=1, names=[name[0]]
  )
  assert np.abs(whole[0][name] - first[name[0]]).max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_counted(kind):
  plain, more = (flops.per_token(tiny(mtp=mtp), SEQ_LEN) for mtp in (None, kind))
  block = 2 * (4 * 32 * 32 + 2 * 32 * 64)
  scores = 2 * 2 * SEQ_LEN * 32
  projection = 2 * 2 * 32 * 32 if kind == "sequential" else 0
  assert more.full - plain.full == 3 * 2 * (block + scores + projection + 2 * 32 * VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind"), [(name, KINDS[place % 2]) for place, name in enumerate(ONE_OF_EACH)]
)
def test_blocks_are_like_the_last_layer_of_every_family(name, kind):
  knobs: dict[str, Any] = {"CHECKPOINT_POLICY": "SAVE_NOTHING", "QUANTIZATION": "int8"}
  knobs |= {"PARAMETRIZATION": "mup", "BASE_MODEL_DIMS": 64, "SHARD_SEQUENCE_OVER_TENSOR": True}
  graph = registry.find(name)(MTP_NUM_LAYERS=2, MTP_KIND=kind, **knobs).trainer()
  mtp, stack = graph.model.mtp, graph.model.stack
  assert mtp.block == stack.pattern[-1] and mtp.block is not stack.pattern[-1]
  assert mtp.remat == stack.remat
  fiddlers.shrink(graph)
  definition = fdl.build(graph).definition
  plain = registry.find(name)(**knobs).trainer()
  fiddlers.shrink(plain)
  names = {name for name in definition.weights if name.startswith("mtp.layers.")}
  assert definition.weights.keys() - names == fdl.build(plain).definition.weights.keys()
  assert len({name.split(".")[2] for name in names}) == 2


def test_an_objective_without_a_loss_for_the_layers_is_refused():
  trainer: Any = fdl.build(registry.find("Gpt3_52k")(MTP_NUM_LAYERS=1).trainer())
  with pytest.raises(UserError, match=r"MTP_NUM_LAYERS .* NextToken, not with Dpo: set it to 0"):
    preflight.check_setup(dataclasses.replace(trainer, objective=Dpo()), training=True)
