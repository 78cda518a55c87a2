# SPDX-License-Identifier: Apache-2.0
"""Compares the grouped matmuls of experts with `ragged_dot` and NumPy."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.checks.check import Check, compared, guarded, is_cpu, tolerance
from paxlike.layers.moe.grouped_matmul import GroupedForm
from paxlike.layers.precision.matmul import by_form

ITEM = "grouped matmuls"

Arrays = dict[str, np.ndarray]


def matmuls(devices: jax.sharding.Mesh) -> Iterator[Check]:
  """Yields checks on one device, with empty groups and tokens in no group."""
  on_cpu = is_cpu(devices)
  dtype: Any = jnp.float32 if on_cpu else jnp.bfloat16
  sizes = np.array([0, 29, 1, 0, 40, 7] if on_cpu else [0, 300, 1, 0, 517, 70, 128, 0], np.int32)
  num_tokens, D, F = (96, 24, 40) if on_cpu else (1280, 256, 384)
  random = np.random.default_rng(0)
  shapes = {"x": (num_tokens, D), "w": (len(sizes), D, F), "dy": (num_tokens, F)}
  given = {
    name: random.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)
    for name, shape in shapes.items()
  }
  used = int(sizes.sum())
  detail = f"{len(sizes)} groups, {(sizes == 0).sum()} empty, {num_tokens - used} of {num_tokens}"
  detail += f" tokens in none, {jnp.dtype(dtype).name}"

  def check(name: str, reference: Any) -> Check:
    got, exact = _ours(given, sizes, dtype), reference(given, sizes)
    return compared(ITEM, name, got, exact, tolerance(dtype), detail)

  for name, reference in (("dense matmuls", dense), ("ragged_dot", _ragged)):
    label = f"against {name}"
    yield guarded(ITEM, label, lambda label=label, reference=reference: check(label, reference))


def _ours(given: Arrays, sizes: np.ndarray, dtype: Any) -> Arrays:
  def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return by_form(x, w, GroupedForm(jnp.asarray(sizes)))

  return _with_gradients(matmul, {name: x.astype(dtype) for name, x in given.items()}, sizes)


def _ragged(given: Arrays, sizes: np.ndarray) -> Arrays:
  used = np.arange(len(given["x"]))[:, None] < sizes.sum()
  masked = given | {"dy": np.where(used, given["dy"], 0)}

  def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, jnp.asarray(sizes))

  return _with_gradients(matmul, masked, sizes)


def _with_gradients(matmul: Any, given: Arrays, sizes: np.ndarray) -> Arrays:
  """Returns a grouped matmul and its gradients, for tokens that are in a group."""
  used = int(sizes.sum())

  @jax.jit
  def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    y, vjp = jax.vjp(matmul, x, w)
    dx, dw = vjp(dy)
    return {"value": y[:used], "dx": dx[:used], "dw": dw}

  # Accelerators multiply float32 in lower precision by default.
  with jax.default_matmul_precision("highest"):
    return jax.device_get(run(*jax.device_put(list(given.values()), jax.local_devices()[0])))


def dense(given: Arrays, sizes: np.ndarray, *, dy_of_dw: np.ndarray | None = None) -> Arrays:
  """Returns a grouped matmul and its gradients, by a loop of matmuls in float64.

  Args:
    given: Tokens x, the matrices w of the groups, and the cotangent dy.
    sizes: Tokens per group; groups are consecutive.
    dy_of_dw: The cotangent for dw, if it is quantized differently.
  """
  x, w, dy = (given[name].astype(np.float64) for name in ("x", "w", "dy"))
  dy_of_dw = dy if dy_of_dw is None else dy_of_dw.astype(np.float64)
  ends = np.cumsum(sizes)
  groups = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
  return {
    "value": np.concatenate([x[tokens] @ w[group] for group, tokens in enumerate(groups)]),
    "dx": np.concatenate([dy[tokens] @ w[group].T for group, tokens in enumerate(groups)]),
    "dw": np.stack([x[tokens].T @ dy_of_dw[tokens] for tokens in groups]),
  }
