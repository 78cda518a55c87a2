# SPDX-License-Identifier: Apache-2.0
"""Rotary waves and relative positions are those of transformers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo

from paxlike.compilation.hlo_text import computations
from paxlike.devices import topology
from paxlike.layers import Definition, LongRope, RelativeBias, Rope
from paxlike.layers.attention import rope

YARN = {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
CASES = {
  "default": ({}, None),
  "linear": ({"factor": 4.0}, functools.partial(rope.linear, factor=4.0)),
  "llama3": (
    {
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64,
    },
    functools.partial(rope.llama3, factor=8.0, original_length=64),
  ),
  "yarn": (YARN, functools.partial(rope.yarn, theta=1e4, factor=16.0, original_length=64)),
  "yarn_untruncated": (
    YARN | {"truncate": False},
    functools.partial(rope.yarn, theta=1e4, factor=16.0, original_length=64, truncate=False),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_scaled_frequencies_are_those_of_transformers(name):
  import transformers
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  options, scaling = CASES[name]
  kind = name.split("_")[0]
  config = transformers.LlamaConfig(
    hidden_size=64,
    num_attention_heads=2,
    max_position_embeddings=1024,
    rope_parameters={"rope_type": kind, "rope_theta": 1e4, **options},
  )
  if kind == "default":
    expected = 1e4 ** (-np.arange(0, 32, 2) / 32)
  else:
    expected = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].numpy()
  np.testing.assert_allclose(Rope(32, theta=1e4, scaling=scaling).frequencies, expected, rtol=2e-6)


def test_long_factors_are_those_of_long_documents_alone():
  factors = {"short_factors": (1.0, 2.0), "long_factors": (4.0, 8.0), "original_length": 5}
  turn = LongRope(4, **factors)
  # Documents of 5 and 6 tokens, and padding.
  positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, -1, -1]])
  rates = np.asarray(turn.rates(positions))[0]
  np.testing.assert_allclose(rates[:5], [[1.0, 0.01 / 2]] * 5, rtol=1e-6)
  np.testing.assert_allclose(rates[5:11], [[1 / 4, 0.01 / 8]] * 6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distance_alone(interleaved):
  random = np.random.default_rng(0)
  q, k = random.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
  turn = Rope(16, interleaved=interleaved)

  def product(query_at, key_at):
    turned = [turn(x, jnp.array([[p]])) for x, p in ((q, query_at), (k, key_at))]
    return float((turned[0] * turned[1]).sum())

  assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
  assert product(0, 0) == pytest.approx(float((q * k).sum()), rel=1e-5)
  assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_tpus_rotate_exactly_by_a_matmul():
  """The matmul turns bfloat16 heads; neither they nor their gradients are rounded once more."""
  random = np.random.default_rng(0)
  x, dy = jnp.asarray(random.normal(size=(2, 2, 5, 3, 16)), jnp.bfloat16)
  turn = Rope(16, magnitude=1.5)

  def both():
    y, backward = jax.vjp(lambda x: turn(x, jnp.array([[3, 4, 5, 0, 1]])), x)
    return y, *backward(dy)

  expected = both()
  with topology.target("v5e-4"):
    found = both()
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
  ("options", "head_dim", "dtype", "by_matmul"),
  [
    ({}, 64, "bfloat16", True),
    ({}, 64, "float32", False),  # TPUs would round it.
    ({}, 256, "bfloat16", False),  # Halves of 128 are not padded.
    ({"interleaved": True}, 64, "bfloat16", False),
    ({"share": 0.5}, 64, "bfloat16", False),
  ],
)
def test_tpus_rotate_whole_padded_heads_by_a_matmul(options, head_dim, dtype, by_matmul):
  x = jax.ShapeDtypeStruct((1, 5, 3, head_dim), dtype)
  with topology.target("v5e-4"):
    program = jax.make_jaxpr(lambda x: Rope(head_dim, **options)(x, None))(x)
  assert ("dot_general" in str(program)) == by_matmul


def test_waves_are_not_computed_for_each_head():
  turn, x = Rope(16), jax.ShapeDtypeStruct((2, 64, 8, 16), jnp.bfloat16)
  program = hlo.text(lambda x: turn(x, None), x, options={"xla_cpu_use_fusion_emitters": True})
  with_waves = [
    found for found in computations(program).values() if "sine" in {one.operation for one in found}
  ]
  sizes = [math.prod(shape.dims) for found in with_waves for one in found for shape in one.outputs]
  assert with_waves and max(sizes) == 64 * 16


@pytest.mark.slow
def test_distances_share_biases_as_in_t5():
  import torch
  from transformers.models.t5.modeling_t5 import T5Attention

  distances = np.arange(0, 300)
  buckets = T5Attention._relative_position_bucket(
    torch.tensor(-distances), bidirectional=False, num_buckets=32, max_distance=128
  )
  definition = Definition(RelativeBias(2))
  table = np.arange(64, dtype=np.float32).reshape(2, 32)
  got = definition.bind({"table": jnp.array(table)})(jnp.array(distances))
  np.testing.assert_array_equal(got, table[:, buckets.numpy()])
