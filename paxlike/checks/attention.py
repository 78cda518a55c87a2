# SPDX-License-Identifier: Apache-2.0
"""Compares attention kernels on the mesh with `xla` in float32 on one device, gradients too."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlike import layers
from paxlike.checks.check import (
  Check,
  compared,
  fetched,
  guarded,
  is_cpu,
  placed,
  tolerance,
)
from paxlike.devices import mesh

ITEM = "attention"
_DIMS: mesh.Dims = ("batch", "time", "heads", None)


class Case(NamedTuple):
  """A test case of a kernel.

  Attributes:
    name: Its label.
    batch: Sequences; None: the number of batch shards.
    num_heads, num_kv_heads: N and K.
    is_packed: Whether sequences have segments.
    num_segments: The approximate number of segments.
    window: Whether attention has a sliding window.
    soft_cap: The soft cap of logits.
    odd: Whether T is odd.
    narrow_values: Whether values are narrower than keys.
  """

  name: str
  batch: int | None
  num_heads: int
  num_kv_heads: int
  is_packed: bool = False
  num_segments: int = 6
  window: bool = False
  soft_cap: float | None = None
  odd: bool = False
  narrow_values: bool = False


CASES = (
  Case("GQA, packed", None, 4, 2, is_packed=True),
  Case("MQA, window, odd length", 1, 4, 1, window=True, odd=True),
  Case("MHA, packed, window, soft cap", None, 4, 4, is_packed=True, window=True, soft_cap=5.0),
  Case("MHA, narrow values", 2, 4, 4, narrow_values=True),
)
# Only on accelerators.
MORE_CASES = (
  Case("MHA", 1, 4, 4),
  Case("MHA, packed", 2, 4, 4, is_packed=True),
  Case("GQA, packed", 1, 8, 2, is_packed=True),
  Case("MHA, packed in 100", 1, 4, 4, is_packed=True, num_segments=100),
  Case("MQA, packed, window", 2, 4, 1, is_packed=True, window=True),
  Case("GQA, packed, odd length", 2, 4, 2, is_packed=True, odd=True),
  Case("GQA, packed, narrow values", 2, 4, 2, is_packed=True, narrow_values=True),
)


class _Inputs(NamedTuple):
  """float32 arrays that are exact in bfloat16; dy is the cotangent."""

  q_BTNH: np.ndarray
  k_BSKH: np.ndarray
  v_BSKH: np.ndarray
  dy_BTNH: np.ndarray
  segments_BT: np.ndarray | None


def kernels(devices: jax.sharding.Mesh) -> Iterator[Check]:
  """Yields a check for each case, kernel that the devices support, and dtype."""
  device, on_cpu = devices.devices.flat[0], is_cpu(devices)
  dtypes = (jnp.float32,) if on_cpu else (jnp.bfloat16, jnp.float32)
  for case in CASES if on_cpu else (*CASES, *MORE_CASES):
    inputs = _inputs(case, devices)
    options = _options(case)
    exact = functools.cache(lambda inputs=inputs, options=options: _reference(inputs, options))
    for name, kernel in _available(device, devices, case).items():
      for dtype in dtypes:
        is_16_bit = name in layers.KERNELS and layers.KERNELS[name].is_16_bit
        if jnp.dtype(dtype).itemsize == 4 and is_16_bit and not on_cpu:
          continue
        label = f"{name}: B {len(inputs.q_BTNH)}, {case.name}"
        label += "" if on_cpu else f", {jnp.dtype(dtype).name}"
        run = functools.partial(_on_mesh, kernel, inputs, options, devices, dtype)
        yield guarded(
          ITEM,
          label,
          lambda run=run, label=label, exact=exact, dtype=dtype: compared(
            ITEM, label, run(), exact(), tolerance(dtype, roundings=4)
          ),
          may_refuse=True,
        )


def _available(device: Any, devices: jax.sharding.Mesh, case: Case) -> dict[str, Any]:
  """Returns name -> kernel for the kernels that the devices support."""
  on_cpu, is_first = device.platform == "cpu", case == CASES[0]
  found: dict[str, Any] = {}
  for name, entry in layers.KERNELS.items():
    is_usable = devices.shape["context"] > 1 or not entry.is_context_parallel
    if name == "auto" or not is_usable or not entry.supports(device):
      continue
    most = {"max_segments": max(64, 2 * case.num_segments)} if entry.limits_segments else {}
    found[name] = functools.partial(entry.function, **most)
  if on_cpu and (devices.size == 1 or not is_first):
    del found["xla"]  # The reference.
  if on_cpu and devices.size == 1 and is_first:
    found["splash, interpreted"] = functools.partial(layers.splash, interpret=True)
  return found


def _inputs(case: Case, devices: jax.sharding.Mesh) -> _Inputs:
  random = np.random.default_rng(0)
  # T is longer than a chunk of `xla_chunked`.
  length, width = (288, 16) if is_cpu(devices) else (1024, 128)
  length -= 13 * case.odd
  B = max(2, mesh.batch_shards(devices)) if case.batch is None else case.batch
  value_width = width // 2 if case.narrow_values else width

  def normal(*shape: int) -> np.ndarray:
    return random.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)

  segments = None
  if case.is_packed:
    begins = random.random((B, length)) < case.num_segments / length
    begins[:, 0] = True
    segments = np.cumsum(begins, 1).astype(np.int32)
    segments[:, -3:] = 0  # Padding.
  return _Inputs(
    normal(B, length, case.num_heads, width),
    normal(B, length, case.num_kv_heads, width),
    normal(B, length, case.num_kv_heads, value_width),
    normal(B, length, case.num_heads, value_width),
    segments,
  )


def _options(case: Case) -> dict[str, Any]:
  options: dict[str, Any] = {"scale": 0.2}
  if case.window:
    options["window"] = 40
  if case.soft_cap is not None:
    options["soft_cap"] = case.soft_cap
  return options


def _outputs(kernel: Any, options: dict[str, Any], inputs: _Inputs) -> dict[str, jax.Array]:
  """Returns the output, and the gradients of its sum weighted by dy."""
  q, k, v, dy_BTNH, segments_BT = inputs

  def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = kernel(q, k, v, segments_BT=segments_BT, **options)
    return (y.astype(jnp.float32) * dy_BTNH).sum(), y

  (dq, dk, dv), y = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
  wide = {"value": y, "dq": dq, "dk": dk, "dv": dv}
  return {name: x.astype(jnp.float32) for name, x in wide.items()}


def _reference(inputs: _Inputs, options: dict[str, Any]) -> dict[str, np.ndarray]:
  with jax.default_matmul_precision("highest"):
    run = jax.jit(functools.partial(_outputs, layers.xla, options))
    return jax.device_get(run(jax.device_put(inputs, jax.local_devices()[0])))


def _on_mesh(
  kernel: Any, inputs: _Inputs, options: dict[str, Any], devices: jax.sharding.Mesh, dtype: Any
) -> dict[str, np.ndarray]:
  def place(x: np.ndarray) -> jax.Array:
    return placed(x, mesh.sharding(devices, _DIMS[: x.ndim], x.shape))

  q, k, v, dy, segments = inputs
  q, k, v = (place(x.astype(dtype)) for x in (q, k, v))
  given: Any = (q, k, v, place(dy), None if segments is None else place(segments))
  exact = "highest" if jnp.dtype(dtype).itemsize == 4 else None
  with jax.set_mesh(devices), jax.default_matmul_precision(exact):
    return fetched(jax.jit(functools.partial(_outputs, kernel, options))(given))
