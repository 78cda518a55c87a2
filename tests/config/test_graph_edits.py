# SPDX-License-Identifier: Apache-2.0
"""Laws of edits from the command line."""

import copy
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlike.config import graph_edits, graph_file, graph_text
from paxlike.errors import UserError


class Policy(enum.Enum):
  NOTHING = 1
  EVERYTHING = 2


class Thing:
  """What graphs here are made of."""

  def __init__(
    self,
    *,
    size: int = 3,
    rate: float = 0.5,
    flag: bool = False,
    name: str = "x",
    path: str | None = "p",
    kind: Literal["a", "b"] = "a",
    policy: Policy = Policy.NOTHING,
    shape: Sequence[int] | Mapping[str, int] = (8, 1),
    dtype: Any = jnp.float32,
    free: Any = 0.9,
    schedule: float | Callable[[int], float] = 1.0,
    function: Callable[..., Any] = jax.nn.silu,
    child: Any = None,
    children: Any = (),
  ):
    self.values = locals()


def make() -> fdl.Config[Thing]:
  return fdl.Config(
    Thing,
    child=fdl.Partial(Thing, size=4, free=1),
    children=[fdl.Partial(Thing), {"the key": fdl.Config(Thing)}, (fdl.Config(Thing), 7)],
    dtype=jnp.bfloat16,
  )


def at(graph: Any, path: str) -> Any:
  return eval(f"graph.{path}", {"graph": graph})


@pytest.mark.parametrize(
  ("path", "text", "value"),
  [
    ("size", "4", 4),
    ("size", "0", 0),
    ("rate", "6e-4", 6e-4),
    ("rate", "2", 2.0),
    ("flag", "true", True),
    ("name", "bare words", "bare words"),
    ("name", "'quoted'", "quoted"),
    ("name", "4", "4"),
    ("path", "none", None),
    ("path", "/a=b", "/a=b"),
    ("kind", "b", "b"),
    ("policy", "everything", Policy.EVERYTHING),
    ("shape", "[4,2]", (4, 2)),
    ("shape", "{data: 2}", {"data": 2}),
    ("dtype", "float32", jnp.float32),
    ("dtype", "float8_e4m3fn", jnp.float8_e4m3fn),
    ("free", "0.99", 0.99),
    ("free", "1", 1.0),
    ("schedule", "0.25", 0.25),
    ("child", "none", None),
    ("child.size", "5", 5),
    ("child.free", "3", 3),
    ("children[0].size", "5", 5),
    ("children[1]['the key'].size", "5", 5),
    ('children[1]["the key"].size', "5", 5),
    ("children[2][0].size", "5", 5),
    ("children[2][1]", "5", 5),
    ("children[-1][0].size", "5", 5),
    ("children", "none", None),
  ],
)
def test_a_path_sets_one_value_and_no_other(path, text, value):
  graph = make()
  before = copy.copy(graph)
  assert graph_edits.set_path(graph, path, text) is None
  found = at(graph, path)
  assert found == value
  assert type(found) is type(value)
  changed = graph_text.difference(make(), graph).splitlines()
  assert len(changed) == 1
  assert "# command line" in graph_text.describe(graph)
  assert before.__arguments__.keys() <= graph.__arguments__.keys()


@pytest.mark.parametrize(
  ("path", "text", "message"),
  [
    ("sizes", "4", "the graph has no sizes. Did you mean size?"),
    ("child.siz", "4", "child has no siz. Did you mean size?"),
    ("children[0].siz", "4", "children[0] has no siz. Did you mean size?"),
    ("chidren[0].size", "4", "the graph has no chidren. Did you mean children?"),
    ("children[3].size", "4", "children has no 3."),
    ("children.size", "4", "children has no size."),
    ("children[1]['the kex'].size", "4", "children[1] has no the kex. Did you mean the key?"),
    ("size.bits", "4", "size is 3, which has no elements"),
    ("path.x", "4", "path is 'p', which has no elements"),
    ("function.x", "4", "has no elements"),
    ("size", "four", "expected int, got 'four'."),
    ("size", "4.5", "expected int"),
    ("size", "none", "expected int"),
    ("rate", "fast", "expected float"),
    ("flag", "2", "expected bool"),
    ("kind", "c", "expected one of a, b"),
    ("policy", "NOTHIN", "Did you mean NOTHING?"),
    ("shape", "wide", "expected"),
    ("dtype", "bflot16", "Did you mean bfloat16?"),
    ("free", "x", "expected float"),
    ("free", "true", "expected float"),
    ("child.free", "1.5", "expected int"),
    ("schedule", "x", "expected float"),
    ("function", "relu", "jax.nn.silu, which cannot be set from text"),
    ("child", "3", "a node of the graph (Thing)"),
    ("children", "[1]", "a node of the graph"),
    ("children[0]", "Thing", "a node of the graph"),
    ("children[2]", "1,2", "a node of the graph"),
    ("", "4", "is not a path"),
    ("child..size", "4", "is not a path"),
    ("child[", "4", "is not a path"),
    ("children[x]", "4", "children has no x"),
  ],
)
def test_a_refused_edit_names_itself_and_changes_nothing(path, text, message):
  graph = make()
  with pytest.raises(UserError) as error:
    graph_edits.set_path(graph, path, text)
  assert message in str(error.value)
  assert str(error.value).startswith(f"--fdl.{path}={text}: ")
  assert "\n" not in str(error.value)
  assert graph == make()


@pytest.mark.parametrize(
  ("before", "text", "after"),
  [
    (np.dtype("float32"), "bfloat16", jnp.dtype("bfloat16")),
    (np.float32, "float16", np.float16),
    ("float32", "bf16", "bfloat16"),
    (jnp.bfloat16, "'float32'", jnp.float32),
  ],
)
def test_a_dtype_stays_the_sort_of_dtype_it_is(before, text, after):
  graph = fdl.Config(Thing, free=before)
  graph_edits.set_path(graph, "free", text)
  assert graph.free == after
  assert type(graph.free) is type(after)


def test_functions_of_optax_take_numbers_but_not_words():
  graph = fdl.Config(dict, optimizer=fdl.Config(optax.adamw, learning_rate=1e-3))
  graph_edits.set_path(graph, "optimizer.b2", "0.99")
  graph_edits.set_path(graph, "optimizer.weight_decay", "0")
  assert (graph.optimizer.b2, graph.optimizer.weight_decay) == (0.99, 0)
  with pytest.raises(UserError, match=r"optimizer has no b3\. Did you mean b2\?"):
    graph_edits.set_path(graph, "optimizer.b3", "0.9")
  with pytest.raises(UserError, match="expected"):
    graph_edits.set_path(graph, "optimizer.b2", "high")


def test_positional_arguments_go_by_index():
  graph = fdl.Config(optax.chain, fdl.Config(optax.clip, 1.0), 3)
  graph_edits.set_path(graph, "[0].max_delta", "2")
  graph_edits.set_path(graph, "[1]", "4")
  assert graph == fdl.Config(optax.chain, fdl.Config(optax.clip, 2.0), 4)


def test_brackets_nested_deeply_are_refused():
  graph = fdl.Config(dict, a=1)
  for text in ("[" * 800 + "]" * 800, "{a:" * 500 + "1" + "}" * 500, "[" * 3000):
    with pytest.raises(UserError, match=r"expected at most 50 nested"):
      graph_edits.set_path(graph, "b", text)


def test_open_ended_functions_take_any_name():
  graph = fdl.Config(dict, a=1)
  graph_edits.set_path(graph, "b", "[1, x]")
  assert graph == fdl.Config(dict, a=1, b=[1, "x"])


@pytest.mark.parametrize("path", ["size", "rate", "flag", "name", "kind", "child.size", "free"])
def test_a_printed_literal_sets_the_same_graph(path):
  wanted = make()
  edits = {"size": 9, "rate": 0.1, "flag": True, "name": "a b", "kind": "b", "free": 0.2}
  owner, _, name = path.rpartition(".")
  setattr(wanted.child if owner else wanted, name, edits[name])
  (line,) = graph_text.difference(make(), wanted).splitlines()
  assignment = line.removeprefix("graph.").partition("  # was")[0]
  found = make()
  graph_edits.set_path(found, *assignment.split(" = ", maxsplit=1))
  assert found == wanted


def edit_in_place(graph: Any, size: int, *, name: Any = "x"):
  """A fiddler that returns nothing."""
  graph.size, graph.name = size, name


def replace(graph: Any) -> fdl.Buildable:
  """A fiddler that returns another graph."""
  del graph
  return fdl.Config(Thing, size=99)


FIDDLERS = {"edit_in_place": edit_in_place, "replace": replace, "wrong": lambda graph: 3}


@pytest.mark.parametrize(
  ("text", "size", "name"),
  [
    ("edit_in_place(2)", 2, "x"),
    ("edit_in_place(-2, name='y z')", -2, "y z"),
    ("edit_in_place(size=2, name=bare)", 2, "bare"),
    ("edit_in_place(2, name=[1, 'a'])", 2, [1, "a"]),
    ("edit_in_place(2, name=true)", 2, True),
    ("edit_in_place(2, name=none)", 2, None),
    ("replace", 99, "x"),
    ("replace()", 99, "x"),
  ],
)
def test_a_fiddler_is_applied_with_its_arguments(text, size, name):
  graph = fdl.Config(Thing, name="x")
  result: Any = graph_edits.call_fiddler(graph, text, FIDDLERS)
  assert (result.size, result.name) == (size, name)
  assert (result is graph) == text.startswith("edit")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("edit_in_plaice(1)", "no fiddler edit_in_plaice. Did you mean edit_in_place?"),
    ("zzz", "Available: edit_in_place, replace, wrong."),
    ("edit_in_place", "its signature is edit_in_place(size: int, *, name: Any = 'x')"),
    ("edit_in_place(1, 2)", "its signature is edit_in_place("),
    ("edit_in_place(x)", "size: expected int, got 'x'; its signature is edit_in_place("),
    ("edit_in_place(1, nam=2)", "unexpected keyword argument 'nam'"),
    ("edit_in_place(open('/etc/passwd'))", "is not a literal"),
    ("edit_in_place(1 + x)", "is not a literal"),
    ("edit_in_place(*[1])", "is not a literal"),
    ("edit_in_place(**{'size': 1})", "expected name or name(arguments)"),
    ("edit_in_place(1)(2)", "expected name or name(arguments)"),
    ("edit_in_place(", "expected name or name(arguments)"),
    ("lambda graph: 0", "expected name or name(arguments)"),
    ("", "expected name or name(arguments)"),
    ("nowhere.fiddler", "no module nowhere."),
    ("json.nowhere.fiddler", "no module json.nowhere."),
    ("textwrap.dednt", "textwrap has no dednt. Did you mean dedent?"),
    ("wrong", "returned a int, neither a graph nor None"),
  ],
)
def test_a_wrong_fiddler_is_refused_in_one_line(text, message):
  with pytest.raises(UserError) as error:
    graph_edits.call_fiddler(fdl.Config(Thing), text, FIDDLERS)
  assert message in str(error.value)
  assert str(error.value).startswith(f"--fiddler={text}: ")
  assert "\n" not in str(error.value)


def test_fiddlers_of_the_working_directory_are_found(tmp_path, monkeypatch):
  (tmp_path / "my_own_fiddlers.py").write_text("def grow(graph, by=1):\n  graph.size += by\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
  graph = fdl.Config(Thing, size=3)
  graph_edits.call_fiddler(graph, "my_own_fiddlers.grow(by=4)", {})
  assert graph.size == 7


def test_an_import_error_within_a_fiddler_module_is_not_hidden(tmp_path, monkeypatch):
  (tmp_path / "broken_fiddlers.py").write_text("import nowhere_at_all\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
    graph_edits.call_fiddler(fdl.Config(Thing), "broken_fiddlers.grow", {})


def test_the_front_reexports():
  assert graph_file.set_path is graph_edits.set_path
  assert graph_file.call_fiddler is graph_edits.call_fiddler
