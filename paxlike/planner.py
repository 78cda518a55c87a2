# SPDX-License-Identifier: Apache-2.0
"""Finds out how to spread a model over devices: what fits, and what takes the least time.

All meshes whose sizes divide what they cut are tried, with each remat policy, each number of parts
of the batch, and each pipeline. What `memory_model` says does not fit is left out, the rest ranked
by `cost_model`, the best of each mesh kept. Not tried are:

- the axis context; tensor and expert across slices or nodes, whose networks are too slow for them;
- gpipe and circular, which take as long as 1f1b and interleaved_1f1b and never hold less;
- accumulation together with a pipeline, whose microbatches are parts of the batch already;
- of one mesh and policy, more accumulation than it needs to fit: it takes only longer.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from paxlike import aot, cost_model, memory_model, mesh, model_sizes, networks, requirements
from paxlike.configuration import Configuration
from paxlike.cost_model import Machine, Times
from paxlike.errors import UserError
from paxlike.layers.pipeline import Pipeline
from paxlike.layers.remat import Remat
from paxlike.memory_model import Memory
from paxlike.mesh import AXES
from paxlike.model_sizes import ModelSizes
from paxlike.objectives import NextToken
from paxlike.trainer import Trainer

# Of what programs have of a device's memory, the share that predictions may take: they are up to
# so much too low.
ROOM = 0.9
# Knobs that a plan sets, and users do not.
CHOSEN = (
  "ICI_MESH_SHAPE",
  "DCN_MESH_SHAPE",
  "CHECKPOINT_POLICY",
  "GRADIENT_ACCUMULATION_STEPS",
  "NUM_STAGES",
  "NUM_VIRTUAL_STAGES",
  "CIRCULAR_REPEAT",
  "NUM_MICROBATCHES",
  "PIPELINE_SCHEDULE",
  "PIPELINE_RECOMPUTE",
)
# Policies that differ: with attention by a kernel, SAVE_DOT_ONLY saves what the second one does.
_REMATS = (Remat.SAVE_EVERYTHING, Remat.SAVE_DOT_WITH_NO_BATCH_DIM, Remat.SAVE_NOTHING)
_ACROSS = ("pipeline", "data", "fsdp")
_MOST_MICROBATCHES = 32  # For each stage: then bubbles are below 3 %.

# Knobs -> the run that they make of an experiment.
Build = Callable[[Mapping[str, Any]], Trainer]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration and what is predicted of it; what its program holds, once it is compiled."""

  how: Configuration
  memory: Memory
  times: Times
  compiled: aot.Held | None = None
  fits: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plans:
  """What was found.

  Attributes:
    model: What is trained.
    machine: On what.
    device_kind: What JAX calls that.
    num_devices: How many there are.
    batch: Sequences of a step.
    considered: Configurations that were tried.
    fitting: Of them, those that fit.
    best: The best of each mesh, the fastest first.
    nearest: What holds the least.
  """

  model: ModelSizes
  machine: Machine
  device_kind: str
  num_devices: int
  batch: int
  considered: int
  fitting: int
  best: tuple[Plan, ...]
  nearest: Plan

  @property
  def first(self) -> Plan | None:
    """The fastest that is not known not to fit."""
    return next((plan for plan in self.best if plan.fits), None)

  def mfu(self, plan: Plan, *, causal: bool = False) -> float:
    """Returns the share of the chips' FLOP/s that is the model's, of attention over all pairs."""
    flops = self.model.flops.causal if causal else self.model.flops.full
    rate = self.batch * self.model.seq_len * flops / plan.times.total
    return rate / self.num_devices / self.machine.chip.flops

  def tokens_per_second(self, plan: Plan) -> float:
    """Returns the tokens that all devices train on in a second."""
    return self.batch * self.model.seq_len / plan.times.total


def find(build: Build, devices: list[Any], *, batch: int | None = None) -> Plans:
  """Ranks the ways to train an experiment on devices.

  Args:
    build: Of the experiment.
    devices: Which may be only named.
    batch: Sequences of a step; None: as many as the experiment says.

  Raises:
    UserError: Too little is known of the devices, or no mesh of them can share such a batch.
  """
  kind = devices[0].device_kind
  machine = cost_model.machine(kind)
  if machine is None:
    raise UserError(
      f"--mode=plan knows too little of {kind}: give a --topology such as v5e-256 or h100-64."
    )
  within = _within(devices)
  shape = (within, len(devices) // within)
  trainer = build(_plain(shape))
  requirements.check(trainer.model, devices)
  if trainer.train_data is None:
    raise UserError("this experiment has no training data: there is nothing to plan.")
  if batch is None:
    batch = mesh.global_batch_size(percore=trainer.percore_batch_size, num_devices=len(devices))
  model = model_sizes.of_definition(
    trainer.definition,
    trainer.optimizer,
    seq_len=trainer.data.seq_len,
    with_reference=trainer.has_reference,
  )
  if not isinstance(trainer.objective, NextToken):
    model = dataclasses.replace(model, repeats=0)
  return rank(model, machine, shape, kind, batch)


def rank(
  model: ModelSizes, machine: Machine, shape: tuple[int, int], kind: str, batch: int
) -> Plans:
  """Ranks the ways to train a model: see `find`; `shape` is devices of a slice or node, and these.

  Raises:
    UserError: No mesh can share such a batch.
  """
  room = ROOM * machine.chip.room
  best: list[Plan] = []
  nearest: Plan | None = None
  considered = fitting = 0
  for ici, dcn in meshes(model, shape):
    found: Plan | None = None
    for series in configurations(model, ici, dcn, batch):
      for how in series:
        considered += 1
        memory = memory_model.of(model, how, machine.network)
        if nearest is None or memory.total < nearest.memory.total:
          nearest = Plan(how, memory, Times(), fits=False)
        if memory.total > room:
          continue
        fitting += 1
        plan = Plan(how, memory, cost_model.of(model, how, machine))
        if found is None or _order(plan) < _order(found):
          found = plan
        break
    best += [found] if found is not None else []
  if nearest is None:
    raise UserError(
      f"no mesh of {math.prod(shape)} devices can share a batch of {batch} sequences: the axes"
      " data, fsdp and expert cut it, and tensor and pipeline only what heads and layers allow."
      " Change --global_batch."
    )
  nearest = dataclasses.replace(nearest, times=cost_model.of(model, nearest.how, machine))
  return Plans(
    model=model,
    machine=machine,
    device_kind=kind,
    num_devices=math.prod(shape),
    batch=batch,
    considered=considered,
    fitting=fitting,
    best=tuple(sorted(best, key=_order)),
    nearest=nearest,
  )


def confirmed(plans: Plans, build: Build, count: int) -> Plans:
  """Returns the plans with what the programs of the best `count` hold, which takes minutes."""
  best = list(plans.best)
  for place, plan in enumerate(best[:count]):
    program = aot.compile_step(build(plan.how.knobs))
    best[place] = dataclasses.replace(plan, compiled=program.held, fits=program.fits)
    del program
    jax.clear_caches()
  return dataclasses.replace(plans, best=tuple(best))


def _order(plan: Plan) -> tuple[float, float]:
  return plan.times.total, plan.memory.total


def _within(devices: list[Any]) -> int:
  """Returns how many devices the fast network joins: a slice, or a node of GPUs."""
  slices = {getattr(device, "slice_index", None) for device in devices}
  network = networks.find(devices[0].device_kind)
  if devices[0].platform == "tpu" or (network is not None and network.across_nodes):
    return len(devices) // len(slices)
  nodes = {device.process_index for device in devices}
  return len(devices) // max(len(slices), len(nodes))


def _plain(shape: tuple[int, int]) -> dict[str, Any]:
  """Returns the knobs of a mesh that any model can have, with the experiment's own batch."""
  ici, dcn = (tuple(size if axis == "fsdp" else 1 for axis in AXES) for size in shape)
  knobs = Configuration(ici=ici, dcn=dcn, batch=math.prod(shape)).knobs
  return {name: value for name, value in knobs.items() if name != "PERCORE_BATCH_SIZE"}


def meshes(
  model: ModelSizes, shape: tuple[int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """Yields the sizes of axes, within and across slices or nodes, that divide what they cut."""
  axes = [axis for axis in AXES if axis != "context"]
  across = list(_factored(shape[1], _ACROSS))
  for ici in _factored(shape[0], axes):
    for dcn in across:
      sizes = {axis: ici.get(axis, 1) * dcn.get(axis, 1) for axis in AXES}
      if _allows(model, sizes):
        yield tuple(ici.get(axis, 1) for axis in AXES), tuple(dcn.get(axis, 1) for axis in AXES)


def _factored(size: int, axes: Iterable[str]) -> Iterator[dict[str, int]]:
  """Yields every way to give each axis a factor of a size."""
  first, *rest = axes
  if not rest:
    yield {first: size}
    return
  for factor in divisors(size):
    for others in _factored(size // factor, rest):
      yield {first: factor, **others}


def divisors(number: int) -> list[int]:
  """Returns them, the smallest first."""
  small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return sorted({*small, *(number // n for n in small)})


def _allows(model: ModelSizes, sizes: Mapping[str, int]) -> bool:
  """Returns whether axes divide what they cut of a model."""
  tensor, fsdp, expert = sizes["tensor"], sizes["fsdp"], sizes["expert"]
  stages = sizes["pipeline"]
  wide = [
    size
    for weight in model.in_stack
    for dim, size in zip(weight.dims, weight.shape, strict=True)
    if dim == "ffn"
  ]
  return (
    model.least_heads % tensor == 0
    and all(size % tensor == 0 for size in wide)
    and model.dim % fsdp == 0
    and model.num_experts % expert == 0
    and (stages == 1 or (model.repeats > 0 and model.repeats % stages == 0))
  )


def configurations(
  model: ModelSizes, ici: tuple[int, ...], dcn: tuple[int, ...], batch: int
) -> Iterator[Iterator[Configuration]]:
  """Yields series of configurations of a mesh; of each the first that fits is the fastest."""
  base = Configuration(ici=ici, dcn=dcn, batch=batch, residual_over_tensor=model.cuts_sequences)
  shards = math.prod(base.sizes[axis] for axis in mesh.RULES["batch"])
  if batch % shards:
    return
  parts, stages = divisors(batch // shards), base.sizes["pipeline"]
  for remat in _REMATS:
    if stages == 1:
      yield (dataclasses.replace(base, remat=remat, accumulation=count) for count in parts)
      continue
    for pipeline in _pipelines(model, stages, parts):
      yield iter((dataclasses.replace(base, remat=remat, pipeline=pipeline),))


def _pipelines(model: ModelSizes, stages: int, parts: list[int]) -> Iterator[Pipeline]:
  for chunks, count, recompute in itertools.product(
    divisors(model.repeats // stages), parts, (False, True)
  ):
    if chunks > 1 and count % stages:
      continue
    if stages <= count <= _MOST_MICROBATCHES * stages:
      yield Pipeline(
        schedule="1f1b" if chunks == 1 else "interleaved_1f1b",
        stages=stages,
        chunks=chunks,
        microbatches=count,
        recompute=recompute,
      )
