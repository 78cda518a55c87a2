# SPDX-License-Identifier: Apache-2.0
"""Matmuls in 8 bits against the same quantization in NumPy: scales, rounding, sums, gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from paxlike import layers, topology
from paxlike.checks.check import ABSENT, Check, compared, epsilon, guarded, is_cpu, largest_error
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
  errors = {what: largest_error(got[what], exact[what]) for what in exact}
  tolerance = 2 * epsilon(dtype) if dtype != jnp.float32 else 64 * epsilon(dtype)
  if kind is layers.Int8:
    tolerance += 1e-3
  return compared(ITEM, label, errors, tolerance)


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
  small_x = _in_fp8(x, _E4M3, seen.get("inputs"))
  small_dy = _in_fp8(dy, _E5M2, seen.get("gradients"))
  small_w = np.stack([_in_fp8(one, _E4M3) for one in w])
  found = {}
  for name, array in zip(seen, (x, dy), strict=False):
    found[f"largest of {name}"] = np.append(np.abs(array).max(), [0] * (len(seen[name]) - 1))
  y, dx, dw = _by_group(sizes, small_x, small_w, small_dy, small_x, small_dy)
  return {"value": y, "dx": dx, "dw": dw} | found


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
  of_rows = np.repeat(scale_w[:, 0], sizes, axis=0)
  # Gradients carry the scales of what is summed over while they are rounded.
  to_x = _by_chance(dy * of_rows, 1) / of_rows
  to_w = _by_chance(dy * scale_x, 0) / scale_x
  y, dx, dw = _by_group(sizes, small_x, small_w, to_x, small_x, to_w)
  return {"value": y, "dx": dx, "dw": dw}


def _by_chance(x: np.ndarray, axis: int) -> np.ndarray:
  """Returns x rounded to 8 bits and back, with the draws of the layers."""
  scale = np.abs(x).max(axis, keepdims=True) / np.float32(127)
  return np.asarray(by_chance(jnp.asarray(x / scale))) * scale


def _by_group(
  sizes: np.ndarray,
  x: np.ndarray,
  w: np.ndarray,
  dy: np.ndarray,
  x_of_w: np.ndarray,
  dy_of_w: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns y, dx and dw, summed in float64."""
  ends = np.cumsum(sizes)
  groups = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
  wide = [array.astype(np.float64) for array in (x, dy, x_of_w, dy_of_w)]
  x, dy, x_of_w, dy_of_w = wide
  y = np.concatenate([x[tokens] @ w[group] for group, tokens in enumerate(groups)])
  dx = np.concatenate([dy[tokens] @ w[group].T for group, tokens in enumerate(groups)])
  dw = np.stack([x_of_w[tokens].T @ dy_of_w[tokens] for tokens in groups])
  return y, dx, dw
