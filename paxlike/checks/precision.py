# SPDX-License-Identifier: Apache-2.0
"""Matmuls in 8 bits against the same quantization in NumPy: scales, rounding, sums, gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from paxlike import layers, topology
from paxlike.checks import grouped
from paxlike.checks.check import ABSENT, Check, compared, guarded, is_cpu, tolerance
from paxlike.layers import products
from paxlike.layers.grouped_matmul import Groups
from paxlike.layers.rounding import by_chance

ITEM = "8-bit matmuls"
_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

Arrays = dict[str, np.ndarray]


def matmuls(devices: jax.sharding.Mesh) -> Iterator[Check]:
  """Yields checks on one device, of linear maps and of experts.

  What is left when both sides round alike is the order of float32 sums and the dtype of results.
  In int8 a number may lie so near to the middle of two that it is rounded the other way.
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
  seen: Arrays = {}
  if kind is layers.DelayedFp8:  # Too small for the largest entries: those saturate.
    seen = {"inputs": np.array([4, 6, 0], np.float32)}
    seen["gradients"] = np.array([0.002, 0, 0], np.float32)
  got = _ours(kind, seen, sizes, x, w, dy)
  wide = (array.astype(np.float32) for array in (x, w, dy))
  exact = (_int8 if kind is layers.Int8 else _fp8)(sizes, *wide, seen=seen)
  most = tolerance(dtype) + (1e-3 if kind is layers.Int8 else 0)
  return compared(ITEM, label, got, exact, most)


def _ours(kind: Any, seen: Arrays, sizes: np.ndarray, *arrays: np.ndarray) -> Arrays:
  x, w, dy = jax.device_put(arrays, jax.local_devices()[0])

  def product(x: jax.Array, w: jax.Array, seen: dict[str, jax.Array]) -> jax.Array:
    dot = kind(history=3) if seen else kind()
    for name, largest in seen.items():
      getattr(dot, name).set_value(largest)
    # A linear map is multiplied as a single matrix.
    w = w[0] if len(sizes) == 1 else w
    groups = Groups(jnp.asarray(sizes, jnp.int32))
    shape = products.Plain() if len(sizes) == 1 else products.Sorted(groups)
    return dot(shape, x, w, dot.rounding(1, 1)(w))

  @jax.jit
  def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, Any]:
    y, back = jax.vjp(product, x, w, {name: jnp.asarray(old) for name, old in seen.items()})
    dx, dw, found = back(dy)
    return {"value": y, "dx": dx, "dw": dw} | {f"largest of {n}": v for n, v in found.items()}

  return jax.device_get(run(x, w, dy))


def _fp8(
  sizes: np.ndarray, x: np.ndarray, w: np.ndarray, dy: np.ndarray, *, seen: Arrays
) -> Arrays:
  given = {
    "x": _in_fp8(x, _E4M3, seen.get("inputs")),
    "w": np.stack([_in_fp8(one, _E4M3) for one in w]),
    "dy": _in_fp8(dy, _E5M2, seen.get("gradients")),
  }
  largest = {"inputs": np.abs(x).max(), "gradients": np.abs(dy).max()}
  found = {
    f"largest of {name}": np.append(largest[name], [0] * (len(old) - 1))
    for name, old in seen.items()
  }
  return grouped.dense(given, sizes) | found


def _in_fp8(x: np.ndarray, dtype: Any, seen: np.ndarray | None = None) -> np.ndarray:
  """Returns float32 x rounded to 8 bits and back, by a power of two as scale."""
  top = float(ml_dtypes.finfo(dtype).max)
  largest = np.abs(x).max() if seen is None else seen.max()
  scale = np.float32(2.0) ** np.frexp(np.float32(largest / top))[1]
  return np.clip(x / scale, -top, top).astype(dtype).astype(np.float32) * scale


def _int8(
  sizes: np.ndarray, x: np.ndarray, w: np.ndarray, dy: np.ndarray, *, seen: Arrays
) -> Arrays:
  del seen
  scale_x = np.abs(x).max(1, keepdims=True) / np.float32(127)
  scale_w = np.abs(w).max(1, keepdims=True) / np.float32(127)
  small_x, small_w = np.round(x / scale_x) * scale_x, np.round(w / scale_w) * scale_w
  of_tokens = np.repeat(scale_w[:, 0], sizes, axis=0)
  # Gradients carry the scales of what is summed over while they are rounded.
  dy_of_dx = _rounded_stochastically(dy * of_tokens, 1) / of_tokens
  dy_of_dw = _rounded_stochastically(dy * scale_x, 0) / scale_x
  given = {"x": small_x, "w": small_w, "dy": dy_of_dx}
  return grouped.dense(given, sizes, dy_of_dw=dy_of_dw)


def _rounded_stochastically(x: np.ndarray, axis: int) -> np.ndarray:
  """Returns x rounded to 8 bits and back, with the draws of the layers."""
  scale = np.abs(x).max(axis, keepdims=True) / np.float32(127)
  return np.asarray(by_chance(jnp.asarray(x / scale))) * scale
