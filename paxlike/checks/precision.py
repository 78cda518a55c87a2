# SPDX-License-Identifier: Apache-2.0
"""Compares 8-bit matmuls and their gradients with the same quantization and matmuls in NumPy."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from paxlike import layers
from paxlike.checks import grouped
from paxlike.checks.check import ABSENT, Check, compared, guarded, is_cpu, tolerance
from paxlike.devices import topology
from paxlike.layers.moe.grouped_matmul import GroupedForm
from paxlike.layers.precision.matmul import LinearForm
from paxlike.layers.precision.rounding import stochastic_round

ITEM = "8-bit matmuls"
_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

Arrays = dict[str, np.ndarray]


def matmuls(devices: jax.sharding.Mesh) -> Iterator[Check]:
  """Yields checks on one device, of linear maps and of experts.

  Both sides quantize alike, so only the order of float32 sums and the dtype of results differ. In
  int8, a number near the middle of two levels may round the other way.
  """
  dtype: Any = jnp.float32 if is_cpu(devices) else jnp.bfloat16
  for name, kind in (
    ("fp8", layers.Fp8),
    ("fp8_delayed", layers.DelayedFp8),
    ("int8", layers.Int8),
  ):
    if name != "int8" and not topology.has_fp8(devices.devices.flat[0]):
      yield Check(item=ITEM, name=name, verdict=ABSENT, detail="the devices have no fp8")
      continue
    for shape, sizes in (("linear map", [96]), ("experts", [40, 0, 31, 25])):
      label = f"{name}, {shape}"
      yield guarded(
        ITEM,
        label,
        lambda label=label, kind=kind, sizes=sizes: _check(label, kind, np.array(sizes), dtype),
      )


def _check(label: str, kind: Callable[..., Any], sizes: np.ndarray, dtype: Any) -> Check:
  random = np.random.default_rng(0)
  x, w, dy = (
    (scale * random.normal(size=shape)).astype(dtype)
    for scale, shape in ((3, (96, 64)), (0.1, (len(sizes), 64, 48)), (1e-3, (96, 48)))
  )
  history: Arrays = {}
  if kind is layers.DelayedFp8:  # Amax histories so small that the largest entries saturate.
    history = {"inputs": np.array([4, 6, 0], np.float32)}
    history["gradients"] = np.array([0.002, 0, 0], np.float32)
  got = _ours(kind, history, sizes, x, w, dy)
  wide = (array.astype(np.float32) for array in (x, w, dy))
  exact = (_int8 if kind is layers.Int8 else _fp8)(sizes, *wide, history=history)
  most = tolerance(dtype) + (1e-3 if kind is layers.Int8 else 0)
  return compared(ITEM, label, got, exact, most)


def _ours(kind: Any, history: Arrays, sizes: np.ndarray, *arrays: np.ndarray) -> Arrays:
  x, w, dy = jax.device_put(arrays, jax.local_devices()[0])

  def product(x: jax.Array, w: jax.Array, history: dict[str, jax.Array]) -> jax.Array:
    dot = kind(history=3) if history else kind()
    for name, largest in history.items():
      getattr(dot, name).set_value(largest)
    # A linear map has a single matrix.
    w = w[0] if len(sizes) == 1 else w
    form = LinearForm() if len(sizes) == 1 else GroupedForm(jnp.asarray(sizes, jnp.int32))
    return dot(form, x, w)

  @jax.jit
  def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, Any]:
    y, vjp = jax.vjp(product, x, w, {name: jnp.asarray(old) for name, old in history.items()})
    dx, dw, found = vjp(dy)
    return {"value": y, "dx": dx, "dw": dw} | {f"largest of {n}": v for n, v in found.items()}

  return jax.device_get(run(x, w, dy))


def _fp8(
  sizes: np.ndarray, x: np.ndarray, w: np.ndarray, dy: np.ndarray, *, history: Arrays
) -> Arrays:
  given = {
    "x": _in_fp8(x, _E4M3, history.get("inputs")),
    "w": np.stack([_in_fp8(one, _E4M3) for one in w]),
    "dy": _in_fp8(dy, _E5M2, history.get("gradients")),
  }
  largest = {"inputs": np.abs(x).max(), "gradients": np.abs(dy).max()}
  found = {
    f"largest of {name}": np.append(largest[name], [0] * (len(old) - 1))
    for name, old in history.items()
  }
  return grouped.dense(given, sizes) | found


def _in_fp8(x: np.ndarray, dtype: Any, history: np.ndarray | None = None) -> np.ndarray:
  """Returns float32 x quantized to FP8 with a power-of-two scale, and dequantized."""
  top = float(ml_dtypes.finfo(dtype).max)
  largest = np.abs(x).max() if history is None else history.max()
  scale = np.float32(2.0) ** np.frexp(np.float32(largest / top))[1]
  return np.clip(x / scale, -top, top).astype(dtype).astype(np.float32) * scale


def _int8(
  sizes: np.ndarray, x: np.ndarray, w: np.ndarray, dy: np.ndarray, *, history: Arrays
) -> Arrays:
  del history
  scale_x = np.abs(x).max(1, keepdims=True) / np.float32(127)
  scale_w = np.abs(w).max(1, keepdims=True) / np.float32(127)
  x8, w8 = np.round(x / scale_x) * scale_x, np.round(w / scale_w) * scale_w
  of_tokens = np.repeat(scale_w[:, 0], sizes, axis=0)
  # Cotangents are multiplied by the scales along the contracted dim before they are rounded.
  dy_of_dx = _rounded_stochastically(dy * of_tokens, 1) / of_tokens
  dy_of_dw = _rounded_stochastically(dy * scale_x, 0) / scale_x
  given = {"x": x8, "w": w8, "dy": dy_of_dx}
  return grouped.dense(given, sizes, dy_of_dw=dy_of_dw)


def _rounded_stochastically(x: np.ndarray, axis: int) -> np.ndarray:
  """Returns x stochastically quantized to int8 with the layers' random bits, and dequantized."""
  scale = np.abs(x).max(axis, keepdims=True) / np.float32(127)
  return np.asarray(stochastic_round(jnp.asarray(x / scale))) * scale
