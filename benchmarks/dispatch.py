# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes to call a program of many arrays that computes next to nothing.

    python benchmarks/dispatch.py [--arrays=1,400,1200] [--repeats=200]

prints one JSON line for each number of arrays: the median milliseconds of a call of a program,
compiled ahead as the trainer does, that adds one to so many arrays of eight numbers in their place.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp


def measure(num_arrays: int, repeats: int) -> float:
  """Returns the median seconds of a call."""
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  state = {f"{number}": jax.device_put(jnp.ones(8), where) for number in range(num_arrays)}
  step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  program = step.lower(state).compile()
  taken = []
  for _ in range(repeats):
    jax.block_until_ready(state)
    began = time.perf_counter()
    state = program(state)
    taken.append(time.perf_counter() - began)
  return statistics.median(taken)


def main():
  parser = argparse.ArgumentParser(description="Measures calls.", allow_abbrev=False)
  parser.add_argument("--arrays", default="1,400,1200")
  parser.add_argument("--repeats", type=int, default=200)
  options = parser.parse_args()
  for text in options.arrays.split(","):
    seconds = measure(int(text), options.repeats)
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps({"arrays": int(text), "milliseconds": round(seconds * 1e3, 3), **facts}))


if __name__ == "__main__":
  main()
