# SPDX-License-Identifier: Apache-2.0
"""The walks through the code that docs/design.md describes are those that calls take."""

import inspect
import re
import traceback
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from helpers.pages import DOCS
from helpers.shrunk import shrunk
from helpers.sources import PACKAGE
from helpers.steps import one_device
from helpers.tiny_model import batch

from paxlike import fiddlers, layers, registry
from paxlike.layers import linear


def listed(title: str) -> list[tuple[str, str]]:
  """Returns the (file, function) pairs of a walk in docs/design.md."""
  text = (DOCS / "design.md").read_text().partition(title)[2].partition("\n\n1. ")[2]
  return re.findall(r"^(?:\d+\. )?`([\w/]+\.py)`: `(\w+)`", text.partition("\n\n")[0], re.M)


def calls() -> list[tuple[str, str]]:
  """Returns (file, function) of each caller within the package, outermost first."""
  frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(PACKAGE))]
  return [(f.filename.removeprefix(f"{PACKAGE}/"), f.name) for f in frames]


def in_step(monkeypatch, module: object, name: str, **knobs: Any) -> list[tuple[str, str]]:
  """Returns the calls from the training step to the first call of a function."""
  found, function = [], getattr(module, name)

  def observed(x, w, *args, **kwargs):
    if not found and ("layers/linear.py", "__call__") in calls():
      assert not knobs or x.dtype == jnp.float8_e4m3fn
      found.extend(calls())
    return function(x, w, *args, **kwargs)

  monkeypatch.setattr(module, name, observed)
  one_device(shrunk("SyntheticLLaMA70B", scan=True, **knobs), batch(8), num_steps=1)
  return found[found.index(("training/train_step.py", "train_step")) :]


def test_from_the_step_to_a_matmul(monkeypatch):
  walk = listed("From the training step to a matmul")
  assert in_step(monkeypatch, linear, "matmul") == walk
  assert len(walk) <= 11


def test_from_the_knob_to_a_matmul_in_8_bits(monkeypatch):
  walk = listed("From the knob `QUANTIZATION` to an FP8 matmul")
  assert len(walk) <= 11
  knob, trainer, method, fiddler, init, *multiply = walk
  made = registry.find("SyntheticLLaMA70B")(QUANTIZATION="fp8")
  (file,) = {inspect.getsourcefile(cls) for cls in type(made).__mro__ if knob[1] in vars(cls)}
  assert f"{PACKAGE}/{knob[0]}" == file
  assert made.quantization.__func__.__code__.co_filename == f"{PACKAGE}/{method[0]}"

  configured, quantize = [], fiddlers.quantize

  def observed(*given):
    configured.extend(calls())
    quantize(*given)

  monkeypatch.setattr(fiddlers, "quantize", observed)
  linears = list(fiddlers.select(made.trainer(), linear.Linear, *fiddlers.LORA_ROLES["all"]))
  assert configured[-1] == trainer and fiddler == ("fiddlers/matmuls.py", "quantize")
  assert all(fdl.get_callable(node.dot) is layers.Fp8 for node in linears) and linears
  assert init == ("layers/linear.py", "__init__")

  found = in_step(monkeypatch, jax.lax, "dot_general", QUANTIZATION="fp8")
  assert found[found.index(multiply[0]) :] == multiply
