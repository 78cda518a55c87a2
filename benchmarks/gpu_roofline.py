# SPDX-License-Identifier: Apache-2.0
"""What the device of benchmarks/gpu.py reaches: products in bf16 and FP8, and a copy.

A product is of two 8192 x 8192 matrices of random numbers (zeros draw less power, and run faster);
the copy reads and writes 4 GiB. On a CPU all is small.
"""

import functools
from collections.abc import Callable
from typing import Any

import gpu_timing
import jax
import jax.numpy as jnp

from paxlike.devices import xla_flags


def main():
  task = gpu_timing.task()
  size, length = (8192, 2**31) if task.gpu else (256, 2**20)
  options, _ = xla_flags.options()
  compiled = functools.partial(_compiled, options)
  a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
  small = (a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn))
  flat = jax.jit(lambda: jax.lax.iota(jnp.bfloat16, length) * 0.5)()
  rates, groups = {}, {}
  for name, function, arguments, work in (
    ("bf16_flops", product, (a, b), 2 * size**3),
    ("fp8_flops", product, small, 2 * size**3),
    ("copy_bytes", lambda x: x + 1, (flat,), 2 * flat.nbytes),
  ):
    run = Repeated(compiled(function, *arguments), arguments)
    times = gpu_timing.measure(run.step, run.wait, task)
    groups[name] = times.groups
    rates[name] = work / sorted(times.groups)[len(times.groups) // 2]
  warnings = []
  if task.gpu and "$f8" not in (compiled(product, *small).as_text() or ""):
    warnings.append("the product in 8 bits is not cuBLAS's")
  gpu_timing.tell(
    rates=rates,
    groups=groups,
    device=jax.devices()[0].device_kind,
    before=times.before,
    after=times.after,
    versions={"jax": jax.__version__},
    warnings=warnings,
  )


def product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a times b transposed, the one order that cuBLAS has for FP8, in bf16."""
  return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _compiled(options: dict[str, Any], function: Callable, *arguments: Any) -> jax.stages.Compiled:
  return jax.jit(function).lower(*arguments).compile(compiler_options=options)


class Repeated:
  """One program, run over and over on the same arrays."""

  def __init__(self, program: Callable, arguments: tuple[jax.Array, ...]):
    self._program, self._arguments = program, arguments
    self._result: Any = None

  def step(self):
    """Begins a run."""
    self._result = self._program(*self._arguments)

  def wait(self):
    """Waits for the last run."""
    jax.block_until_ready(self._result)


if __name__ == "__main__":
  main()
