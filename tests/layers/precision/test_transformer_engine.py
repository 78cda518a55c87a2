# SPDX-License-Identifier: Apache-2.0
"""Products by Transformer Engine: in plain JAX, as it has them too, where it is installed."""

import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike import fiddlers, layers, registry
from paxlike.errors import UserError
from paxlike.layers import Fp8, Linear, TransformerEngine
from paxlike.layers.module import Definition
from paxlike.training import preflight


@pytest.fixture
def in_plain_jax(monkeypatch):
  try:
    layers.transformer_engine.load()
  except UserError as error:
    pytest.skip(str(error))
  monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
  # Which a CPU does not tell.
  library = sys.modules["transformer_engine_jax"]
  monkeypatch.setattr(library, "get_device_compute_capability", lambda gpu: 90)


def plain():
  return TransformerEngine(fp8=False)


def value_and_gradients(dot):
  definition = Definition(
    Linear({"heads": 4, "head": 16}, {"model": 32}, role="output", dot=dot, dtype=jnp.bfloat16)
  )
  w, x, factors = (
    jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    for seed, shape in enumerate(((4, 16, 32), (2, 8, 4, 16), (2, 8, 32)))
  )

  def value(w, x):
    y = definition.bind({"w": w}, definition.quantize_operands({"w": w}))(x)
    return (y * factors).astype(jnp.float32).sum(), y

  gradients, y = jax.jit(jax.grad(value, (0, 1), has_aux=True))(w, x)
  return [np.asarray(array, np.float32) for array in (y, *gradients)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Transformer Engine's.
def test_it_multiplies_as_exactly_as_we_do(in_plain_jax):
  exact = value_and_gradients(None)
  for theirs, whole in zip(value_and_gradients(plain), exact, strict=True):
    np.testing.assert_allclose(theirs, whole, rtol=1e-6)
  found = zip(value_and_gradients(TransformerEngine), value_and_gradients(Fp8), exact, strict=True)
  for theirs, ours, whole in found:
    assert 0 < np.linalg.norm(theirs - whole) < 1.2 * np.linalg.norm(ours - whole)


def test_without_it_one_line_says_so(monkeypatch, h200):
  with pytest.raises(UserError, match=r"ENABLE_TE.*cannot be loaded"):
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.dense", None)
    trainer = fdl.build(registry.find("Gpt3_52k")(ENABLE_TE=True).trainer())
    preflight.check_setup(trainer, training=True)


@pytest.mark.parametrize(("kind", "fp8"), [(None, False), ("fp8", True)])
def test_it_takes_the_place_of_what_multiplied(monkeypatch, h200, kind, fp8):
  monkeypatch.setattr(layers.transformer_engine, "load", lambda: None)
  graph = registry.find("Gpt3_52k")(ENABLE_TE=True, QUANTIZATION=kind).trainer()
  fiddlers.transformer_engine(graph)  # Once more is no more.
  nodes = fiddlers.select(graph, layers.Linear, "up", "key")
  assert [node.dot.fp8 for node in nodes] == [fp8, fp8]
  with pytest.raises(UserError, match=r"ENABLE_TE .*requires QUANTIZATION=fp8 or none"):
    registry.find("Gpt3_52k")(ENABLE_TE=True, QUANTIZATION="int8").trainer()
