# SPDX-License-Identifier: Apache-2.0
"""One training step of an experiment on the mesh against the same step on one device.

The gradients are those that the optimizer is given, of every weight and layer.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxlike import fiddlers, layers, mesh, train_state
from paxlike.checks.check import FAIL, PASS, Check, fetched, guarded, is_cpu
from paxlike.feed import Feed
from paxlike.layers.auto_attention import Place
from paxlike.layers.stack import layout_of
from paxlike.mesh import MeshSpec
from paxlike.optimizers import Optimizer
from paxlike.trainer import Trainer

ITEM = "training step"


class Limits(NamedTuple):
  """What rounding explains.

  Attributes:
    tolerance: Of the loss and the norm, relative to them, and of the norm of each gradient's error.
    floor: A gradient counts as no smaller than this share of the root mean square of all: some, as
      those of the biases of keys, are zero but for rounding.
  """

  tolerance: float
  floor: float


# Sums in another order; and all that is rounded to fewer bits on the way. Where that has routers
# choose other experts, it is more: see `_allowed`.
FLOAT32, OWN = Limits(2e-4, 1e-2), Limits(0.1, 0.1)
# For programs that run once, and are small: of a CPU's, most of the time would be compilation.
_QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Build = Callable[[Any], Trainer]


class Step(NamedTuple):
  """The results of a step; gradients by the name of a weight, and layer by layer."""

  loss: float
  norm: float
  gradients: dict[str, np.ndarray]


def steps(graph: Any, build: Build, *, full: bool) -> Iterator[Check]:
  """Yields a check in float32 and, where it differs, one in the experiment's own dtype."""
  size = "full size" if full else "shrunk"
  own = trained(graph, build, full=full)
  exact_graph = in_float32(graph)
  references: list[Step] = []

  def check(label: str, graph: Any, limits: Limits) -> Check:
    got, expected = _both(graph, build, limits, full)
    references.append(expected)
    exact = references[0] if len(references) > 1 else None
    return compare(label, got, expected, limits, exact)

  for name, one, limits in (("float32", exact_graph, FLOAT32), ("own dtype", graph, OWN)):
    if limits is FLOAT32 or is_rounded(own):
      label = f"{name}, {size}"
      yield guarded(ITEM, label, functools.partial(check, label, one, limits))


def is_rounded(trainer: Trainer) -> bool:
  """Returns whether a model computes in anything but float32."""
  definition = trainer.definition
  if any(spec.rounding is not None for spec in definition.weights.values()):
    return True
  abstract = {
    n: jax.ShapeDtypeStruct(s.shape, s.stored_dtype) for n, s in definition.weights.items()
  }
  prepared = jax.eval_shape(definition.prepare, abstract)
  return any(x.dtype != jnp.float32 for x in jax.tree.leaves(prepared))


def in_float32(graph: Any) -> Any:
  """Returns a copy of a graph that computes in float32, with kernels that can."""
  graph = copy.deepcopy(graph)
  fiddlers.precision(graph, "float32")
  for kind in (layers.Linear, layers.ExpertLinear):
    for node in fiddlers.select(graph, kind):
      node.dot = None
  for kind in (layers.Attention, layers.LatentAttention):
    for node in fiddlers.select(graph, kind):
      kernel = getattr(node, "kernel", None)
      made = getattr(kernel, "__fn_or_cls__", kernel)
      if made in (layers.cudnn, layers.tokamax):  # They are for 16 bits.
        fiddlers.attention(graph, "auto")
  return graph


def trained(graph: Any, build: Build, *, full: bool) -> Trainer:
  """Returns the trainer of a graph; unless in full, that of a small model with a small batch."""
  graph = copy.deepcopy(graph)
  if full:
    return build(graph)
  _shrink(graph)
  trainer = build(graph)
  stack: Any = trainer.model.stack
  parts = mesh.batch_shards(trainer.devices) * trainer.accumulation_steps
  parts *= 1 if stack.pipeline is None else stack.pipeline.microbatches
  trainer.percore_batch_size = 2 * parts / trainer.devices.size
  if is_cpu(trainer.devices):
    trainer.compiler_options = _QUICKLY_COMPILED
  return trainer


def _shrink(graph: Any):
  fiddlers.shrink(graph)
  for kind in (layers.Linear, layers.ExpertLinear):
    for node in fiddlers.select(graph, kind):
      # With weights as small as those of large models, attention would hardly depend on its keys.
      node.init = layers.gaussian_fan_in


def on_one_device(graph: Any, build: Build, *, full: bool) -> Trainer:
  """Returns a trainer of the same model without a mesh: plain attention, no pipeline.

  A small model is unrolled too. The microbatches of a pipeline are accumulated, as the losses of
  routers depend on them.
  """
  trainer = trained(graph, build, full=full)
  pipeline: Any = trainer.model.stack.pipeline  # pyright: ignore[reportAttributeAccessIssue]
  graph = copy.deepcopy(graph)
  fiddlers.attention(graph, "xla")
  for node in fiddlers.select(graph, layers.Stack):
    node.pipeline = None
  if not full:
    fiddlers.stack(graph, scan=False)
  alone = trained(graph, build, full=full)
  alone.percore_batch_size = trainer.batch_size
  alone.accumulation_steps *= 1 if pipeline is None else pipeline.microbatches
  alone.mesh = MeshSpec(ici=(1, 1, 1))
  # Nobody looks at its update.
  alone.optimizer = Optimizer(optax.set_to_zero(), alone.optimizer.learning_rate)
  return alone


def _both(graph: Any, build: Build, limits: Limits, full: bool) -> tuple[Step, Step]:
  """Returns the step on the mesh, and the one on one device."""
  trainer = trained(graph, build, full=full)
  alone = on_one_device(graph, build, full=full)
  data = batch_of(trainer, full=full)
  precise = "highest" if limits is FLOAT32 else None
  with jax.default_matmul_precision(precise):
    got = step_of(trainer, trainer.devices, data)
    one = alone.mesh.build(jax.local_devices()[:1])
    return got, step_of(alone, one, data)


def compare(
  label: str, got: Step, expected: Step, limits: Limits, exact: Step | None = None
) -> Check:
  """Returns the check that loss, norm and every gradient are the same.

  Args:
    label: The name of the check.
    got: On the mesh.
    expected: On one device.
    limits: What rounding explains.
    exact: On one device in float32, where the others are in fewer bits.
  """
  tolerance, floor = limits
  errors = _errors(got, expected, floor)
  allowed = dict.fromkeys(errors, tolerance)
  if exact is not None:
    allowed = _allowed(_errors(expected, exact, floor), tolerance)
  worst = max(errors, key=lambda name: np.nan_to_num(errors[name] / allowed[name], nan=np.inf))
  loss, norm = (
    abs(a - b) / max(abs(b), 1e-30)
    for a, b in ((got.loss, expected.loss), (got.norm, expected.norm))
  )
  wrong = [name for name, error in errors.items() if not error <= allowed[name]]
  same = got.gradients.keys() == expected.gradients.keys()
  passed = same and not wrong and loss <= tolerance and norm <= tolerance
  detail = f"worst of {len(errors)} gradients: {worst}"
  if wrong:
    detail += f" ({len(wrong)} wrong)"
  detail += f"; loss {got.loss:.6g}, on one device {expected.loss:.6g}"
  detail += f"; grad norm {got.norm:.6g}, on one device {expected.norm:.6g}"
  return Check(
    item=ITEM,
    name=label,
    verdict=PASS if passed else FAIL,
    figures={
      "loss": loss,
      "grad norm": norm,
      "worst gradient": errors[worst],
      "tolerance": allowed[worst],
    },
    detail=detail,
  )


def _errors(got: Step, expected: Step, floor: float) -> dict[str, float]:
  """Returns the norm of the difference of each gradient, relative to that of `expected`."""
  mean = np.sqrt(
    sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.gradients.values())
    / sum(g.size for g in expected.gradients.values())
  )
  return {
    name: float(np.linalg.norm(got.gradients.get(name, np.nan) - exact))
    / max(float(np.linalg.norm(exact)), floor * mean * exact.size**0.5, 1e-30)
    for name, exact in expected.gradients.items()
  }


def _allowed(rounding: dict[str, float], tolerance: float) -> dict[str, float]:
  """Returns the tolerance of each gradient where rounding alone costs so much on one device.

  Two steps that are rounded differently may be twice that apart. Half of a gradient is never
  explained by rounding.
  """
  return {name: min(max(tolerance, 2 * error), 0.5) for name, error in rounding.items()}


def batch_of(trainer: Trainer, *, full: bool) -> dict[str, np.ndarray]:
  """Returns a whole batch: of the data if in full, else random tokens of the same form.

  Raises:
    UserError: The data cannot be read.
  """
  size, data = trainer.batch_size, trainer.train_data
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
    # Two documents a row, as pairs of answers have them.
    first = random.integers(length // 4, length // 2, (size, 1))
    places = np.arange(length)[None]
    given["segments"] = (1 + (places >= first)).astype(np.int32)
    if "positions" in given:
      given["positions"] = np.where(places >= first, places - first, places).astype(np.int32)
  return given


def step_of(trainer: Trainer, devices: jax.sharding.Mesh, data: dict[str, np.ndarray]) -> Step:
  """Runs the compiled step of a trainer, once, from its first weights."""
  trainer = dataclasses.replace(trainer, optimizer=recording(trainer.optimizer))
  definition = trainer.definition
  feed = Feed(
    devices,
    batch_size=len(data["inputs"]),
    seq_len=data["inputs"].shape[1],
    max_segments=trainer.model.max_segments(Place.on(devices)),
  )
  with jax.set_mesh(devices):
    state = first_state(trainer, devices)
    batch = feed.put({name: x[feed.rows] for name, x in data.items()})
    state, metrics = trainer.compile(state, batch)(state, batch)
    values = {name: fetched(metrics[name]) for name in ("loss", "grad_norm")}
    gradients = fetched(state.opt_state["gradients"])
  layout = layout_of(definition.module)
  by_layer: dict[str, Any] = {}
  for name, gradient in gradients.items():
    location = layout.locate(name)
    for index, layer in enumerate(location.layers if location else (0,)):
      of_layer = name if location is None else location.template.format(f"layers.{layer}")
      stacked = location is not None and location.stacked
      by_layer[of_layer] = np.asarray(gradient[index] if stacked else gradient)
  loss, norm = (float(total / weight) for total, weight in values.values())
  return Step(loss, norm, by_layer)


def first_state(trainer: Trainer, devices: jax.sharding.Mesh) -> Any:
  """Returns the state before the first step, of weights that are drawn."""
  state = train_state.create(trainer.definition, trainer.optimizer, devices, seed=trainer.seed)
  if trainer.has_reference:
    # Arrays of their own, as the step is given the others to reuse.
    reference = jax.tree.map(jnp.copy, trainer.definition.prepare(state.weights))
    state = dataclasses.replace(state, reference=reference)
  return state


def recording(optimizer: Optimizer) -> Optimizer:
  """Returns an optimizer that also keeps the gradients that it is given."""
  inner = optimizer.transform

  def init(params: Any) -> Any:
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
    return {"gradients": zeros, "optimizer": inner.init(params)}

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    new_updates, new = inner.update(updates, state["optimizer"], params)
    return new_updates, {"gradients": updates, "optimizer": new}

  transform = optax.GradientTransformation(init, update)
  return dataclasses.replace(optimizer, transform=transform)
