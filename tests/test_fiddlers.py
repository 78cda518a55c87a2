# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import pytest

from paxlike import fiddlers, layers, registry
from paxlike.errors import UserError


@pytest.fixture
def graph():
  return registry.find("Gpt3_52k")().trainer()


def test_select_finds_by_type_and_role(graph):
  roles = [linear.role for linear in fiddlers.select(graph, layers.Linear)]
  assert sorted(roles) == ["down", "key", "output", "query", "up", "value"]
  chosen = fiddlers.select(graph, layers.Linear, "up", "query")
  assert {linear.role for linear in chosen} == {"up", "query"}


def test_precision_reaches_every_layer_that_computes(graph):
  fiddlers.precision(graph, "float16")
  for kind in (layers.Linear, layers.Embedding, layers.PositionEmbedding, layers.LayerNorm):
    nodes = list(fiddlers.select(graph, kind))
    assert nodes
    assert all(node.dtype == jnp.float16 for node in nodes)


def test_stack_and_remat_change_the_stack(graph):
  fiddlers.stack(graph, scan=True)
  fiddlers.remat(graph, "SAVE_DOT_ONLY")
  assert graph.model.stack.scan is True
  assert graph.model.stack.remat is layers.Remat.SAVE_DOT_ONLY
  with pytest.raises(UserError, match="Did you mean SAVE_NOTHING"):
    fiddlers.remat(graph, "SAVE_NOTHIN")
