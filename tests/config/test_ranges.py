# SPDX-License-Identifier: Apache-2.0
"""Laws of ranges: every number has one, and it holds however the number is given."""

import inspect
import math
import typing
from typing import Any

import fiddle as fdl
import numpy as np
import pytest
from fiddle import daglish
from helpers.declared import DECLARED, EXPERIMENTS, every_declaring_class, every_experiment

from paxlike.config import (
  building,
  graph_file,
  graph_types,
  knob_text,
  knob_types,
  ranges,
  type_words,
)
from paxlike.data.dataset import RowDataset
from paxlike.errors import UserError
from paxlike.experiments.gpt import Gpt3_52k

# Texts that may be empty: what a model continues, and patterns, of which "" finds all. Axes of a
# mesh are known by name.
ANY_TEXT = {
  "SAMPLE_PROMPT",
  "CHECKPOINT_INCLUDE_RULES",
  "CHECKPOINT_IGNORE_RULES",
  "ICI_MESH_SHAPE",
  "DCN_MESH_SHAPE",
}


def bare(kind: Any, *plain: type) -> bool:
  """Whether a type has one of these without a range in it."""
  if typing.get_origin(kind) is typing.Annotated:
    return False
  return kind in plain or any(bare(arg, *plain) for arg in typing.get_args(kind))


@every_declaring_class
def test_every_number_has_a_range(owner):
  found = [name for name, knob in DECLARED[owner].items() if bare(knob.type, int, float)]
  assert not found, (
    f"{owner.__name__} declares {found} as a bare int or float: use a type of"
    " paxlike/config/ranges.py, such as ranges.Size or ranges.Factor"
  )


@every_declaring_class
def test_every_path_and_name_is_not_empty(owner):
  found = {name for name, knob in DECLARED[owner].items() if bare(knob.type, str)} - ANY_TEXT
  assert not found, (
    f"{owner.__name__} declares {sorted(found)} as a bare str: use ranges.Path or ranges.Name, or"
    ' add it to ANY_TEXT in this file if "" means something'
  )


FLOATS = [name for name, kind in vars(ranges).items() if typing.get_args(kind)[:1] == (float,)]


@pytest.mark.parametrize("name", FLOATS)
def test_float32_keeps_floats_apart_from_the_bounds_that_they_exclude(name):
  """Programs would compute 1 of 0.99999999999, and 0 of 1e-46."""
  bounds = typing.get_args(getattr(ranges, name))[1]
  for number in (bounds.least, bounds.most):
    held = np.float32(number)
    assert number == 0 or abs(held) >= np.finfo(np.float32).tiny
    assert all((number < one) == (held < one) for one in (0, 0.5, 1))


@pytest.mark.slow
@every_experiment
def test_graphs_fit_their_annotations(cls):
  graph_types.check(cls().trainer())


@pytest.mark.slow
def test_every_number_of_a_graph_has_a_range():
  """Sizes are bound in factories, whose other arguments the parent gives."""
  found = set()
  for cls in EXPERIMENTS.values():
    for node, _ in daglish.iterate(cls().trainer()):
      if isinstance(node, fdl.Buildable):
        function = fdl.get_callable(node)
        hints: Any = graph_types.annotations(function)
        for name, value in node.__arguments__.items():
          if type(value) in (int, float) and bare(hints.get(name, int), int, float):
            found.add(f"{function.__qualname__}({name})")
  assert not found, (
    f"{sorted(found)} have no range: annotate the arguments with types of paxlike/config/ranges.py"
  )


# Knob, its path in the graph, values that are just within and values that are just not.
LIMITS = [
  ("NUM_HEADS", "model.stack.pattern[0].attention.num_heads", [1, 2**24], [0, -1, 2**24 + 1]),
  ("INIT_STD", "model.embedding.init.std", [0.0, 0.5], [-1e-9, math.inf]),
  ("LEARNING_RATE", "optimizer.learning_rate.peak", [0.0, 1.0], [-1e-9, 1e-46, 1e20, math.inf]),
  ("ADAM_BETA2", "optimizer.b2", [0.0, 0.999], [1.0, 0.99999999999, 1.5, -0.1]),
  ("ADAM_EPSILON", "optimizer.eps", [1e-30, 1.0], [0.0, 1e-50]),
  (
    "CLIP_GRADIENT_NORM_TO_VALUE",
    "optimizer.clip_norm",
    [1e-3, None],
    [0.0, 1e-46, -1.0, math.inf],
  ),
  ("STALL_TIMEOUT", "stall_timeout", [0.0, 1.0, None], [0.5, 1e-300, -1.0]),
  ("MAX_STEPS", "num_steps", [0, 2**31 - 1], [-1, 2**31]),
  ("MAX_SKIPPED_STEPS_IN_A_ROW", "max_skipped_in_a_row", [1], [0]),
  ("VOCAB_SIZE", "model.vocab_size", [1], [0, -3]),
  ("PERCORE_BATCH_SIZE", "percore_batch_size", [0.5], [0.0, -1.0, math.inf]),
  ("ICI_MESH_SHAPE", "mesh.ici", [(-1, 1, 1), {"data": 2}], [(0, 1, 1), (-2, 1, 1), {"data": 0}]),
]


@pytest.mark.parametrize(("knob", "path", "good", "bad"), LIMITS, ids=[row[0] for row in LIMITS])
def test_a_range_holds_however_a_value_is_given(knob, path, good, bad):
  for value in good:
    text = knob_text.spell(value)
    assert getattr(Gpt3_52k(**{knob: value}), knob) == value
    assert getattr(Gpt3_52k().set(knob, text, source="command line"), knob) == value
    type("Good", (Gpt3_52k,), {knob: value, "__module__": __name__})
    graph_file.set_path(Gpt3_52k().trainer(), path, text)
  for value in bad:
    text = knob_text.spell(value)
    with pytest.raises(UserError, match=f"^{knob}=.*expected .*"):
      Gpt3_52k(**{knob: value})
    with pytest.raises(UserError, match=rf"^--fdl\.{knob}=.*expected .*"):
      Gpt3_52k().set(knob, text, source="command line")
    with pytest.raises(UserError, match=f"{knob} = .*expected .*"):
      type("Bad", (Gpt3_52k,), {knob: value, "__module__": __name__})
    graph = Gpt3_52k().trainer()
    with pytest.raises(UserError, match=r"^--fdl\..*expected .*"):
      graph_file.set_path(graph, path, text)
    owner, _, name = path.rpartition(".")
    part = eval(f"graph.{owner}" if owner else "graph", {"graph": graph})
    setattr(part, name, value)
    from_file = graph_file.load(graph_file.dump(graph))
    with pytest.raises(UserError) as error:
      building.build(from_file)
    assert str(error.value).startswith(f"{path}=") and "expected " in str(error.value)


@pytest.mark.parametrize("name", [n for n in vars(ranges) if n[0].isupper()])
def test_a_phrase_and_a_condition_say_the_bounds(name):
  kind = getattr(ranges, name)
  marks = typing.get_args(kind)[1:]
  bounds = next((mark for mark in marks if isinstance(mark, ranges.Range)), None)
  if bounds is None:
    return
  plain = typing.get_args(kind)[0]
  for number in (math.nan, math.inf, -math.inf):
    assert number not in bounds
  shown = type_words.name(kind)
  assert plain.__name__ in shown
  for bound in (bounds.least, bounds.most):
    if math.isfinite(bound) and abs(bound) not in (ranges.INT32, ranges.FLOAT32):
      assert f"{bound:.15g}" in shown
      assert f"{bound:.15g}" in bounds.phrase(plain.__name__, bounded=True)


@pytest.mark.parametrize(
  ("kind", "value", "says"),
  [
    (ranges.Depth, 0, "expected an int of at least 1, got 0."),
    (ranges.Depth, 5000, "expected an int from 1 to 1024, got 5000."),
    (ranges.Probability, 2.0, "expected a float from 0 to 0.9999999, got 2.0."),
    (ranges.PositiveFloat, 0.0, "expected a finite float of at least 1e-30, got 0.0."),
    (ranges.AxisSize, 0, "expected an int of at least 1, or -1, got 0."),
    (ranges.Positive | None, -1, "expected an int of at least 1 or None, got -1."),
    (ranges.ComputeDtype, "int4", "expected one of bfloat16, float16, float32, got 'int4'."),
    (ranges.Smoothing, "a", "expected a float from 0 to 0.4999999, got 'a'."),
    (ranges.Path | None, "", "expected a path that is not empty or None, got ''."),
    (ranges.Seconds | None, 0.5, "expected a float of at least 1, or 0, or None, got 0.5."),
    (
      dict[ranges.Name, ranges.Path],
      "{a: ''}",
      "expected a mapping {name: value, ...} whose names are not empty and whose values are each a",
    ),
  ],
)
def test_what_is_expected_is_said_in_words(kind, value, says):
  with pytest.raises(knob_types.RefusedError) as error:
    knob_types.convert(kind, value, text=isinstance(value, str))
  assert str(error.value).startswith(says)


@pytest.mark.parametrize(
  ("edit", "says"),
  [
    (lambda graph: delattr(graph.model, "dim"), "model lacks the required argument dim"),
    (lambda graph: setattr(graph.model, "norm", 3), "model.norm=3: expected a function or a layer"),
    (
      lambda graph: delattr(graph.model.embedding.init, "std"),
      "model.embedding.init lacks the required argument std",
    ),
    (
      lambda graph: setattr(graph, "mesh", None),
      "mesh=None: expected a (subclass of) pax",
    ),
    (lambda graph: setattr(graph, "keep", True), "keep=True: expected an int"),
    (lambda graph: setattr(graph, "weight_dtype", "int8"), "weight_dtype='int8': expected one of"),
    (lambda graph: setattr(graph.model.stack, "pattern", 1), "model.stack.pattern=1: expected a"),
    (lambda graph: setattr(graph.model.stack, "pattern", []), "pattern=[] of a Stack: expected"),
    (
      lambda graph: setattr(graph, "mesh", graph.model),
      "mesh=Config[Decoder]: expected a (sub",
    ),
    (
      lambda graph: setattr(graph, "mesh", fdl.cast(fdl.Partial, graph.mesh)),
      "mesh=Partial[MeshSpec]: expected a (subclass of) paxlike.devices.mesh.MeshSpec",
    ),
    (lambda graph: setattr(graph, "keep", graph.mesh), "keep=Config[MeshSpec]: expected an int"),
    (lambda graph: setattr(graph, "restore", graph.mesh), "restore=Config[MeshSpec]: expected a "),
    (
      lambda graph: setattr(graph.model, "norm", graph.mesh),
      "model.norm=Config[MeshSpec]: expected a function or a layer",
    ),
    (
      lambda graph: setattr(graph, "eval_data", graph.mesh),
      "eval_data=Config[MeshSpec]: expected a dict",
    ),
    (
      lambda graph: setattr(graph, "train_data", {"a": [graph.mesh, len]}),
      "train_data={'a': [Config[MeshSpec], len]}: expected a (subclass of) paxlike.data.d",
    ),
  ],
)
def test_a_graph_is_checked_before_it_is_built(edit, says):
  graph = Gpt3_52k().trainer()
  edit(graph)
  with pytest.raises(UserError) as error:
    building.build(graph)
  assert str(error.value).startswith(says)


def says_any() -> Any: ...


def says_object() -> object: ...


def says_base() -> RowDataset: ...


@pytest.mark.parametrize("function", [says_any, says_object, says_base, lambda: None])
def test_what_a_function_may_make_fits(function):
  graph = Gpt3_52k().trainer()
  graph.train_data = graph.model.norm = fdl.Config(function)
  if function is says_base:
    graph.model.norm = graph.model.stack.pattern[0].norm
  else:
    graph.mesh = fdl.Config(function)
  graph_types.check(graph)
  kind = type("Kind", (RowDataset,), {})
  assert graph_types.misfit(kind, fdl.Config(function)) is None


def test_experiments_of_users_may_declare_plain_numbers():
  class Mine(Gpt3_52k):
    NUM_LAYERS: int = 2
    GROUPS: int = 0
    RATE: float = -1.0

  assert Mine(GROUPS=-5).GROUPS == -5
  building.build(Mine().trainer())


@pytest.mark.parametrize("cls", [Gpt3_52k, EXPERIMENTS["paxlike.experiments.deepseek.DeepSeekV3"]])
def test_help_has_the_range_of_each_knob(cls):
  from paxlike.cli import knob_page

  text = knob_page.help_text(cls)
  assert "1 <= int <= 1024; set in " in text
  assert text.count("\n  --fdl.") == len(cls.knobs())
  assert inspect.cleandoc(text)
