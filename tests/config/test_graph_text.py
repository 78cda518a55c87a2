# SPDX-License-Identifier: Apache-2.0
"""Laws of graphs as text."""

import copy
import json
import re
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
import pytest

from paxlike.config import graph_file, graph_text
from paxlike.errors import UserError


def make(a: Any = 1, b: Any = 2.5, *, c: Any = None):
  """Something with defaults."""


def other(a: Any = 1):
  """Something else."""


def graphs() -> dict[str, fdl.Buildable]:
  """Returns graphs that all differ."""
  shared = fdl.Partial(make, a=7)
  chain = fdl.Config(optax.chain, 1, 2)
  return {
    "default": fdl.Config(make),
    "leaf": fdl.Config(make, a=2),
    "function": fdl.Config(make, a=jax.nn.gelu),
    "dtype": fdl.Config(make, a=jnp.bfloat16),
    "child": fdl.Config(make, a=fdl.Partial(make, b=0.0)),
    "grandchild": fdl.Config(make, a=fdl.Partial(make, b=fdl.Config(other, a="x"))),
    "kind": fdl.Config(make, a=fdl.Config(make, b=0.0)),
    "target": fdl.Config(make, a=fdl.Partial(other)),
    "list": fdl.Config(make, a=[1, 2]),
    "longer": fdl.Config(make, a=[1, 2, 3]),
    "tuple": fdl.Config(make, a=(1, 2)),
    "dict": fdl.Config(make, a={"x": 1, "y": [fdl.Config(make)]}),
    "dict without": fdl.Config(make, a={"x": 1}),
    "shared": fdl.Config(make, a=shared, c=[shared]),
    "apart": fdl.Config(make, a=shared, c=[copy.deepcopy(shared)]),
    "shared list": fdl.Config(make, a=[shared], c=fdl.Config(make, a=shared)),
    "positional": chain,
    "fewer": fdl.Config(optax.chain, 1),
    "root": fdl.Partial(make, a=2),
  }


NAMES = list(graphs())


def assign(a: Any, text: str) -> Any:
  """Carries out a difference whose values are Python."""
  space = {
    "graph": copy.deepcopy(a),
    "copy": copy,
    "jax": jax,
    "Config": fdl.Config,
    "Partial": fdl.Partial,
    "make": make,
    "other": other,
    "optax": optax,
  }
  exec(text, space)
  return space["graph"]


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_a_difference_turns_one_graph_into_the_other(first, second):
  a, b = graphs()[first], graphs()[second]
  text = graph_text.difference(a, b)
  assert (text == "") == (a == b) == (first == second)
  assert all(re.fullmatch(r"(del )?graph.*  # was .+", line) for line in text.splitlines())
  if (first, second) not in {("positional", "fewer"), ("fewer", "positional")}:
    assert assign(a, text) == b


def test_a_difference_says_what_was():
  a = fdl.Config(dict, optimizer=fdl.Config(optax.adamw, learning_rate=1e-3, b2=0.95))
  b = copy.deepcopy(a)
  b.optimizer.b2 = 0.99
  b.optimizer.eps = 1e-6
  del b.optimizer.learning_rate
  assert graph_text.difference(a, b).splitlines() == [
    "graph.optimizer.b2 = 0.99  # was 0.95",
    "graph.optimizer.eps = 1e-06  # was 1e-08",
    "del graph.optimizer.learning_rate  # was 0.001",
  ]


def test_an_explicit_default_is_no_difference():
  assert graph_text.difference(fdl.Config(make, a=1), fdl.Config(make)) == ""
  assert graph_text.difference(fdl.Config(make), fdl.Config(make, a=1)) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_description_has_a_line_for_everything(name):
  graph = graphs()[name]
  lines = graph_text.describe(graph).splitlines()
  assert all(re.fullmatch(r"\S.* = .+", line) for line in lines)
  paths = [line.split(" = ")[0] for line in lines]
  assert len(set(paths)) == len(paths)
  assert paths[0] == "(graph)"
  unshared = [line for line in lines if "# default" not in line and "the same as" not in line]
  set_lines = [line for line in unshared[1:] if line]
  assert all("# test_graph_text.py:" in line for line in set_lines)


def test_a_description_names_the_line_that_set_a_value():
  graph = fdl.Config(make, a=fdl.Partial(other))
  graph.a.a = 3
  text = graph_text.describe(graph)
  line = test_a_description_names_the_line_that_set_a_value.__code__.co_firstlineno + 2
  assert re.search(rf"^a\.a = 3 +# test_graph_text\.py:{line}$", text, re.MULTILINE)
  assert re.search(r"^b = 2\.5 +# default$", text, re.MULTILINE)
  assert re.search(r"^a = Partial\(other\) ", text, re.MULTILINE)


def test_a_description_changes_with_every_value():
  texts = {
    re.sub(r" +#.*", "", graph_text.describe(graph), flags=re.MULTILINE)
    for graph in graphs().values()
  }
  assert len(texts) == len(NAMES)


def test_values_are_the_same_in_all_processes_and_name_no_files():
  class Plain:
    pass

  letters = frozenset("abcdefgh")
  graph = fdl.Config(make, a=fdl.Config(other, a="/data/x"), b=Plain(), c=letters)
  values = graph_text.values(graph)
  assert list(values) == ["(graph)", "a", "b", "c"]
  assert "0x" not in values["b"]
  assert values["c"] == "frozenset({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})"


def test_the_order_is_that_of_the_signature():
  graph = fdl.Config(make, c=1, a=2)
  paths = [line.split(" = ")[0] for line in graph_text.describe(graph).splitlines()]
  assert paths == ["(graph)", "a", "b", "c"]


def test_the_front_reexports():
  assert graph_file.describe is graph_text.describe


def saved(graph):
  return json.dumps({"paxlike_graph": 1, "graph": graph})


def test_what_a_file_names_does_not_steer_a_terminal(tmp_path):
  name = "\x1b]0;x\x07\n"
  path = tmp_path / "config.json"
  path.write_text(saved({"config": "builtins:dict", "arguments": {name: {"list": [1, {"x": 1}]}}}))
  with pytest.raises(UserError) as error:
    graph_file.read_data(path)
  assert str(error.value).isprintable()
  part = {"config": "builtins:dict", "arguments": {name: 2}}
  path.write_text(saved({"config": "builtins:dict", "arguments": {name: 1, "y": part}}))
  data, graph = graph_file.read_data(path), graph_file.load(path.read_text())
  for text in (
    graph_file.describe(graph),
    graph_file.difference(data, fdl.Config(dict)),
    graph_file.difference(fdl.Config(dict), data),
  ):
    assert "'\\x1b]0;x\\x07\\n'" in text
    assert all(line.isprintable() for line in text.splitlines())
