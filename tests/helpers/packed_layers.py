# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state: three documents packed and sharded, compared with each alone.

    PYTHONPATH=tests python -m helpers.packed_layers

prints, for float32 on fake CPU devices, the largest differences of outputs and of gradients.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from paxlike import layers
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import Context, Definition
from paxlike.layers.recurrent.short_conv import ShortConv

DIM, LENGTHS = 24, (37, 51, 40)
MESHES: tuple[dict[str, int], ...] = (
  {},
  {"context": 2},
  {"context": 4},
  {"tensor": 2, "context": 2},
)


class Row(NamedTuple):
  """A layer: `build` returns its abstract module, `call` its outputs [B, T, ...]."""

  build: Callable[[], Any]
  call: Callable[[Any, Any, Context], jax.Array]


class Differences(NamedTuple):
  """The largest absolute differences from the documents alone.

  Attributes:
    outputs: Of the outputs.
    of_inputs: Of the gradients of inputs.
    of_weights: Of the gradients of weights, each over its largest number if that is above 1.
  """

  outputs: float
  of_inputs: float
  of_weights: float


def mix(module: Any, x_BTD: Any, context: Context) -> jax.Array:
  return module(x_BTD, context)[0]


def convolve(module: Any, x_BTD: Any, context: Context) -> jax.Array:
  return module(x_BTD.reshape(*x_BTD.shape[:2], 4, 6), context.segments_BT)


def _linears(*roles: str) -> Any:
  return {role: functools.partial(layers.Linear, role=role) for role in roles}


def gated_delta_net() -> Any:
  return layers.GatedDeltaNet(
    DIM,
    num_heads=4,
    num_key_heads=2,
    key_dim=6,
    value_dim=5,
    chunk=16,
    conv=layers.ShortConv,
    norm=layers.RmsNorm,
    **_linears("query", "key", "value", "output_gate", "beta", "decay", "output"),
  )


def mamba2() -> Any:
  return layers.Mamba2(
    DIM,
    num_heads=4,
    head_dim=6,
    state_dim=5,
    num_groups=2,
    chunk=16,
    conv=functools.partial(layers.ShortConv, use_bias=True),
    norm=layers.GroupedRmsNorm,
    **_linears("query", "key", "value", "output_gate", "step", "output"),
  )


LAYERS = {
  "Gated DeltaNet": Row(gated_delta_net, mix),
  "Mamba-2": Row(mamba2, mix),
  "short convolution": Row(lambda: ShortConv({"heads": 4, "head": 6}, use_bias=True), convolve),
}
MIXERS = {name: row for name, row in LAYERS.items() if row.call is mix}


def drawn(build: Callable[[], Any]) -> tuple[Definition, dict[str, Any]]:
  """Returns (definition, weights around those that are usual)."""
  definition, random = Definition(build()), np.random.default_rng(0)
  weights = {
    name: np.float32(random.normal(size=spec.shape) / math.sqrt(max(spec.fan_in, 1)))
    for name, spec in definition.weights.items()
  }
  return definition, weights


def tokens(*shape: int) -> np.ndarray:
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def on(shape: Mapping[str, int], function: Callable[..., Any], *arguments: Any) -> Any:
  """Returns what a function returns on a mesh of this shape."""
  devices = jax.devices()[: math.prod(shape.values())]
  with jax.set_mesh(MeshSpec(ici=dict(shape)).build(devices)):
    return function(*arguments)


def _run(row: Row, x: Any, segments: Any, dy: Any) -> Any:
  """Returns ((gradients of weights, gradients of x), outputs [B, T, -1])."""
  definition, weights = drawn(row.build)

  def value(weights: Any, x: Any) -> Any:
    y = row.call(definition.bind(weights), x, Context(segments_BT=segments))
    y = y.reshape(*y.shape[:2], -1)
    return (y * dy).sum(), y

  return jax.jit(jax.grad(value, (0, 1), has_aux=True))(weights, x)


def _data() -> tuple[np.ndarray, np.ndarray]:
  x = tokens(2, sum(LENGTHS), DIM)
  return x, x[::-1] / 8


@functools.cache
def documents_alone(name: str) -> tuple[Any, Any, Any]:
  """Returns (outputs, gradients of inputs, gradients of weights) of documents by themselves."""
  inputs = zip(*(np.split(z, np.cumsum(LENGTHS)[:-1], axis=1) for z in _data()), strict=True)
  each = [_run(LAYERS[name], x, None, dy) for x, dy in inputs]
  outputs, of_x = (np.concatenate(z, 1) for z in zip(*((y, g[1]) for g, y in each), strict=True))
  return outputs, of_x, jax.tree.map(lambda *z: sum(z), *(g[0] for g, _ in each))


def differences(name: str, shape: Mapping[str, int]) -> Differences:
  """Returns how far packed documents on a mesh of this shape are from the documents alone."""
  x, dy = _data()
  segments = np.repeat([[1, 2, 3]], LENGTHS, axis=1).repeat(2, axis=0).astype(np.int32)
  (of_weights, of_x), y = on(shape, _run, LAYERS[name], x, segments, dy)
  outputs, of_inputs, expected = documents_alone(name)
  assert of_weights.keys() == expected.keys()
  each = [
    _largest(of_weights[weight], gradient) / max(1, np.abs(gradient).max())
    for weight, gradient in expected.items()
  ]
  return Differences(_largest(y, outputs), _largest(of_x, of_inputs), float(np.max(each)))


def _largest(a: Any, b: Any) -> float:
  return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def main():
  """Prints the table of docs/results.md."""
  print("| layer | mesh | outputs | gradients of inputs | gradients of weights |")
  print("|---|---|---:|---:|---:|")
  for name in MIXERS:
    for shape in MESHES:
      mesh = " x ".join(f"{axis} {size}" for axis, size in shape.items()) or "1 device"
      print(f"| {name} | {mesh} | {' | '.join(f'{d:.1e}' for d in differences(name, shape))} |")
  for name in MIXERS:
    outputs, of_inputs = (np.abs(z).max() for z in documents_alone(name)[:2])
    print(f"\n{name}: outputs up to {outputs:.2g}, gradients of inputs up to {of_inputs:.2g}.")


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  main()
