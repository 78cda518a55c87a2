# SPDX-License-Identifier: Apache-2.0
"""Correctness and bandwidth of the collectives over each mesh axis."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.checks.check import FAIL, PASS, Check, fetched, guarded, is_cpu
from paxlike.devices.mesh import AXES
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer

ITEM = "collectives"
_REPEATS = 5


def collectives(trainer: Trainer) -> Iterator[Check]:
  """Yields a check per kind of collective and axis longer than 1."""
  devices = trainer.devices
  ici, dcn = trainer.mesh.sizes(devices.size)
  for axis in AXES:
    if devices.shape[axis] == 1:
      continue
    where = f"{axis} {devices.shape[axis]}"
    if dcn[axis] > 1:
      where += f" (ICI {ici[axis]} x DCN {dcn[axis]})"
    for kind in KINDS:
      label = f"{kind} over {where}"
      yield guarded(ITEM, label, functools.partial(_check, label, kind, axis, devices))


def _all_gather(x: jax.Array, axis: str, size: int) -> tuple[jax.Array, jax.Array]:
  return jax.lax.all_gather(x, axis, tiled=True), _numbers(0, size * x.size)


def _reduce_scatter(x: jax.Array, axis: str, size: int) -> tuple[jax.Array, jax.Array]:
  got = jax.lax.psum_scatter(x, axis, tiled=True)
  start = _start(jax.lax.axis_index(axis), got.size)
  exact: Any = sum(_numbers(_start(n, x.size) + start, got.size) for n in range(size))
  return got, exact


def _all_reduce(x: jax.Array, axis: str, size: int) -> tuple[jax.Array, jax.Array]:
  exact: Any = sum(_numbers(_start(n, x.size), x.size) for n in range(size))
  return jax.lax.psum(x, axis), exact


def _permute(x: jax.Array, axis: str, size: int) -> tuple[jax.Array, jax.Array]:
  got = jax.lax.ppermute(x, axis, [(n, (n + 1) % size) for n in range(size)])
  before = (jax.lax.axis_index(axis) - 1) % size
  return got, _numbers(_start(before, x.size), x.size)


# Name -> (function that returns its result and the exact result, number of devices -> least bytes
# that a device sends per byte of the operand).
KINDS: dict[str, tuple[Callable[..., Any], Callable[[int], float]]] = {
  "all-gather": (_all_gather, lambda n: n - 1),
  "reduce-scatter": (_reduce_scatter, lambda n: (n - 1) / n),
  "all-reduce": (_all_reduce, lambda n: 2 * (n - 1) / n),
  "permute": (_permute, lambda n: 1),
}


def _start(block: Any, size: int) -> Any:
  """Returns a number that equals block * size modulo 251; that product could overflow int32."""
  return block % 251 * (size % 251)


def _numbers(start: Any, count: int) -> jax.Array:
  """Returns `count` integers from `start` on, modulo 251; their sums are exact in float32."""
  return ((start + jnp.arange(count)) % 251).astype(jnp.float32)


def per_device(kind: str, size: int, *, most: int) -> int:
  """Returns the operand size per device, in numbers, for a collective over `size` devices.

  `most` bounds the operand and, for an all-gather, the result.
  """
  return most // size if kind == "all-gather" else most // size * size


def programs(kind: str, axis: str, devices: Any, count: int) -> tuple[Callable[..., Any], ...]:
  """Returns three jitted functions: () -> x, x -> result, x -> number of wrong entries."""
  size = devices.shape[axis]
  collective, _ = KINDS[kind]

  def on_mesh(function: Callable[..., Any], of: Any, to: Any) -> Any:
    return jax.jit(
      jax.shard_map(function, mesh=devices, in_specs=of, out_specs=to, check_vma=False)
    )

  def make() -> jax.Array:
    return _numbers(_start(jax.lax.axis_index(axis), count), count)

  def num_wrong(x: jax.Array) -> jax.Array:
    got, exact = collective(x, axis, size)
    return jax.lax.psum((got != exact).sum(), AXES)

  every = PartitionSpec(AXES)
  run = on_mesh(lambda x: collective(x, axis, size)[0], every, every)
  return on_mesh(make, (), every), run, on_mesh(num_wrong, every, PartitionSpec())


def _check(label: str, kind: str, axis: str, devices: jax.sharding.Mesh) -> Check:
  size = devices.shape[axis]
  count = per_device(kind, size, most=2**16 if is_cpu(devices) else 2**24)
  make, run, wrong = programs(kind, axis, devices, count)
  x = make()
  num_wrong = int(fetched(wrong(x)))
  jax.block_until_ready(run(x))
  began = time.perf_counter()
  for _ in range(_REPEATS):
    # One at a time: fake CPU devices in different collectives can deadlock.
    jax.block_until_ready(run(x))
  seconds = (time.perf_counter() - began) / _REPEATS
  _, share = KINDS[kind]
  return Check(
    item=ITEM,
    name=label,
    verdict=FAIL if num_wrong else PASS,
    figures={"GB/s a device": share(size) * count * 4 / seconds / 1e9},
    detail=f"{formatting.nbytes(count * 4)} per device"
    + (f"; {num_wrong} numbers are wrong" if num_wrong else ""),
  )
