# SPDX-License-Identifier: Apache-2.0
"""Forms of the gradient of a weight, x.T y, on a CPU, beside PyTorch's.

    python benchmarks/weight_gradients.py [--dtype=float32] [--repeats=30]

One core is used. Prints a line for each size: GFLOP per CPU-second of the fastest of all turns,
since a machine that others use is only ever slower. `ours` is what a train step computes; the
others are what it chooses from. "first" is the first operand of the product, whose rows are
contracted.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from paxlike.layers.precision import cpu_dots

# Tokens, width of x, width of y.
SIZES = (
  (2048, 256, 1024),
  (2048, 1024, 256),
  (2048, 512, 2048),
  (2048, 2048, 512),
  (2048, 768, 3072),
  (2048, 3072, 768),
  (512, 256, 8192),
)


def untransposed(first_MD: jax.Array, second_MF: jax.Array) -> jax.Array:
  return jax.lax.optimization_barrier(first_MD.T @ second_MF)


def transposed(first_MD: jax.Array, second_MF: jax.Array) -> jax.Array:
  first_DM = cpu_dots.transposed(first_MD)
  return jax.lax.optimization_barrier(cpu_dots.dot(first_DM, second_MF, -2))


FORMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "ours": cpu_dots.dot_of_rows,
  "x first": untransposed,
  "x first, transposed": transposed,
  "y first": lambda x, y: untransposed(y, x).T,
  "y first, transposed": lambda x, y: transposed(y, x).T,
}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--repeats", type=int, default=30)
  options = parser.parse_args()
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
  torch.set_num_threads(1)
  for num_tokens, D, F in SIZES:
    random: Any = np.random.default_rng(0)
    arrays = [np.asarray(random.normal(size=(num_tokens, n)), np.float32) for n in (D, F)]
    x, y = (jnp.asarray(one, options.dtype) for one in arrays)
    of_torch = [torch.tensor(one, dtype=getattr(torch, options.dtype)) for one in arrays]
    sides: dict[str, Callable[[], Any]] = {
      name: waited_for(jax.jit(form), x, y) for name, form in FORMS.items()
    }
    sides["PyTorch"] = lambda x=of_torch[0], y=of_torch[1]: x.T @ y
    best = fastest(sides, options.repeats)
    rates = (f"{name} {2e-9 * num_tokens * D * F / best[name]:.0f}" for name in sides)
    print(f"{num_tokens} tokens, {D} x {F}:", "; ".join(rates), flush=True)


def waited_for(function: Any, *arrays: Any) -> Callable[[], Any]:
  return lambda: jax.block_until_ready(function(*arrays))


def fastest(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
  """Returns the fewest CPU-seconds of each side; they take turns, after a first one."""
  best = dict.fromkeys(sides, float("inf"))
  for turn in range(repeats + 1):
    for name, run in sides.items():
      began = time.process_time()
      run()
      if turn:
        best[name] = min(best[name], time.process_time() - began)
  return best


if __name__ == "__main__":
  main()
