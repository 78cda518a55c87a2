# SPDX-License-Identifier: Apache-2.0
"""Laws of classes with knobs: declarations, bases, defaults, and who set a knob."""

import subprocess
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sample_knobs import Base, Recipe

from paxlike.config import knobs
from paxlike.config.knobs import UNSET
from paxlike.errors import UserError


def test_an_unknown_knob_names_the_nearest():
  with pytest.raises(UserError, match=r"no knob NUM_LAYER in Recipe\. Did you mean NUM_LAYERS\?"):
    Recipe().set("NUM_LAYER", "2", source="command line")
  with pytest.raises(UserError, match="Did you mean NUM_LAYERS"):
    Recipe(num_layers=2)
  with pytest.raises(UserError, match="NUM_LAYER"):
    Recipe().NUM_LAYER = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ({"NUM_LAYER": 3}, "class Bad assigns NUM_LAYER.*Did you mean NUM_LAYERS"),
    ({"COLOUR": 3}, "class Bad assigns COLOUR.*Annotate it"),
    ({"NUM_LAYERS": "4"}, "class Bad: NUM_LAYERS = '4': expected int"),
    ({"NUM_LAYERS": None}, "expected int"),
    ({"NUM_LAYERS": property(lambda self: 4)}, "expected int"),
    ({"NUM_LAYERS": lambda self: 4}, "expected int"),
    ({"__annotations__": {"NEW": object}, "NEW": 1}, "NEW: object.* a knob is an int"),
    ({"__annotations__": {"NEW": "Nowhere"}, "NEW": 1}, "Nowhere"),
    ({"__annotations__": {"NEW": int}, "NEW": "x"}, "expected int"),
    ({"__annotations__": {"NUM_LAYERS": str}}, "expected str"),
  ],
)
def test_a_class_with_a_wrong_knob_cannot_be_made(body, message):
  with pytest.raises(UserError, match=message):
    type("Bad", (Recipe,), {"__module__": __name__, **body})


def test_lower_case_and_private_attributes_are_not_knobs():
  class Free(Base):
    helper = object()
    _PRIVATE = object()

  assert Free.knobs().keys() == Base.knobs().keys()


def test_a_redeclared_knob_takes_the_new_type():
  class Float(Base):
    NUM_LAYERS: float = 1.5
    WIDTH: float | None
    FLAG: bool | None = None

  assert Float.NUM_LAYERS == 1.5
  assert Float(WIDTH=0.5).WIDTH == 0.5
  assert Float.knobs()["NUM_LAYERS"].declared_in is Float
  assert list(Float.knobs()) == list(Base.knobs())
  with pytest.raises(UserError, match=r"class Bad: RATE = 1\.0: expected int"):
    type("Bad", (Base,), {"__annotations__": {"RATE": int}})


def test_knobs_of_bases_are_in_the_order_of_the_class_statement():
  class First(knobs.Knobs):
    ONE: int = 1

  class Last(knobs.Knobs):
    THREE: int = 3

  class Second(Last):
    TWO: int = 2

  class All(First, Second, Last):
    FOUR: int = 4
    ONE: float = 1.5

  found = All.knobs()
  assert list(found) == ["ONE", "TWO", "THREE", "FOUR"]
  assert [knob.group for knob in found.values()] == [First, Second, Last, All]
  assert (found["ONE"].declared_in, found["ONE"].type) == (All, float)


def test_mixins_of_every_kind_reach_the_recipe():
  class Data(Base):
    PATH = "/pile"
    SPLIT: str = "train"

  class Plain:
    NUM_LAYERS = 2
    DTYPE = np.float32

  class Both(Plain, Data, Recipe):
    pass

  both = Both()
  assert (both.PATH, both.SPLIT, both.NUM_LAYERS, both.DTYPE) == ("/pile", "train", 2, "float32")
  assert both.SHAPE == (8, 1, 1)
  with pytest.raises(UserError, match="Typo assigns NUM_LAYER,"):
    type("Bad", (type("Typo", (), {"NUM_LAYER": 2}), Recipe), {})


def test_annotations_may_be_text():
  source = (
    "from __future__ import annotations\n"
    "import typing\n"
    "from paxlike.config import knobs\n"
    "if typing.TYPE_CHECKING:\n  import nowhere\n"
    "class Late(knobs.Knobs):\n"
    "  other: nowhere.Thing\n"
    "  SIZE: int | None = None\n"
    "  KIND: knobs.Dtype = 'float32'\n"
  )
  module = types.ModuleType("late_module")
  sys.modules["late_module"] = module
  try:
    exec(source, vars(module))
  finally:
    del sys.modules["late_module"]
  assert module.Late.knobs()["SIZE"].type_name == "int | None"
  assert module.Late(SIZE="3", KIND=jnp.bfloat16).KIND == "bfloat16"


def test_knobs_say_who_declared_and_who_set_them():
  found = Recipe.knobs()
  assert list(found)[:3] == ["NUM_LAYERS", "RATE", "FLAG"]
  assert (found["NUM_LAYERS"].declared_in, found["NUM_LAYERS"].set_in) == (Base, Recipe)
  assert (found["RATE"].declared_in, found["RATE"].set_in) == (Base, Base)
  assert found["NUM_LAYERS"].default == 24
  assert found["SHAPE"].default == Recipe.SHAPE == (8, 1, 1)
  assert found["NEEDED"].default is UNSET
  assert found["MESH"].type_name == "tuple[int, ...] | dict[str, int]"
  values = Recipe(NAME="x").set("FLAG", "1", source="command line").values()
  assert list(values) == list(found)
  assert values["NAME"] == ("x", "constructor")
  assert values["FLAG"] == (True, "command line")
  assert values["RATE"] == (1.0, "class Base")
  assert values["NUM_LAYERS"] == (24, "subclass Recipe")


def test_docs_come_from_the_declaration():
  found = Recipe.knobs()
  assert found["NUM_LAYERS"].doc == "Transformer blocks, all alike."
  assert found["RATE"].doc == "The peak."
  assert found["CHOICE"].doc == "Spans lines."
  assert found["NEEDED"].doc == "Of each recipe."
  assert found["FLAG"].doc == ""
  namespace: dict[str, Any] = {"Base": Base, "__name__": "nowhere"}
  exec("class Typed(Base):\n  NEW: int = 1  #: Lost.\n", namespace)
  assert namespace["Typed"].knobs()["NEW"].doc == ""


def test_instance_reads_are_recorded_and_nothing_else_is():
  recipe = Recipe(NAME="x", FLAG=True).set("WIDTH", "3", source="command line")
  assert Recipe.NUM_LAYERS == 24
  recipe.values()
  repr(recipe)
  assert recipe.read_names() == set()
  assert recipe.unread() == ["NAME", "FLAG", "WIDTH"]
  assert recipe.NAME == "x"
  assert recipe.NUM_LAYERS == 24
  assert recipe.read_names() == {"NAME", "NUM_LAYERS"}
  assert recipe.unread() == ["FLAG", "WIDTH"]
  recipe.reset_reads()
  assert recipe.unread() == ["NAME", "FLAG", "WIDTH"]


def test_reads_through_methods_and_super_count():
  class Sized(Recipe):
    def width(self):
      return self.WIDTH or 8

  class Wider(Sized):
    def width(self):
      return 2 * super().width()

  wider = Wider(WIDTH=3)
  assert wider.width() == 6
  assert wider.unread() == []


def test_instances_and_classes_do_not_share_values():
  first, second = Recipe(NUM_LAYERS=1), Recipe()
  first.SIZES["data"] = 2
  assert (first.NUM_LAYERS, second.NUM_LAYERS, Recipe.NUM_LAYERS) == (1, 24, 24)
  assert first.SIZES == second.SIZES == Recipe.SIZES == {}


def test_a_refused_value_leaves_the_old_one():
  recipe = Recipe(NUM_LAYERS=3)
  with pytest.raises(UserError):
    recipe.set("NUM_LAYERS", "x", source="command line")
  assert recipe.values()["NUM_LAYERS"] == (3, "constructor")


def test_a_knob_without_a_value_asks_for_one():
  with pytest.raises(UserError, match=r"Recipe has no NEEDED: set it .* --fdl\.NEEDED="):
    _ = Recipe().NEEDED
  assert Recipe(NEEDED=3).NEEDED == 3


def test_a_constructor_that_forgets_ours_still_works():
  class Own(Recipe):
    def __init__(self):
      self.helper = 1
      self.NUM_LAYERS = 5

  assert Own().NUM_LAYERS == 5
  assert Own().unread() == ["NUM_LAYERS"]


def test_importing_knobs_is_light():
  code = "import sys, paxlike.config.knobs; print({'jax', 'numpy', 'fiddle'} & {*sys.modules})"
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == "set()"


def test_a_class_that_is_changed_later_gives_its_present_value():
  """Values of classes are converted once, but never a stale or an unconverted one is given."""

  class Changed(Base):
    NUM_LAYERS = 3

  class Below(Changed):
    pass

  assert Below().NUM_LAYERS == 3
  Changed.NUM_LAYERS = 5
  assert Below().NUM_LAYERS == 5
  Changed.NUM_LAYERS = "many"  # pyright: ignore[reportAttributeAccessIssue]
  with pytest.raises(UserError, match="NUM_LAYERS"):
    _ = Below().NUM_LAYERS
  Below.NUM_LAYERS = None  # pyright: ignore[reportAttributeAccessIssue]
  with pytest.raises(UserError, match="NUM_LAYERS = None"):
    _ = Below().NUM_LAYERS


def test_a_mutable_value_of_a_class_is_not_shared():
  class Shared(Base):
    SIZES = {"data": 2}
    ROWS: tuple[list[int], ...] = ([1],)

  Shared().ROWS[0].append(9)
  assert Shared().ROWS == ([1],)

  Shared.knobs()["SIZES"].default["data"] = 9
  Shared().values()["SIZES"].value["fsdp"] = 9
  assert Shared().SIZES == {"data": 2}
