# SPDX-License-Identifier: Apache-2.0
"""Laws of names: there and back is the identity, and the way back is narrow."""

import enum
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxlike import layers
from paxlike.config import allowed_symbols
from paxlike.errors import UserError
from paxlike.layers import stack


class Outer:
  """Of the user."""

  class Inner(dict):
    """Nested, and with class methods of its base."""

  @classmethod
  def make(cls):
    """Returns one."""
    return cls()

  @staticmethod
  def helper():
    """Returns nothing."""


class Heir(Outer):
  """Inherits `make`."""


class Colour(enum.IntEnum):
  RED = 1
  ALIAS = 1


@functools.cache
def cached():
  """A function in a wrapper."""


jitted = jax.jit(lambda x: x)

NAMES = {
  "builtins:dict": dict,
  "jax.nn:silu": jax.nn.silu,
  "jax.nn:relu": jax.nn.relu,
  "jax.nn:gelu": jax.nn.gelu,
  "jax.nn.initializers:normal": jax.nn.initializers.normal,
  "jax.numpy:bfloat16": jnp.bfloat16,
  "numpy:float32": np.float32,
  "optax:adamw": optax.adamw,
  "paxlike.layers:Linear": layers.Linear,
  "paxlike.layers:Remat.SAVE_NOTHING": stack.Remat.SAVE_NOTHING,
  f"{__name__}:Outer.Inner": Outer.Inner,
  f"{__name__}:Outer.make": Outer.make,
  f"{__name__}:Outer.helper": Outer.helper,
  f"{__name__}:Heir.make": Heir.make,
  f"{__name__}:Colour.RED": Colour.RED,
  f"{__name__}:cached": cached,
}


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_identity(name):
  value = NAMES[name]
  assert allowed_symbols.is_symbol(value)
  assert allowed_symbols.name_of(value) == name
  found = allowed_symbols.resolve(name, allow_modules=[__name__])
  assert found == value
  assert type(found) is type(value)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(__name__)])
def test_names_of_the_user_need_permission(name):
  with pytest.raises(UserError, match=f"--fdl_allow_modules={__name__}"):
    allowed_symbols.resolve(name)


@pytest.mark.parametrize("value", [lambda: 0, jitted, functools.partial(cached)])
def test_what_has_no_name_of_its_own_is_refused(value):
  with pytest.raises(UserError, match="top level of a module"):
    allowed_symbols.name_of(value)


@pytest.mark.parametrize(
  "symbol", ["Heir.Inner", "Outer.Inner.fromkeys", "Outer.__init__", "Outer.__dict__", "np.load"]
)
def test_only_what_a_module_defines_resolves(symbol):
  with pytest.raises(UserError, match="not defined there"):
    allowed_symbols.resolve(f"{__name__}:{symbol}", allow_modules=[__name__])


def test_permission_is_for_whole_names():
  for allowed in ("m", "m.y", "my.layers.x", ""):
    with pytest.raises(UserError, match=r"--fdl_allow_modules=my\.layers"):
      allowed_symbols.check("my.layers:Scaled", allow_modules=[allowed])
  allowed_symbols.check("my.layers:Scaled", allow_modules=["my"])


def test_nobody_is_asked_to_allow_the_standard_library():
  with pytest.raises(UserError, match=r"os\.path\.join: no graph") as refusal:
    allowed_symbols.check("os.path:join")
  assert "--fdl_allow_modules" not in str(refusal.value)


def test_checking_imports_nothing():
  assert "this" not in sys.modules
  allowed_symbols.check("this:s", allow_modules=["this"])
  with pytest.raises(UserError):
    allowed_symbols.check("this:s")
  assert "this" not in sys.modules


@pytest.mark.parametrize("module", allowed_symbols._LISTED)
def test_a_name_of_the_list_makes_no_folder_importable(module, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  before = [*sys.path]
  allowed_symbols.resolve(
    f"{module}:{min(allowed_symbols._LISTED[module])}", allow_modules=["elsewhere"]
  )
  assert sys.path == before


def test_an_allowed_module_of_the_working_directory_hides_none_that_is_installed(
  tmp_path, monkeypatch
):
  for name in ("tabnanny", "of_the_user"):
    (tmp_path / f"{name}.py").write_text("def check(): pass\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  for name in ("tabnanny", "of_the_user"):
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = allowed_symbols.resolve(f"{name}:check", allow_modules=[name])
    assert (found.__code__.co_argcount == 0) == (name == "of_the_user")
    monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (layers.Linear, "Linear"),
    (jax.nn.silu, "jax.nn.silu"),
    (stack.Remat.SAVE_NOTHING, "Remat.SAVE_NOTHING"),
    (dict, "dict"),
    (jnp.float32, "jax.numpy.float32"),
    (Outer.make, "Outer.make"),
  ],
)
def test_people_read_short_names(value, text):
  assert allowed_symbols.short_name(value) == text
