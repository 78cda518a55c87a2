# SPDX-License-Identifier: Apache-2.0
"""Laws of the values of knobs: from text, from Python, and back."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sample_knobs import Base, Policy, Recipe

from paxlike.config import dtypes, knobs
from paxlike.config.knobs import UNSET
from paxlike.errors import UserError


def from_text(name: str, text: str) -> Any:
  return getattr(Recipe().set(name, text, source="command line"), name)


@pytest.mark.parametrize(
  ("name", "text", "value"),
  [
    ("NUM_LAYERS", "4", 4),
    ("NUM_LAYERS", "0", 0),
    ("NUM_LAYERS", "1_000", 1000),
    ("RATE", "6e-4", 6e-4),
    ("RATE", "3", 3.0),
    ("FLAG", "true", True),
    ("FLAG", "False", False),
    ("FLAG", "1", True),
    ("FLAG", "0", False),
    ("NAME", "bare words", "bare words"),
    ("NAME", '"quoted"', "quoted"),
    ("NAME", "", ""),
    ("NAME", "4", "4"),
    ("DTYPE", "float8_e4m3fn", "float8_e4m3fn"),
    ("DTYPE", '"bfloat16"', "bfloat16"),
    ("DTYPE", "jnp.float32", "float32"),
    ("DTYPE", "bf16", "bfloat16"),
    ("POLICY", "NOTHING", Policy.NOTHING),
    ("POLICY", "nothing", Policy.NOTHING),
    ("POLICY", "Policy.NOTHING", Policy.NOTHING),
    ("SHAPE", "[8,1,1]", (8, 1, 1)),
    ("SHAPE", "8,1,1", (8, 1, 1)),
    ("SHAPE", "( 8, 1 )", (8, 1)),
    ("SHAPE", "[]", ()),
    ("SHAPE", "-1", (-1,)),
    ("WORDS", "a,b", ("a", "b")),
    ("WORDS", "['a,b', c]", ("a,b", "c")),
    ("SIZES", "{data: 2, fsdp: 4}", {"data": 2, "fsdp": 4}),
    ("SIZES", '{"data":2}', {"data": 2}),
    ("SIZES", "{}", {}),
    ("NORM", "layer", "layer"),
    ("WIDTH", "None", None),
    ("WIDTH", "none", None),
    ("WIDTH", "0", 0),
    ("PATH", "None", None),
    ("PATH", "'None'", "None"),
    ("PATH", "/a/b=c", "/a/b=c"),
    ("MESH", "[2,4]", (2, 4)),
    ("MESH", "{data: 2}", {"data": 2}),
  ],
)
def test_text_becomes_a_value_of_the_type(name, text, value):
  found = from_text(name, text)
  assert found == value
  assert type(found) is type(value)


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("NUM_LAYERS", "four", "--fdl.NUM_LAYERS=four: expected int, got 'four'."),
    ("NUM_LAYERS", "4.0", "--fdl.NUM_LAYERS=4.0: expected int, got '4.0'."),
    ("NUM_LAYERS", "true", "expected int"),
    ("NUM_LAYERS", "none", "expected int"),
    ("NUM_LAYERS", "", "expected int, got ''."),
    ("RATE", "nan", "expected float"),
    ("FLAG", "yes", "expected bool"),
    ("FLAG", "2", "expected bool"),
    (
      "DTYPE",
      "bflot16",
      "expected a dtype such as bfloat16, got 'bflot16'. Did you mean bfloat16?",
    ),
    ("DTYPE", "str", "expected a dtype"),
    ("POLICY", "NOTHIN", "one of NOTHING, EVERYTHING, got 'NOTHIN'. Did you mean NOTHING?"),
    ("SHAPE", "[8,one,1]", r"expected a list whose items are each an int, got '[8,one,1]'."),
    ("SHAPE", "[8,1", "expected a list"),
    ("SHAPE", "8,1]", "expected a list"),
    ("SHAPE", "", "expected a list"),
    ("SHAPE", "{8: 1}", "expected a list"),
    ("SIZES", "data: 2", "expected a mapping {name: value, ...} whose values are each an int"),
    ("SIZES", "{data}", "expected a mapping"),
    ("SIZES", "{data: x}", "expected a mapping"),
    ("SIZES", "{data: 1, data: 2}", "expected a mapping"),
    ("NORM", "rmss", "expected one of rms, layer, got 'rmss'. Did you mean rms?"),
    ("WIDTH", "x", "expected int or None, got 'x'."),
  ],
)
def test_text_of_another_type_is_refused_by_name(name, text, message):
  with pytest.raises(UserError) as error:
    from_text(name, text)
  assert message in str(error.value)
  assert f"--fdl.{name}={text}" in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("NUM_LAYERS", True),
    ("NUM_LAYERS", 4.0),
    ("NUM_LAYERS", None),
    ("FLAG", 1),
    ("RATE", False),
    ("NAME", 3),
    ("SHAPE", (1, "2")),
    ("SHAPE", 8),
    ("SIZES", [1]),
    ("POLICY", 1),
    ("DTYPE", np.zeros(3)),
    ("DTYPE", float),
  ],
)
def test_values_of_another_type_are_refused(name, value):
  with pytest.raises(UserError, match=name):
    Recipe(**{name: value})


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64])
def test_scalars_of_numpy_are_kept_as_those_of_python(kind):
  is_whole = issubclass(kind, np.integer)
  numbers: Any = {"NUM_LAYERS": kind(2)} if is_whole else {"RATE": kind(0.3)}
  for name, value in (*numbers.items(), ("RATE", kind(2))):
    held = getattr(Recipe(**{name: value}), name)
    assert held == value and type(held) is (int if name == "NUM_LAYERS" else float)
  for value in (np.float32(2), np.bool_(True), np.zeros(1, int)):
    with pytest.raises(UserError, match="NUM_LAYERS"):
      Recipe(NUM_LAYERS=value)


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype("bfloat16"), "bfloat16"]
)
def test_dtypes_are_kept_by_name(dtype):
  assert Recipe(DTYPE=dtype).DTYPE == "bfloat16"
  assert type("Sub", (Base,), {"DTYPE": dtype}).DTYPE == "bfloat16"


def test_every_dtype_name_exists():
  for name in dtypes.NAMES:
    assert jnp.dtype(name).name == name


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("NAME", "None"),
    ("NAME", "'quoted'"),
    ("NAME", " spaced "),
    ("PATH", "none"),
    ("PATH", None),
    ("WORDS", ("a,b", "c:d", "it's", '"', "", "none", "[x]", "back\\slash'\"")),
    ("SIZES", {"a b": 1, "c,d": -2}),
    ("SHAPE", ()),
    ("RATE", 1e-30),
    ("RATE", float("inf")),
    ("POLICY", Policy.NOTHING),
    ("MESH", {"data": -1}),
    ("FLAG", True),
  ],
)
def test_spelling_a_value_and_reading_it_back_is_the_identity(name, value):
  assert from_text(name, knobs.spell(value)) == value


def test_every_default_can_be_spelt():
  defaults = {name: knob.default for name, knob in Recipe.knobs().items()}
  spelt = {name: value for name, value in defaults.items() if value is not UNSET}
  assert len(spelt) > 10
  for name, value in spelt.items():
    assert from_text(name, knobs.spell(value)) == value
