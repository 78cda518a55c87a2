# SPDX-License-Identifier: Apache-2.0
"""A step of a layer of experts beside that of a dense layer with as many active FLOPs.

    python benchmarks/moe.py [--experts=8] [--chosen=2] [--dim=256] [--hidden=512] [--tokens=2048]
        [--dtype=float32] [--cores=N]

Prints one JSON line. A step is the gradient of weights and input; the two take turns. With several
cores, the many small matmuls of experts take more CPU-seconds.
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike import layers
from paxlike.devices import jax_setup
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.module import Definition, Module
from paxlike.training import train_state


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  sizes = {"experts": 8, "chosen": 2, "dim": 256, "hidden": 512, "tokens": 2048, "repeats": 20}
  for name, size in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=size)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--cores", type=int, help="that may be used (default all)")
  options = parser.parse_args()
  if options.cores:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
  jax_setup.set_up()  # The program's allocator.
  dtype = jnp.dtype(options.dtype)
  linear = functools.partial(layers.Linear, role="", dtype=dtype)
  expert = functools.partial(layers.ExpertLinear, role="", dtype=dtype)
  moe = functools.partial(
    layers.Moe,
    options.dim,
    num_experts=options.experts,
    num_chosen=options.chosen,
    router=functools.partial(layers.Linear, role=""),
    experts=functools.partial(
      layers.Experts,
      hidden_dim=options.hidden,
      up=expert,
      gate=expert,
      down=expert,
      activation=layers.swiglu,
    ),
  )
  dense = layers.Mlp(
    options.dim,
    hidden_dim=options.chosen * options.hidden,
    up=linear,
    gate=linear,
    down=linear,
    activation=layers.swiglu,
  )
  capacity = layers.dispatch.Capacity(factor=1.25)
  sides = {
    name: step(module, options.tokens, options.dim, dtype)
    for name, module in (
      ("dense", dense),
      ("dropless", moe()),
      ("capacity", moe(dispatch=capacity)),
    )
  }
  times = {name: [] for name in sides}
  for _ in range(options.repeats):
    for name, run in sides.items():
      began = time.process_time()
      run()
      times[name].append(time.process_time() - began)
  report: dict[str, Any] = {"benchmark": "moe", "jax": jax.__version__, **vars(options)}
  for name, seconds in times.items():
    ratios = [a / b for a, b in zip(seconds, times["dense"], strict=True)]
    report[f"{name}_cpu_seconds"] = round(statistics.median(seconds), 5)
    report[f"{name}_ratio"] = round(statistics.median(ratios), 3)
  print(json.dumps(report))


def step(module: Module, num_tokens: int, dim: int, dtype: Any) -> Callable[[], None]:
  """Returns a function that computes all gradients once; it has run once already."""
  definition = Definition(module)
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  params = train_state.init_params(definition, mesh, seed=0)
  x_BTD = jax.random.normal(jax.random.key(1), (8, num_tokens // 8, dim), dtype)

  def loss(params: Any, x_BTD: jax.Array) -> jax.Array:
    y_BTD, _ = definition.bind(params)(x_BTD)
    return jnp.square(y_BTD.astype(jnp.float32)).sum()

  gradient = jax.jit(jax.grad(loss, (0, 1)))

  def run():
    jax.block_until_ready(gradient(params, x_BTD))

  run()
  return run


if __name__ == "__main__":
  main()
