# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine means by the arguments of a matmul, and that we pass that.

Callee: Transformer Engine 2.20.2 (transformer_engine/jax/ of its wheel).
- dense.py, `dense`: `contracting_dims` are (those of x, those of the kernel), one tuple each. Only
  the last dims of x and the first of the kernel may be contracted (asserted). Without a quantizer
  set the kernel is cast to x's dtype.
- quantize/quantizer.py, `create_set`: one set, not a tuple of one, for the default
  `n_quantizer_sets=1`. `fwd_dtype` is of x and the kernel, `bwd_dtype` of the gradient that comes
  in. Unknown names are *taken silently* (**kwargs), so a renamed argument would be lost: names are
  checked here. `scaling_mode` and a recipe exclude each other; a None dtype is not filled in
  without a recipe.
- quantize/scaling_modes.py: `ScalingMode.CURRENT_TENSOR_SCALING`: a scale for each tensor, of its
  own largest value.
- jax/__init__.py imports `quantize`, and not `dense`.
"""

import enum
import inspect
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.errors import UserError
from paxlike.layers import TransformerEngine
from paxlike.layers.precision import transformer_engine
from paxlike.layers.precision.matmul import LinearForm

# Names and defaults of the callee's parameters, in order; `_NOOP` stands for its own objects.
_NOOP = "noop"
_DENSE = {
  "x": inspect.Parameter.empty,
  "kernel": inspect.Parameter.empty,
  "bias": None,
  "contracting_dims": ((1,), (0,)),
  "transpose_batch_sequence": False,
  "input_axes": None,
  "kernel_axes": None,
  "output_axes": None,
  "collective_op_set": _NOOP,
  "quantizer_set": _NOOP,
}
_CREATE_SET = {
  "n_quantizer_sets": 1,
  "scaling_mode": None,
  "fwd_dtype": None,
  "bwd_dtype": None,
  "is_2x2x": None,
  "n_groups": None,
  "checkpoint_name": None,
  "fp8_recipe": None,
}


def signature(parameters: dict[str, Any]) -> inspect.Signature:
  kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
  return inspect.Signature(
    [inspect.Parameter(name, kind, default=value) for name, value in parameters.items()]
  )


class Mode(enum.Enum):
  """The names of the callee's `ScalingMode`."""

  NO_SCALING = 0
  DELAYED_TENSOR_SCALING = 1
  MXFP8_1D_SCALING = 2
  CURRENT_TENSOR_SCALING = 3
  NVFP4_1D_SCALING = 4
  NVFP4_2D_SCALING = 5


@pytest.fixture
def called(monkeypatch):
  """What reaches a stand-in that has the callee's signatures, and multiplies as it does."""
  record: dict[str, Any] = {}

  def create_set(*arguments, **named):
    bound = signature(_CREATE_SET).bind(*arguments, **named)
    bound.apply_defaults()
    record["set"] = bound.arguments
    return "a set"

  def dense(*arguments, **named):
    bound = signature(_DENSE).bind(*arguments, **named)
    bound.apply_defaults()
    record["dense"] = given = bound.arguments
    x, kernel, (of_x, of_kernel) = given["x"], given["kernel"], given["contracting_dims"]
    assert x.ndim - 1 in of_x and kernel.ndim - 1 not in of_kernel  # The only layout it has.
    return jnp.tensordot(x, kernel, (of_x, of_kernel))

  quantize = types.SimpleNamespace(
    ScalingMode=Mode, QuantizerFactory=types.SimpleNamespace(create_set=create_set)
  )
  library = types.SimpleNamespace(quantize=quantize, dense=types.SimpleNamespace(dense=dense))
  monkeypatch.setattr(transformer_engine, "load", lambda: library)
  return record


@pytest.mark.parametrize("leading", [(6,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("fp8", [False, True])
def test_it_is_asked_for_x_times_w(called, leading, fp8):
  random = np.random.default_rng(0)
  x, w = random.normal(size=(*leading, 8)), random.normal(size=(8, 5))
  y = TransformerEngine(fp8=fp8)(LinearForm(), jnp.asarray(x), jnp.asarray(w), None)
  np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
  given = called["dense"]
  assert given["bias"] is None and not given["transpose_batch_sequence"]
  assert given["quantizer_set"] == ("a set" if fp8 else _NOOP)
  assert ("set" in called) == fp8


def test_values_are_e4m3_and_gradients_e5m2_each_with_its_own_scale(called):
  x = jnp.ones((2, 8))
  TransformerEngine()(LinearForm(), x, jnp.ones((8, 4)), None)
  given = called["set"]
  assert given["n_quantizer_sets"] == 1 and given["fp8_recipe"] is None
  assert given["scaling_mode"] is Mode.CURRENT_TENSOR_SCALING
  assert (given["fwd_dtype"], given["bwd_dtype"]) == (jnp.float8_e4m3fn, jnp.float8_e5m2)


def test_the_signatures_are_those_of_what_is_installed():
  try:
    library = transformer_engine.load()
  except UserError as error:
    pytest.skip(str(error))
  dense = inspect.signature(library.dense.dense).parameters
  assert list(dense)[: len(_DENSE)] == list(_DENSE)
  assert dense["contracting_dims"].default == ((1,), (0,))
  assert set(_CREATE_SET) <= set(
    inspect.signature(library.quantize.QuantizerFactory.create_set).parameters
  )
  assert {mode.name for mode in Mode} <= {mode.name for mode in library.quantize.ScalingMode}
