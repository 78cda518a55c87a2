# SPDX-License-Identifier: Apache-2.0
"""Compares one training step of an experiment on the mesh with the same step on one device.

It compares the gradients that the optimizer receives, per weight and layer. In float32 it also
compares the optimizer's update with the same update on one device.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxlike import fiddlers, layers
from paxlike.checkpoints.array_names import flatten
from paxlike.checks.check import ABSENT, Check, all_guarded, fetched
from paxlike.checks.differences import FLOAT32, ITEM, ROUNDED, ROUTED, Step, compare
from paxlike.checks.trainers import (
  Build,
  has_low_precision,
  in_float32,
  not_sharded,
  on_one_device,
  trained,
)
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.layers import module
from paxlike.layers.attention.auto import Place
from paxlike.layers.module import WeightSpec
from paxlike.layers.precision.rounding import in_dtype
from paxlike.layers.stack import layout_of
from paxlike.training import train_state
from paxlike.training.optimizers import Optimizer, resolved
from paxlike.training.trainer import Trainer


def steps(graph: Any, build: Build, *, full: bool) -> Iterator[Check]:
  """Yields checks of a step in float32 and, if that differs, in the experiment's own precision."""
  size = "full size" if full else "shrunk"
  own = trained(graph, build, full=full)
  exact: Step | None = None  # The float32 step on one device; None if it failed.

  def check(label: str, graph: Any, is_exact: bool) -> list[Check]:
    nonlocal exact
    got, expected = _both(graph, build, is_exact, full)
    routed = any(fiddlers.select(graph, layers.Moe))
    limits = FLOAT32 if is_exact else ROUTED if routed else ROUNDED
    reference, exact = exact, expected if is_exact else exact
    may_be_same = own.devices.size == 1
    return compare(label, got, expected, limits, reference, may_be_same=may_be_same)

  label = f"float32, {size}"
  one = in_float32(graph)
  yield from all_guarded(ITEM, label, functools.partial(check, label, one, is_exact=True))
  if has_low_precision(own):
    label = f"own dtype, {size}"
    yield from all_guarded(ITEM, label, functools.partial(check, label, graph, is_exact=False))
  if not full and (lost := not_sharded(graph, build, own)):
    detail = f"sharded in the full model only: {', '.join(lost)}; --full compares them"
    yield Check(item=ITEM, name="sharding of the small model", verdict=ABSENT, detail=detail)


def _both(graph: Any, build: Build, is_exact: bool, full: bool) -> tuple[Step, Step]:
  """Returns the step on the mesh, and the step on one device."""
  trainer = trained(graph, build, full=full)
  alone = on_one_device(trainer, graph, build, full=full)
  data = batch_of(trainer, full=full)
  with jax.default_matmul_precision("highest" if is_exact else None):
    got = step_of(trainer, trainer.devices, data, with_update=is_exact)
    one = alone.mesh.build(jax.local_devices()[:1])
    return got, step_of(alone, one, data)


def batch_of(trainer: Trainer, *, full: bool) -> dict[str, np.ndarray]:
  """Returns a global batch: of the data if `full`, else random tokens of the same shape.

  Raises:
    UserError: The data cannot be read.
  """
  size, data = trainer.batch_size, trainer.data
  if full:
    data.check()
    with data.batches(size, rows=np.arange(size), state=None) as batches:
      return dict(next(batches).arrays)
  random = np.random.default_rng(0)
  length, most = data.seq_len, trainer.model.vocab_size
  shape = (size, length)
  tokens = random.integers(0, most, (size, length + 1)).astype(np.int32)
  given: dict[str, Any] = {
    n: np.zeros((size, *x.shape[1:]), x.dtype) for n, x in data.no_rows().items()
  }
  given |= {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
  given["weights"] = (random.random(shape) < 0.9).astype(np.float32)
  if "segments" in given:
    # Two segments per sequence, as in preference pairs.
    first = random.integers(length // 4, length // 2, (size, 1))
    places = np.arange(length)[None]
    given["segments"] = (1 + (places >= first)).astype(np.int32)
    if "positions" in given:
      given["positions"] = np.where(places >= first, places - first, places).astype(np.int32)
  return given


def step_of(
  trainer: Trainer,
  devices: jax.sharding.Mesh,
  data: dict[str, np.ndarray],
  *,
  with_update: bool = False,
) -> Step:
  """Runs the compiled step of a trainer once, from initial weights.

  `with_update` also computes the errors of the optimizer's update.
  """
  own = trainer.optimizer
  trainer = dataclasses.replace(trainer, optimizer=recording(own))
  _draw_adapters(trainer)
  placer = BatchPlacer(
    devices,
    batch_size=len(data["inputs"]),
    seq_len=data["inputs"].shape[1],
    max_segments=trainer.model.max_segments(Place.on(devices)),
  )
  with jax.set_mesh(devices):
    state = first_state(trainer, devices)
    before = fetched(state.params) if with_update else {}
    batch = placer.put({name: x[placer.rows] for name, x in data.items()})
    state, metrics = trainer.compile(state, batch)(state, batch)
    values = {name: fetched(metrics[name]) for name in ("loss", "grad_norm")}
    gradients = fetched(state.opt_state["gradients"])
    changed = state.params | state.extra
    others = fetched({name: x for name, x in changed.items() if name not in gradients})
    after = fetched({name: changed[name] for name in gradients}) if with_update else {}
    moments = fetched(state.opt_state["optimizer"]) if with_update else {}
  update = {}
  if with_update:
    old = {name: before[name] for name in gradients}
    update = _errors_of_update(trainer, own, old, gradients, (after, moments))
  loss, norm = (float(total / weight) for total, weight in values.values())
  return Step(loss, norm, _by_layer(trainer, gradients), _by_layer(trainer, others), update)


def _draw_adapters(trainer: Trainer):
  """Initializes LoRA's b matrices with noise: with zeros, the a matrices would get no gradient."""
  small = functools.partial(layers.gaussian, std=0.1)
  for name, spec in trainer.definition.weights.items():
    if re.search(layers.lora.WEIGHTS, name) and spec.init is module.zeros:
      trainer.definition.weights[name] = dataclasses.replace(spec, init=small)


def _by_layer(trainer: Trainer, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns arrays by their names in the unrolled layout."""
  layout = layout_of(trainer.definition.module)
  by_layer: dict[str, np.ndarray] = {}
  for name, array in arrays.items():
    location = layout.locate(name)
    held = zip(location.indexes, location.layers, strict=True) if location else ((0, 0),)
    for index, layer in held:
      of_layer = name if location is None else location.template.format(f"layers.{layer}")
      stacked = location is not None and location.stacked
      by_layer[of_layer] = np.asarray(array[index] if stacked else array)
  return by_layer


def _errors_of_update(
  trainer: Trainer, optimizer: Optimizer, old: Any, gradients: Any, got: tuple[Any, Any]
) -> dict[str, float]:
  """Returns the errors of new weights and moments against the same update on one device.

  A weight's error is relative to its change.
  """
  transform = optimizer.transformation(trainer.definition)

  def update(old: Any, gradients: Any) -> tuple[Any, Any]:
    updates: Any
    updates, moments = transform.update(gradients, transform.init(old), old)
    draw = jnp.zeros((), jnp.int32)
    new = {
      name: in_dtype(w.astype(jnp.float32) + updates[name], w.dtype, draw=draw)
      for name, w in old.items()
    }
    if optimizer.observe is not None:
      seen = {name: w.astype(jnp.float32) for name, w in new.items()}
      moments = optimizer.observe(moments, seen, draw)
    return new, moments

  arguments = jax.device_put((old, gradients), jax.local_devices()[0])
  compiled = jax.jit(update).lower(*arguments).compile(dict(trainer.execution.compiler_options))
  new, moments = jax.device_get(compiled(*arguments))

  def error(a: Any, b: Any, of: Any) -> float:
    a, b, of = (np.asarray(x, np.float64) for x in (a, b, of))
    least = 1e-3 * float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(of)), least, 1e-30)

  found = {
    name: error(got[0][name], w, w.astype(np.float64) - old[name]) for name, w in new.items()
  }
  ours, exact = flatten(got[1]), flatten(moments)
  return found | {f"optimizer.{name}": error(ours[name], x, x) for name, x in exact.items()}


def first_state(trainer: Trainer, devices: jax.sharding.Mesh) -> Any:
  """Returns the initial state, with newly initialized weights."""
  state = train_state.create(trainer.definition, trainer.optimizer, devices, seed=trainer.seed)
  if (definition := trainer.reference) is not None:
    weights = state.weights
    if definition is not trainer.definition:  # A teacher.
      weights = train_state.init_params(definition, devices, seed=trainer.seed)
    # Copies, because the step donates the state's arrays.
    reference = jax.tree.map(jnp.copy, definition.prepare(weights))
    state = dataclasses.replace(state, reference=reference)
  return state


def recording(optimizer: Optimizer) -> Optimizer:
  """Returns an optimizer that also stores its incoming gradients in its state."""

  def transform(weights: Mapping[str, WeightSpec]) -> optax.GradientTransformation:
    inner = resolved(optimizer.transform, weights)

    def init(params: Any) -> Any:
      zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
      return {"gradients": zeros, "optimizer": inner.init(params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      new_updates, new = inner.update(updates, state["optimizer"], params)
      return new_updates, {"gradients": updates, "optimizer": new}

    return optax.GradientTransformation(init, update)

  def observe(state: Any, new: Any, updates: jax.Array) -> Any:
    if optimizer.observe is None:
      return state
    return state | {"optimizer": optimizer.observe(state["optimizer"], new, updates)}

  return dataclasses.replace(optimizer, transform=transform, observe=observe)
