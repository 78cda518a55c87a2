# SPDX-License-Identifier: Apache-2.0
"""The peak rates of this machine's CPU, measured, since there are no data sheets of CPUs here."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.devices.chips import Chip
from paxlike.devices.kernel_rates import KernelRates

# A matmul of 2 x 1024^3 FLOPs; an array that no cache holds.
_WIDTH, _NBYTES = 1024, 2**28
_REPEATS = 20


def measure(num_devices: int) -> tuple[Chip, KernelRates]:
  """Returns the rates of one of `num_devices` CPU devices that share this machine.

  The peak FLOP/s are those of a float32 matmul, the bandwidth that of adding 1 to a large array
  (bytes read and written). Each is the best of some runs. Kernels have no launch time.
  """
  device = jax.local_devices()[0]
  with jax.default_device(device):
    f32, bf16 = (_flops(dtype) for dtype in (jnp.float32, jnp.bfloat16))
    x = jnp.zeros(_NBYTES // 4, jnp.float32)
    bandwidth = 2 * _NBYTES / _best(jax.jit(lambda x: x + 1, donate_argnums=0), x, donated=True)
  ratio = bf16 / f32
  chip = Chip(f32 / num_devices, bandwidth=bandwidth / num_devices, int8=1)
  return chip, KernelRates(matmul=ratio, matmul_8_bits=ratio)


def _flops(dtype: Any) -> float:
  x = jnp.ones((_WIDTH, _WIDTH), dtype)
  return 2 * _WIDTH**3 / _best(jax.jit(jnp.dot), x, x)


def _best(function: Callable[..., jax.Array], *args: jax.Array, donated: bool = False) -> float:
  """Returns the shortest time of some runs in seconds, after one that compiles."""
  seconds = []
  result = function(*args).block_until_ready()
  for _ in range(_REPEATS):
    args = (result,) if donated else args
    began = time.perf_counter()
    result = function(*args).block_until_ready()
    seconds.append(time.perf_counter() - began)
  return min(seconds)
