# SPDX-License-Identifier: Apache-2.0
"""Laws of saved graphs: they reload equal."""

import copy
import enum
import json
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.graphs import transformer

from paxlike import layers
from paxlike.config import graph_file
from paxlike.errors import UserError
from paxlike.layers import stack
from paxlike.layers.attention import kernels
from paxlike.training.trainer import Trainer


class Mine:
  """A class of the user."""

  class Inner:
    """A class within."""

  def __init__(self, size: int = 1, **more: Any):
    self.size, self.more = size, more

  @classmethod
  def of(cls, size: int) -> "Mine":
    """Returns one."""
    return cls(size)


class Colour(enum.Enum):
  RED = 1


VALUES = {
  "none": None,
  "scalars": [True, False, 0, -3, 0.0, 1e-300, 6e-4, "", "a\nb", "none", '"'],
  "infinite": [float("inf"), -float("inf")],
  "tuples": ((), (1,), (1, (2, "x")), [(1, 2)]),
  "dicts": {"a": {"b": {1: 2}}, "type": "x", "symbol": "os:system", "config": 1},
  "odd keys": {(1, 2): 3},
  "sets": [{1, 2}, frozenset(["a"])],
  "activations": [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softmax, jnp.tanh],
  "initializers": [jax.nn.initializers.normal, jax.nn.initializers.zeros],
  "optax": [optax.adamw, optax.warmup_cosine_decay_schedule, optax.MultiSteps],
  "scalar types": [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.float32, np.int8, jnp.bool_],
  "dtypes": [np.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("int4"), np.dtype("bool")],
  "paxlike": [
    layers.Linear,
    stack.Remat.SAVE_NOTHING,
    layers.gaussian,
    kernels.xla,
  ],
  "builtins": [dict, list, float],
  "buildables": [fdl.Partial(dict, a=1), fdl.ArgFactory(list), fdl.Config(optax.chain, 1, 2)],
  "user": [
    Mine,
    Mine.Inner,
    Mine.of,
    Colour.RED,
    fdl.Config(Mine, 2, extra=3),
    fdl.Partial(Mine.of),
  ],
}


@pytest.mark.parametrize("name", VALUES)
def test_every_value_reloads_equal(name):
  graph = fdl.Config(dict, value=VALUES[name])
  text = graph_file.dump(graph)
  loaded = graph_file.load(text, allow_modules=[__name__])
  assert loaded == graph
  assert repr(loaded) == repr(graph)
  assert graph_file.dump(loaded) == text
  json.loads(text, parse_constant=pytest.fail)


def test_a_transformer_reloads_equal_and_without_permission():
  graph = transformer()
  loaded = graph_file.load(graph_file.dump(graph))
  assert loaded == graph
  loaded.optimizer[1].b2 = 0.99
  assert loaded != graph


@pytest.mark.parametrize(
  "shared",
  [fdl.Partial(dict, a=1), [1], {"a": [1]}, (fdl.Config(dict),), ([1], 2), {1, 2}],
  ids=lambda value: type(value).__name__,
)
def test_sharing_is_kept(shared):
  together = fdl.Config(dict, a=shared, b=[shared])
  apart = fdl.Config(dict, a=shared, b=[copy.deepcopy(shared)])
  assert together != apart
  for graph in (together, apart):
    assert graph_file.load(graph_file.dump(graph)) == graph
  loaded = graph_file.load(graph_file.dump(together))
  assert loaded.a is loaded.b[0]


def test_only_public_places_of_libraries_are_saved():
  assert "_src" not in graph_file.dump(fdl.Config(dict, values=list(VALUES.values())))


@pytest.mark.parametrize(
  "value",
  [
    lambda: 0,
    object(),
    np.zeros(2),
    1j,
    np.float64(1),
    (object(),),
    test_sharing_is_kept.__class__,
  ],
  ids=["lambda", "object", "array", "complex", "numpy_scalar", "tuple", "type"],
)
def test_what_cannot_be_found_again_is_refused_by_path(value):
  def local():
    pass

  graph = fdl.Config(dict, part=[fdl.Config(dict, value=value)])
  with pytest.raises(UserError, match=r"graph\.part\[0\]\.value"):
    graph_file.dump(graph)
  with pytest.raises(UserError, match="local"):
    graph_file.dump(fdl.Config(local))


def test_a_graph_from_a_file_differs_as_the_graph_does(tmp_path):
  path = tmp_path / "config.json"
  before, after = transformer(), transformer()
  after.optimizer[1].b2 = 0.99
  after.optimizer[1].eps = 1e-6
  after.stack.remat = stack.Remat.SAVE_EVERYTHING
  after.optimizer[0] = after.optimizer[1]
  for one, other in ((before, after), (after, before), (before, before)):
    path.write_text(graph_file.dump(one))
    found = graph_file.difference(graph_file.read_data(path), other)
    assert found == graph_file.difference(one, other)
    assert (found == "") == (one is other)


def test_files_are_read_or_refused_by_name(tmp_path):
  path = tmp_path / "config.json"
  graph = fdl.Config(Trainer, model=transformer())
  path.write_text(graph_file.dump(graph))
  assert graph_file.read(str(path)) == graph
  with pytest.raises(UserError, match=r"nowhere\.json cannot be read: No such file"):
    graph_file.read(tmp_path / "nowhere.json")
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(UserError, match=r"config\.json cannot be read"):
    graph_file.read(path)


def test_a_loaded_graph_says_where_it_is_from():
  loaded = graph_file.load(graph_file.dump(fdl.Config(Mine, size=3)), allow_modules=[__name__])
  assert "size = 3" in graph_file.describe(loaded)
  assert "# config file" in graph_file.describe(loaded)
